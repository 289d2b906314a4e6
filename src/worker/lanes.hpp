#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/lane.hpp"
#include "worker/stats.hpp"

#include "pg/postgres.hpp"

extern "C" {
#include "port/atomics.h"
#include "storage/lwlock.h"
}

namespace outbox_relay::worker {

/// Everything in this header lies in shared memory and is plain data: no pointer, fd or handle.
/// One LWLock (`lock`) guards it; critical sections are short and never raise. What a committing
/// transaction touches is atomic instead, since it may take no lock. Times of the schedule are
/// microseconds of the monotonic clock, which all processes share.

/// Databases with routes, at a time; tests have to get there.
#ifdef OUTBOX_RELAY_FAULT_POINTS
constexpr int kMaxDatabases = 12;
#else
constexpr int kMaxDatabases = 1024;
#endif
/// Foreign routes of a database that the log names, one by one.
constexpr int kMostForeign = 16;
constexpr std::size_t kErrorBytes = 512;

struct LaneKey {
    Oid database;
    char route[NAMEDATALEN];
    std::uint8_t tenant[16];
    std::uint32_t has_tenant; ///< a word, so that the key has no padding and can be hashed as bytes
};

enum class LaneState : std::uint8_t { idle, due, backoff, refused };

/// A lane: scheduled, backing off and held by one worker at a time. See worker/README.md.
struct Lane {
    bool used;
    std::uint32_t generation; ///< counts up when the slot changes hands or its route changes
    LaneKey key;
    std::uint64_t route_version;

    pg_atomic_uint64 wake_us; ///< when a staging transaction committed since the last claim; 0: none did

    int holder; ///< index of the worker that runs it, -1: none
    LaneState state;
    std::int64_t due_us;
    std::int64_t hold_until_us; ///< wakes do not make it due before this
    core::LaneHealth health;
    core::LanePolicy policy; ///< of its last pass, for one whose worker dies in it
    bool breaker_open;       ///< the next pass is a probe of one row
    bool drained;            ///< in this shutdown
    bool served;             ///< a worker of its database takes it for one of an active route
    bool lists_tenants;      ///< its turns list a route's tenants
    bool listed;             ///< a tenant's: tenants_function listed it last time
    std::uint32_t ordinal;   ///< a tenant's place in that list
    std::uint32_t listing;   ///< of the lane that lists tenants: counts its lists
    std::uint32_t turns;     ///< passes begun, for what alternates from pass to pass

    int remembered_chunk; ///< memory.cpp's chain, -1: none
    std::uint32_t remembered_rows;
    std::uint32_t set_aside; ///< of these, rows that passes leave out

    pg_atomic_uint64 live_claim; ///< processing_at of its live pass on retain storage, 0: none
    pg_atomic_uint32 in_flight;
    float recent_latency[core::kLatencyBuckets]; ///< decaying, for the p95 of spec.md section 4
    Counters counters;
    TimestampTz last_pass_at;
    std::int64_t last_pass_ms;
    TimestampTz last_error_at;
    char last_error[kErrorBytes];
    char error_class[64]; ///< of the lane's current trouble, empty when it has none
    TimestampTz stats_reset;
};

enum class DatabaseState : std::uint8_t { unknown, no_routes, active };

/// What the launcher knows of a database.
struct Database {
    Oid oid; ///< InvalidOid: free
    DatabaseState state;
    pg_atomic_uint32 pokes;   ///< counts transactions that changed its outbox_route
    std::uint32_t pokes_seen; ///< as of the look that found no routes
    pg_atomic_uint32 lists;   ///< counts changes in the tenants of its routes
    std::int64_t last_start_us;
    std::uint32_t failures; ///< starts in a row that came to nothing
    int drains_beyond;    ///< index of the worker that drains routes without a slot at shutdown, -1: none yet
    bool no_slot;         ///< it has no worker, for the server has no slot for one
    bool overflow_warned; ///< said once that there are more lanes than slots
    std::uint32_t
        foreign_warned[kMostForeign]; ///< hashes of the names of routes that were said to be foreign
};

enum class Phase : std::uint8_t { starting, idle, claim, publish, settle, commit };

/// A relay worker process.
struct WorkerSlot {
    bool used;
    std::uint32_t generation;
    int pid; ///< 0 until it has attached
    Oid database;
    int lane; ///< index, -1: none
    Phase phase;
    TimestampTz since;
    std::int64_t started_us;
    pg_atomic_uint32 proc;    ///< index of its PGPROC + 1; 0: not attached
    pg_atomic_uint32 waiting; ///< sleeps on its latch and wants to be woken
};

struct Shared {
    LWLock *lock;
    int max_lanes;
    int max_workers;
    pg_atomic_uint32 launcher_proc; ///< index of the launcher's PGPROC + 1; 0: none
    int launcher_pid;
    pg_atomic_uint32
        launcher_told;           ///< SIGTERM came to the launcher, as to everybody at the server's shutdown
    pg_atomic_uint32 lost_pokes; ///< counts pokes of databases that had no slot
    alignas(64) std::int64_t hlc_last; ///< the clock: a cache line of its own, stagers write it all the time
    alignas(64) Database databases[kMaxDatabases];
};

/// Asks the server for the memory and the lock, and sets both up; in the postmaster only.
void request_shared_memory();

/// nullptr when the library was not preloaded.
Shared *shared();
Lane &lane_at(int index);
WorkerSlot &worker_at(int index);

/// Holds the lock for a C++ scope. Nothing inside may raise: an error would release the lock under us.
class LockedLanes {
  public:
    explicit LockedLanes(LWLockMode mode);
    ~LockedLanes();
    LockedLanes(const LockedLanes &) = delete;
    LockedLanes &operator=(const LockedLanes &) = delete;
};

std::optional<core::Uuid> tenant_of(const LaneKey &key);

LaneKey lane_key(Oid database, const std::string &route, const std::optional<core::Uuid> &tenant);

/// The lane of this key, -1 when it has no slot. Under the lock.
int find_lane(const LaneKey &key);

/// The lane of this key, made if need be and due at once; -1 when every slot is taken. Under the
/// lock, exclusive.
int make_lane(const LaneKey &key);

/// Gives another lane's slot, of those that are due after `due_us` the last, to the lane of this key, which
/// has none; -1 when there is no such lane. Idle healthy lanes come first, then those that back off, which
/// lose what is known of their trouble; one that lists tenants gives way only for another such. The other
/// then takes its turn in the same way. Under the lock, exclusive.
int seize_lane(const LaneKey &key, std::int64_t due_us, bool for_list);

/// Gives a lane's slot back. Under the lock, exclusive; the lane has no holder.
void drop_lane(int index);

/// Finds the slot of a database, or takes a free one when `make`, at need that of a database with nothing to
/// relay; -1 when there is none. Under the lock, exclusive when `make`.
int find_database(Oid oid, bool make);

/// Sets the latch of the process in PGPROC `proc_plus_one` - 1, if any. Safe at commit.
void wake_process(std::uint32_t proc_plus_one);

/// Wakes one worker of `database` that waits for work. Safe at commit: takes no lock, can't raise.
void wake_worker(Oid database);

/// Copies UTF-8 `text` into a fixed field, cleaned and cut on a character's edge. Texts in shared
/// memory are UTF-8 whatever the databases' encodings are.
void copy_text(char *field, std::size_t size, const std::string &text);

} // namespace outbox_relay::worker
