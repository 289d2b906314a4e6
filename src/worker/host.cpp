#include "worker/host.hpp"

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstring>

#include <sys/resource.h>

#include "settings/settings.hpp"
#include "worker/fault.hpp"

#include "pg/clock.hpp"
#include "pg/compat.hpp"
#include "pg/guard.hpp"

extern "C" {
#include "catalog/pg_database.h"
#include "pgstat.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "storage/pmsignal.h"
#include "tcop/tcopprot.h"
#include "utils/pidfile.h"
#include "utils/timestamp.h"
}

namespace outbox_relay::worker {

Signals signals;

namespace {

constexpr std::int64_t kProbeEvery_us = 500'000;
constexpr std::int64_t kLauncherHas_us = 1'000'000;

extern "C" {

static void outbox_relay_terminate(SIGNAL_ARGS) {
    const int saved = errno;
    signals.terminate = 1;
    if (signals.in_commit)
        end_commit_wait();
    else if (signals.may_die)
        die(postgres_signal_arg);
    else
        SetLatch(MyLatch);
    errno = saved;
}
}

} // namespace

void end_commit_wait() {
    QueryCancelPending = true;
    SetLatch(MyLatch);
}

void install_signal_handlers() {
    signals.terminate = 0;
    signals.may_die = 0;
    signals.in_commit = 0;
    pg::compat::set_signal(SIGHUP, SignalHandlerForConfigReload);
    pg::compat::set_signal(SIGTERM, outbox_relay_terminate);
}

namespace {

/// What postmaster.pid says. From a smart shutdown's request on, however long its clients stay.
bool server_is_to_stop() {
    std::FILE *file = std::fopen("postmaster.pid", "r");
    if (file == nullptr)
        return true;
    char line[MAXPGPATH] = "";
    bool stopping = false;
    for (int number = 1; std::fgets(line, sizeof(line), file) != nullptr; ++number)
        if (number == LOCK_FILE_LINE_PM_STATUS)
            stopping = std::strncmp(line, PM_STATUS_STOPPING, std::strlen("stopping")) == 0;
    (void)std::fclose(file);
    return stopping;
}

bool launcher_is_told() {
    return pg_atomic_read_u32(&shared()->launcher_told) != 0 ||
           pg_atomic_read_u32(&shared()->launcher_proc) == 0;
}

} // namespace

bool server_is_stopping() {
    if (!server_is_to_stop())
        return false;
    // The postmaster ends all background workers at once, and us maybe a moment before the launcher.
    const std::int64_t until_us = pg::monotonic_us() + kLauncherHas_us;
    while (!launcher_is_told() && pg::monotonic_us() < until_us)
        pg_usleep(2000);
    return launcher_is_told();
}

namespace {

/// Monotonic; 0: no drain has begun.
std::int64_t drain_end_us = 0;

std::int64_t drain_time_us() {
    return std::int64_t{1000} * settings::parameters.shutdown_drain_timeout_ms;
}

} // namespace

void begin_drain() {
    if (drain_end_us == 0)
        drain_end_us = pg::monotonic_us() + drain_time_us();
}

bool is_draining() {
    return drain_end_us != 0;
}

std::int64_t drain_left_us() {
    return is_draining() ? drain_end_us - pg::monotonic_us() : 0;
}

void keep_time_to_commit(store::Effective &settings) {
    const std::int64_t left_ms = std::max<std::int64_t>(drain_left_us() / 1000, 5);
    settings.pass_deadline_ms = std::min(settings.pass_deadline_ms, left_ms - left_ms / 5);
    settings.pass_statement_timeout_ms = std::min(settings.pass_statement_timeout_ms, left_ms / 5);
}

bool database_is_wanted(Oid database) {
    return pg::guard([database] {
        LOCKTAG tag;
        SET_LOCKTAG_OBJECT(tag, InvalidOid, DatabaseRelationId, database, 0);
        if (LockAcquire(&tag, RowExclusiveLock, true, true) == LOCKACQUIRE_NOT_AVAIL)
            return true;
        (void)LockRelease(&tag, RowExclusiveLock, true);
        return false;
    });
}

std::int64_t most_requests_in_flight() {
    constexpr std::int64_t kEnough = 1'000'000;
    rlimit files{};
    if (getrlimit(RLIMIT_NOFILE, &files) != 0 || files.rlim_cur == RLIM_INFINITY)
        return kEnough;
    // Newer libcurls hold more than one for a request: connections that are being closed, and their own.
    return std::clamp<std::int64_t>(static_cast<std::int64_t>(files.rlim_cur / 4), 1, kEnough);
}

void show_phase(WorkerSlot &slot, Phase phase) {
    slot.phase = phase;
    slot.since = GetCurrentTimestamp();
}

void VisibleWaits::poll(int max_wait_ms, std::vector<core::Reply> &replies) {
    if (transport_ == nullptr)
        return;
    pgstat_report_wait_start(wait_event_);
    try {
        transport_->poll(max_wait_ms, replies);
    } catch (...) {
        pgstat_report_wait_end();
        throw;
    }
    pgstat_report_wait_end();
}

void WorkerHost::show(Phase phase) {
    show_phase(slot_, phase);
}

core::PassHost::Order WorkerHost::pulse() {
    pg::guard([] { CHECK_FOR_INTERRUPTS(); });
    if (!PostmasterIsAlive())
        proc_exit(1);
    if (transport_ != nullptr)
        pg_atomic_write_u32(&lane_.in_flight, static_cast<std::uint32_t>(transport_->in_flight()));
    if (leaving_)
        return Order::leave;
    const std::int64_t now_us = pg::monotonic_us();
    if (now_us - probed_us_ > kProbeEvery_us) {
        probed_us_ = now_us;
        leaving_ = database_is_wanted(MyDatabaseId);
        if (leaving_)
            signals.terminate = 1;
    }
    if (!signals.terminate)
        return leaving_ ? Order::leave : Order::go_on;
    if (!server_is_stopping()) {
        leaving_ = true;
        return Order::leave;
    }
    if (!drains_)
        return Order::finish;
    begin_drain();
    // A pass that was under way when the signal came has the deadline of its route, not the drain's.
    return drain_left_us() > drain_time_us() / 5 ? Order::go_on : Order::leave;
}

bool WorkerHost::has_to_leave() const {
    return leaving_ || (signals.terminate && !server_is_stopping());
}

void WorkerHost::at(core::PassPoint point, std::size_t count) {
    switch (point) {
    case core::PassPoint::after_begin:
        show(Phase::claim);
        break;
    case core::PassPoint::in_claim:
        // From here on rows may be `processing` that only this pass gives back.
        signals.may_die = 0;
        break;
    case core::PassPoint::after_claim:
        // From here on an answer may have come that only a settled pass remembers. What a target inside the
        // database was given is undone with the pass.
        if (transport_ != nullptr)
            signals.may_die = 0;
        show(Phase::publish);
        pg::guard([] { pgstat_report_activity(STATE_RUNNING, "outbox_relay: publish"); });
        break;
    case core::PassPoint::before_settle:
        pg_atomic_write_u32(&lane_.in_flight, 0);
        show(Phase::settle);
        break;
    case core::PassPoint::before_commit:
        show(Phase::commit);
        break;
    default:
        break;
    }
    reach_fault_point(point, count);
}

} // namespace outbox_relay::worker
