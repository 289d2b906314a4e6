/// The relay worker as a process: attaches to the slot that the launcher reserved, connects, relays,
/// and leaves the slot and its lane in order however it ends.

#include "core/lane.hpp"
#include "worker/commit_wait.hpp"
#include "worker/host.hpp"
#include "worker/lanes.hpp"
#include "worker/relay.hpp"

#include "pg/clock.hpp"
#include "pg/compat.hpp"
#include "pg/entry.hpp"
#include "pg/session.hpp"

extern "C" {
#include "access/xact.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "storage/ipc.h"
#include "storage/lock.h"
#include "storage/proc.h"
#include "utils/timestamp.h"

PGDLLEXPORT void outbox_relay_worker_main(Datum argument);
}

namespace outbox_relay::worker {

namespace {

/// A lane whose worker died in the middle of a pass: the pass has failed, as far as anybody can know.
/// An eviction is nobody's fault: the lane stays due.
void give_lane_back(Lane &lane) noexcept {
    lane.holder = -1;
    pg_atomic_write_u64(&lane.live_claim, 0);
    pg_atomic_write_u32(&lane.in_flight, 0);
    if (signals.terminate) {
        lane.due_us = 0;
        return;
    }
    const core::NextTurn next = core::after_failure(lane.health, lane.policy);
    ++lane.counters.failed_passes;
    lane.state = LaneState::backoff;
    lane.due_us = pg::monotonic_us() + next.wait_us;
    lane.hold_until_us = lane.due_us;
    lane.last_error_at = GetCurrentTimestamp();
    strlcpy(lane.last_error, "the worker ended in the middle of a pass; the server log says why",
            sizeof(lane.last_error));
}

extern "C" {

/// Before the process gives its latch up. May run for a FATAL in any place: no C++ object, no raise.
static void outbox_relay_worker_gone(int, Datum argument) {
    WorkerSlot &slot = worker_at(DatumGetInt32(argument));
    pg_atomic_write_u32(&slot.waiting, 0);
    pg_atomic_write_u32(&slot.proc, 0);
    LWLockReleaseAll();
    (void)LWLockAcquire(shared()->lock, LW_EXCLUSIVE);
    if (slot.lane >= 0)
        give_lane_back(lane_at(slot.lane));
    slot.lane = -1;
    slot.used = false;
    slot.pid = 0;
    ++slot.generation;
    LWLockRelease(shared()->lock);
    wake_process(pg_atomic_read_u32(&shared()->launcher_proc));
    // A retain pass keeps the extension for its session: at a process's end the server lets go of a
    // transaction's locks and of advisory ones alone, and that one would stay with the process's place for
    // good.
    AbortOutOfAnyTransaction();
    LockReleaseAll(DEFAULT_LOCKMETHOD, true);
}
}

/// Takes the reserved slot; false when the launcher has given this start up.
bool attach(int index, Oid &database) {
    LockedLanes locked(LW_EXCLUSIVE);
    WorkerSlot &slot = worker_at(index);
    if (!slot.used || slot.pid != 0)
        return false;
    slot.pid = MyProcPid;
    slot.since = GetCurrentTimestamp();
    pg_atomic_write_u32(&slot.proc, static_cast<std::uint32_t>(MyProc - ProcGlobal->allProcs) + 1);
    database = slot.database;
    return true;
}

/// What the bootstrap superuser or the database may have set and a pass relies on.
void pin_session() {
    pg::pin_setting("search_path", "pg_catalog, pg_temp");
    pg::pin_setting("row_security", "on");
    pg::pin_setting("jit", "off");
    pg::pin_setting("default_transaction_isolation", "read committed");
    pg::pin_setting("default_transaction_read_only", "off");
    pg::pin_setting("default_transaction_deferrable", "off");
    pg::pin_setting("session_replication_role", "origin");
}

void run(int index) {
    Oid database = InvalidOid;
    if (!attach(index, database))
        return;
    before_shmem_exit(outbox_relay_worker_gone, Int32GetDatum(index));
    pg::guard([database] { BackgroundWorkerInitializeConnectionByOid(database, InvalidOid, 0); });
    pin_session();
    signals.may_die = 0;
    bound_commit_wait();
    Relay relay(index);
    relay.run();
    relay.drain();
}

} // namespace

} // namespace outbox_relay::worker

void outbox_relay_worker_main(Datum argument) {
    outbox_relay::worker::install_signal_handlers();
    // Until it is connected there is nothing to finish: SIGTERM may end it anywhere.
    outbox_relay::worker::signals.may_die = 1;
    BackgroundWorkerUnblockSignals();
    pg::entry([argument] { outbox_relay::worker::run(DatumGetInt32(argument)); });
    // 1, not 0: the launcher decides whether somebody comes back, the exit status is only for the log.
    proc_exit(1);
}
