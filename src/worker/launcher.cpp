#include "worker/launcher.hpp"

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "settings/settings.hpp"
#include "worker/commit_wait.hpp"
#include "worker/host.hpp"
#include "worker/lanes.hpp"

#include "pg/clock.hpp"
#include "pg/compat.hpp"
#include "pg/entry.hpp"
#include "pg/guard.hpp"

extern "C" {
#include "access/genam.h"
#include "access/heapam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/tableam.h"
#include "access/xact.h"
#include "catalog/pg_database.h"
#include "pgstat.h"
#include "postmaster/bgworker.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "storage/procsignal.h"
#include "utils/guc.h"
#include "utils/rel.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"

PGDLLEXPORT void outbox_relay_launcher_main(Datum argument);
}

namespace outbox_relay::worker {

namespace {

constexpr std::int64_t kListEvery_us = 5'000'000; ///< how often pg_database is read again
constexpr std::int64_t kCommitEvery_us = 500'000; ///< how often workers that wait for standbys are seen after
constexpr std::int64_t kMinGap_us = 1'000'000;    ///< between two starts for one database
constexpr std::int64_t kMaxGap_us = 60'000'000;   ///< the same, when starts come to nothing
constexpr std::int64_t kStartWithin_us = 2'000'000;   ///< a start that takes longer holds up no other
constexpr std::int64_t kAttachWithin_us = 60'000'000; ///< a start that took longer is given up

struct DatabaseRow {
    Oid oid;
    bool served; ///< connectable, no template, listed in outbox_relay.databases
};

bool is_served(const FormData_pg_database &row) {
    return row.datallowconn && !row.datistemplate && row.datconnlimit != -2 &&
           settings::database_listed(settings::parameters.databases, NameStr(row.datname));
}

/// Starts and restarts the relay workers. Holds nothing that a crash could lose: the slots in shared
/// memory say who runs, pg_database says where to look.
class Launcher {
  public:
    void run() {
        const std::uint32_t wait_event =
            pg::guard([] { return pg::compat::wait_event("OutboxRelayLauncher"); });
        while (true) {
            warn_of_short_drain();
            const long wait_ms = static_cast<long>(turn_us() / 1000) + 1;
            pg::guard([wait_ms, wait_event] {
                (void)WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, wait_ms,
                                wait_event);
                ResetLatch(MyLatch);
                QueryCancelPending = false; // there is no statement to cancel
                CHECK_FOR_INTERRUPTS();
                if (ConfigReloadPending) {
                    ConfigReloadPending = false;
                    ProcessConfigFile(PGC_SIGHUP);
                }
            });
            if (ShutdownRequestPending)
                proc_exit(1);
        }
    }

  private:
    /// One look at everything; how long to sleep until the next.
    std::int64_t turn_us() {
        const std::int64_t now_us = pg::monotonic_us();
        if (now_us >= list_at_us_ || reloaded()) {
            read_databases();
            list_at_us_ = now_us + kListEvery_us;
        }
        free_failed_starts(now_us);
        remember_idle();
        std::int64_t wait_us = waits_for_standbys() ? kCommitEvery_us : kListEvery_us;
        if (waits_for_standbys())
            end_long_commits();
        if (settings::parameters.enabled)
            for (const DatabaseRow &row : databases_)
                if (row.served)
                    wait_us = std::min(wait_us, serve(row.oid, now_us));
        warn_of_databases();
        return std::max<std::int64_t>(wait_us, 10'000);
    }

    /// A worker that waits for a synchronous standby looks at nothing: where its database is wanted by
    /// somebody, it is asked to end for it.
    static void end_long_commits() {
        struct Committing {
            Oid database;
            int pid;
        };
        std::vector<Committing> committing;
        committing.reserve(static_cast<std::size_t>(shared()->max_workers));
        const TimestampTz before =
            TimestampTzPlusMilliseconds(GetCurrentTimestamp(), -kCommitEvery_us / 1000);
        {
            LockedLanes locked(LW_SHARED);
            for (int i = 0; i < shared()->max_workers; ++i) {
                const WorkerSlot &slot = worker_at(i);
                if (slot.used && slot.pid != 0 && slot.phase == Phase::commit && slot.since < before)
                    committing.push_back({slot.database, slot.pid});
            }
        }
        for (const Committing &worker : committing)
            if (database_is_wanted(worker.database))
                (void)kill(worker.pid, SIGTERM);
    }

    /// Ends the workers of databases that are not served any more.
    void end_unserved() {
        std::vector<int> pids;
        pids.reserve(static_cast<std::size_t>(shared()->max_workers));
        {
            LockedLanes locked(LW_SHARED);
            for (int i = 0; i < shared()->max_workers; ++i) {
                const WorkerSlot &slot = worker_at(i);
                const bool unserved =
                    std::any_of(databases_.begin(), databases_.end(), [&slot](const DatabaseRow &row) {
                        return row.oid == slot.database && !row.served;
                    });
                if (slot.used && slot.pid != 0 && unserved)
                    pids.push_back(slot.pid);
            }
        }
        for (const int pid : pids)
            (void)kill(pid, SIGTERM);
    }

    /// A database without routes may lose its slot to another; it is not looked at again for that.
    void remember_idle() {
        const std::uint32_t lost_pokes = pg_atomic_read_u32(&shared()->lost_pokes);
        if (lost_pokes != lost_pokes_)
            idle_.clear();
        lost_pokes_ = lost_pokes;
        std::vector<std::pair<Oid, bool>> known;
        known.reserve(kMaxDatabases);
        {
            LockedLanes locked(LW_SHARED);
            for (const Database &database : shared()->databases)
                if (database.oid != InvalidOid)
                    known.emplace_back(database.oid, database.state == DatabaseState::no_routes);
        }
        for (const auto &[oid, idle] : known) {
            if (idle)
                idle_.insert(oid);
            else
                idle_.erase(oid);
        }
    }

    /// Under the lock: no slot is one of a database that may turn out to have no routes.
    static bool all_active() {
        return std::all_of(std::begin(shared()->databases), std::end(shared()->databases),
                           [](const Database &database) { return database.state == DatabaseState::active; });
    }

    void warn_of_databases() {
        if (full_ && !full_said_)
            pg::report_at(WARNING, {ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
                                    "more databases have routes of outbox_relay than the " +
                                        std::to_string(kMaxDatabases) + " that it serves",
                                    "Those beyond wait until another has no enabled route any more."});
        full_said_ = full_said_ || full_;
        full_ = false;
    }

    /// Once for each time that the settings become so.
    void warn_of_short_drain() {
        const bool is_short = settings::drain_is_short();
        if (is_short && !short_drain_)
            pg::report_at(WARNING,
                          {ERRCODE_INVALID_PARAMETER_VALUE,
                           "outbox_relay.shutdown_drain_timeout is below five times "
                           "outbox_relay.pass_statement_timeout",
                           "A drain leaves its last fifth to the closing statements of its last pass.",
                           "Raise the one or lower the other, or that pass may be cut and rolled back."});
        short_drain_ = is_short;
    }

    /// True when a reload changed what may be relayed: databases in which nothing was are looked at again.
    bool reloaded() {
        const std::string now =
            std::string(settings::parameters.databases) + '\n' + settings::parameters.environment;
        const bool changed = now != listed_;
        listed_ = now;
        if (!changed)
            return false;
        idle_.clear();
        LockedLanes locked(LW_EXCLUSIVE);
        for (Database &database : shared()->databases)
            if (database.oid != InvalidOid && database.state == DatabaseState::no_routes)
                database.state = DatabaseState::unknown;
        return true;
    }

    void read_databases() {
        databases_.clear();
        pg::guard([] {
            StartTransactionCommand();
            (void)GetTransactionSnapshot();
        });
        struct Scan {
            Relation relation;
            TableScanDesc scan;
        };
        const Scan scan = pg::guard([] {
            Relation relation = table_open(DatabaseRelationId, AccessShareLock);
            return Scan{relation, table_beginscan_catalog(relation, 0, nullptr)};
        });
        while (true) {
            HeapTuple tuple = pg::guard([&scan] { return heap_getnext(scan.scan, ForwardScanDirection); });
            if (tuple == nullptr)
                break;
            const auto *form = reinterpret_cast<Form_pg_database>(GETSTRUCT(tuple));
            databases_.push_back({form->oid, is_served(*form)});
        }
        pg::guard([&scan] {
            table_endscan(scan.scan);
            table_close(scan.relation, AccessShareLock);
            CommitTransactionCommand();
            MemoryContextSwitchTo(TopMemoryContext);
        });
        forget_dropped();
        end_unserved();
    }

    /// Frees the slots of databases that are gone, and their lanes.
    void forget_dropped() {
        LockedLanes locked(LW_EXCLUSIVE);
        for (Database &database : shared()->databases) {
            if (database.oid == InvalidOid || running(database.oid) > 0)
                continue;
            const Oid oid = database.oid;
            const bool exists = std::any_of(databases_.begin(), databases_.end(),
                                            [oid](const DatabaseRow &row) { return row.oid == oid; });
            if (exists)
                continue;
            for (int i = 0; i < shared()->max_lanes; ++i)
                if (lane_at(i).used && lane_at(i).key.database == oid)
                    drop_lane(i);
            database.oid = InvalidOid;
        }
    }

    /// Workers of a database, those on their way included. Under the lock.
    static int running(Oid database) {
        int count = 0;
        for (int i = 0; i < shared()->max_workers; ++i)
            if (worker_at(i).used && worker_at(i).database == database)
                ++count;
        return count;
    }

    /// One that takes long waits for somebody's lock on its database, which is nothing to the others.
    static bool start_under_way(std::int64_t now_us) {
        for (int i = 0; i < shared()->max_workers; ++i) {
            const WorkerSlot &slot = worker_at(i);
            if (slot.used && slot.phase == Phase::starting && now_us - slot.started_us < kStartWithin_us)
                return true;
        }
        return false;
    }

    /// Gives up starts whose process died before it attached, or that another launcher made.
    void free_failed_starts(std::int64_t now_us) {
        handles_.resize(static_cast<std::size_t>(shared()->max_workers));
        for (int i = 0; i < shared()->max_workers; ++i) {
            BackgroundWorkerHandle *&handle = handles_[static_cast<std::size_t>(i)];
            WorkerSlot &slot = worker_at(i);
            bool stopped = false;
            if (handle != nullptr) {
                pid_t pid = 0;
                stopped = pg::guard([&] { return GetBackgroundWorkerPid(handle, &pid); }) == BGWH_STOPPED;
            }
            LockedLanes locked(LW_EXCLUSIVE);
            const bool waits = slot.used && slot.pid == 0;
            if (waits && (stopped || now_us - slot.started_us > kAttachWithin_us)) {
                slot.used = false;
                ++slot.generation;
            }
            if (stopped) {
                pfree(handle);
                handle = nullptr;
            }
        }
    }

    /// Starts what a database lacks; microseconds until it is worth another look.
    std::int64_t serve(Oid oid, std::int64_t now_us) {
        std::vector<int> slots;
        {
            LockedLanes locked(LW_EXCLUSIVE);
            int index = find_database(oid, false);
            if (index < 0 && idle_.contains(oid))
                return kListEvery_us;
            if (index < 0)
                index = find_database(oid, true);
            if (index < 0) {
                full_ = full_ || all_active();
                return kListEvery_us;
            }
            Database &database = shared()->databases[index];
            const int have = running(oid);
            if (have > 0)
                database.no_slot = false;
            int want = database.state == DatabaseState::active ? settings::parameters.workers : 0;
            const bool look = database.state == DatabaseState::unknown ||
                              (have == 0 && pg_atomic_read_u32(&database.pokes) != database.pokes_seen);
            if (look)
                want = std::max(want, 1);
            if (have >= want)
                return kListEvery_us;
            const std::int64_t gap_us =
                std::min(kMaxGap_us, kMinGap_us << std::min<std::uint32_t>(database.failures, 6));
            const std::int64_t due_us = database.last_start_us + (database.last_start_us == 0 ? 0 : gap_us);
            if (now_us < due_us)
                return due_us - now_us;
            // Looking is done one database at a time: a server may have a thousand without a route.
            if (database.state == DatabaseState::unknown && start_under_way(now_us))
                return 50'000;
            database.last_start_us = now_us;
            ++database.failures;
            reserve(oid, want - have, now_us, slots);
            if (slots.empty())
                lacks_slot(oid);
        }
        for (const int slot : slots)
            start(slot, oid);
        return kMinGap_us;
    }

    static void reserve(Oid oid, int count, std::int64_t now_us, std::vector<int> &slots) {
        for (int i = 0; i < shared()->max_workers && count > 0; ++i) {
            WorkerSlot &slot = worker_at(i);
            if (slot.used)
                continue;
            slot.used = true;
            ++slot.generation;
            slot.pid = 0;
            slot.database = oid;
            slot.lane = -1;
            slot.phase = Phase::starting;
            slot.since = GetCurrentTimestamp();
            slot.started_us = now_us;
            pg_atomic_write_u32(&slot.proc, 0);
            pg_atomic_write_u32(&slot.waiting, 0);
            slots.push_back(i);
            --count;
        }
    }

    /// Under the lock: there was no slot for a worker of this database, which is no start that came to
    /// nothing.
    static void lacks_slot(Oid oid) {
        const int index = find_database(oid, false);
        if (index < 0)
            return;
        Database &database = shared()->databases[index];
        database.no_slot = running(oid) == 0;
        database.failures -= std::min<std::uint32_t>(database.failures, 1);
    }

    void start(int slot, Oid oid) {
        BackgroundWorker worker;
        MemSet(&worker, 0, sizeof(worker));
        worker.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
        worker.bgw_start_time = BgWorkerStart_RecoveryFinished;
        // The launcher is the only one who restarts: the postmaster would go on for a dropped database.
        worker.bgw_restart_time = BGW_NEVER_RESTART;
        worker.bgw_notify_pid = MyProcPid;
        worker.bgw_main_arg = Int32GetDatum(slot);
        strlcpy(worker.bgw_library_name, "outbox_relay", sizeof(worker.bgw_library_name));
        strlcpy(worker.bgw_function_name, "outbox_relay_worker_main", sizeof(worker.bgw_function_name));
        strlcpy(worker.bgw_type, "outbox_relay worker", sizeof(worker.bgw_type));
        pg_snprintf(worker.bgw_name, sizeof(worker.bgw_name), "outbox_relay worker for database %u", oid);
        BackgroundWorkerHandle *handle = nullptr;
        const bool registered = pg::guard([&] { return RegisterDynamicBackgroundWorker(&worker, &handle); });
        if (registered) {
            handles_[static_cast<std::size_t>(slot)] = handle;
            no_slots_said_ = false;
            return;
        }
        {
            LockedLanes locked(LW_EXCLUSIVE);
            worker_at(slot).used = false;
            lacks_slot(oid);
        }
        if (!no_slots_said_)
            pg::report_at(LOG, {ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
                                "no background worker slot is free for outbox_relay",
                                "Routes whose database has no worker wait; starting one is tried again.",
                                "Raise max_worker_processes."});
        no_slots_said_ = true;
    }

    std::vector<DatabaseRow> databases_;
    std::vector<BackgroundWorkerHandle *> handles_;
    std::string listed_;
    bool short_drain_ = false;
    std::int64_t list_at_us_ = 0;
    bool no_slots_said_ = false;
    std::set<Oid> idle_; ///< databases that were found to have no routes
    std::uint32_t lost_pokes_ = 0;
    bool full_ = false; ///< a database got no slot in this turn
    bool full_said_ = false;
};

extern "C" {

static void outbox_relay_launcher_told(SIGNAL_ARGS) {
    pg_atomic_write_u32(&shared()->launcher_told, 1);
    SignalHandlerForShutdownRequest(postgres_signal_arg);
}

static void outbox_relay_launcher_gone(int, Datum) {
    pg_atomic_write_u32(&shared()->launcher_proc, 0);
    shared()->launcher_pid = 0;
}
}

} // namespace

bool serves(Oid database) {
    return pg::guard([database] {
        HeapTuple row = SearchSysCache1(DATABASEOID, ObjectIdGetDatum(database));
        if (!HeapTupleIsValid(row))
            return false;
        const bool served = is_served(*reinterpret_cast<Form_pg_database>(GETSTRUCT(row)));
        ReleaseSysCache(row);
        return served;
    });
}

void register_workers() {
    request_shared_memory();
    BackgroundWorker launcher;
    MemSet(&launcher, 0, sizeof(launcher));
    launcher.bgw_flags = BGWORKER_SHMEM_ACCESS | BGWORKER_BACKEND_DATABASE_CONNECTION;
    launcher.bgw_start_time = BgWorkerStart_RecoveryFinished;
    launcher.bgw_restart_time = 2;
    strlcpy(launcher.bgw_library_name, "outbox_relay", sizeof(launcher.bgw_library_name));
    strlcpy(launcher.bgw_function_name, "outbox_relay_launcher_main", sizeof(launcher.bgw_function_name));
    strlcpy(launcher.bgw_name, "outbox_relay launcher", sizeof(launcher.bgw_name));
    strlcpy(launcher.bgw_type, "outbox_relay launcher", sizeof(launcher.bgw_type));
    RegisterBackgroundWorker(&launcher);
}

} // namespace outbox_relay::worker

using namespace outbox_relay;

void outbox_relay_launcher_main(Datum) {
    pg::compat::set_signal(SIGHUP, SignalHandlerForConfigReload);
    pg_atomic_write_u32(&worker::shared()->launcher_told, 0);
    pg::compat::set_signal(SIGTERM, worker::outbox_relay_launcher_told);
    BackgroundWorkerUnblockSignals();
    // Shared catalogs only: the launcher is connected to no database and stands in nobody's way.
    BackgroundWorkerInitializeConnection(nullptr, nullptr, 0);
    before_shmem_exit(worker::outbox_relay_launcher_gone, 0);
    worker::shared()->launcher_pid = MyProcPid;
    pg_atomic_write_u32(&worker::shared()->launcher_proc,
                        static_cast<std::uint32_t>(MyProc - ProcGlobal->allProcs) + 1);
    pg::entry([] {
        worker::Launcher launcher;
        launcher.run();
    });
}
