#include "worker/wake.hpp"

#include <algorithm>
#include <cstring>

#include "worker/lanes.hpp"

#include "pg/clock.hpp"
#include "pg/guard.hpp"

extern "C" {
#include "access/xact.h"
#include "utils/memutils.h"
}

namespace outbox_relay::worker {

namespace {

/// What to wake at commit: a lane, or all tenants' lanes of a route.
struct Pending {
    LaneKey key;
    int lane; ///< its slot when its rows were staged, -1: it had none
    bool all_tenants;
};

/// A row to let go at commit.
struct AsideId {
    int lane;
    std::uint32_t generation;
    core::Uuid id;
};

/// What this transaction has to do when it commits. The callback may not allocate: fixed memory, or the
/// transaction's own.
constexpr int kMaxPending = 64;

struct AtCommit {
    Pending wakes[kMaxPending];
    int count = 0;
    bool every_lane = false; ///< of more routes than fit
    AsideId *aside = nullptr;
    std::size_t aside_count = 0;
    bool poked = false;
};

AtCommit at_commit;
bool registered = false;

void make_due(Lane &lane) {
    std::uint64_t expected = 0;
    (void)pg_atomic_compare_exchange_u64(&lane.wake_us, &expected,
                                         static_cast<std::uint64_t>(pg::monotonic_us()));
}

bool same_route(const LaneKey &a, const LaneKey &b) {
    return a.database == b.database && std::memcmp(a.route, b.route, sizeof(a.route)) == 0;
}

bool wakes(const Pending &pending, const LaneKey &key) {
    return pending.all_tenants ? key.has_tenant != 0 && same_route(pending.key, key)
                               : std::memcmp(&pending.key, &key, sizeof(key)) == 0;
}

/// Wakes the lane where it was when its rows were staged; false when it is not there. Without the lock: who
/// gives the slot away at this moment makes the lane anew, and due.
bool wake_known(const Pending &pending) noexcept {
    if (pending.lane < 0)
        return false;
    Lane &lane = lane_at(pending.lane);
    if (!lane.used || !wakes(pending, lane.key))
        return false;
    make_due(lane);
    return true;
}

/// Looks for the lanes of the first `count` wakes by their keys. One that has no slot is found by nobody:
/// when it is made it is due at once, and its first pass sees these rows.
void wake_others(int count) noexcept {
    for (int i = 0; i < shared()->max_lanes; ++i) {
        Lane &lane = lane_at(i);
        if (!lane.used || lane.key.database != MyDatabaseId)
            continue;
        bool due = at_commit.every_lane;
        for (int at = 0; at < count && !due; ++at)
            due = wakes(at_commit.wakes[at], lane.key);
        if (due)
            make_due(lane);
    }
}

/// Rarely done, so the lock is taken: that raises nothing.
void let_rows_go() {
    if (at_commit.aside_count == 0)
        return;
    LockedLanes locked(LW_EXCLUSIVE);
    for (std::size_t i = 0; i < at_commit.aside_count; ++i) {
        const AsideId &row = at_commit.aside[i];
        Lane &lane = lane_at(row.lane);
        if (lane.used && lane.generation == row.generation)
            let_go(lane, &row.id);
    }
}

/// Counts a change of this database's routes. Its slot may have been given away since the trigger took it, or
/// just be: then the launcher looks again at all databases that have none.
void poke() noexcept {
    for (Database &database : shared()->databases) {
        if (database.oid != MyDatabaseId)
            continue;
        (void)pg_atomic_fetch_add_u32(&database.pokes, 1);
        if (database.oid == MyDatabaseId)
            return;
    }
    (void)pg_atomic_fetch_add_u32(&shared()->lost_pokes, 1);
}

/// After ProcArrayEndTransaction: the rows are visible. Raising here would be a PANIC, so: atomics
/// and latches, and what can't fail.
void committed() noexcept {
    let_rows_go();
    const bool staged = at_commit.count > 0 || at_commit.every_lane;
    int others = 0;
    for (int i = 0; i < at_commit.count; ++i)
        if (!wake_known(at_commit.wakes[i]))
            at_commit.wakes[others++] = at_commit.wakes[i];
    if (others > 0 || at_commit.every_lane)
        wake_others(others);
    if (staged)
        wake_worker(MyDatabaseId);
    if (at_commit.poked) {
        poke();
        wake_process(pg_atomic_read_u32(&shared()->launcher_proc));
        wake_worker(MyDatabaseId);
    }
}

void forget() noexcept {
    at_commit.count = 0;
    at_commit.every_lane = false;
    at_commit.aside = nullptr;
    at_commit.aside_count = 0;
    at_commit.poked = false;
}

extern "C" {

static void outbox_relay_at_transaction_end(XactEvent event, void *) {
    switch (event) {
    case XACT_EVENT_COMMIT:
        committed();
        forget();
        break;
    case XACT_EVENT_ABORT:
    case XACT_EVENT_PREPARE:
        forget();
        break;
    default:
        break;
    }
}
}

void listen() {
    if (registered)
        return;
    pg::guard([] { RegisterXactCallback(outbox_relay_at_transaction_end, nullptr); });
    registered = true;
}

bool is_pending(const LaneKey &key) {
    for (int i = 0; i < at_commit.count; ++i)
        if (wakes(at_commit.wakes[i], key))
            return true;
    return false;
}

} // namespace

void wake_at_commit(const std::string &route, const std::optional<core::Uuid> &tenant) {
    if (shared() == nullptr || at_commit.every_lane)
        return;
    listen();
    const LaneKey key = lane_key(MyDatabaseId, route, tenant);
    if (is_pending(key))
        return;
    if (at_commit.count == kMaxPending) {
        if (tenant)
            wake_tenants_at_commit(route);
        else
            at_commit.every_lane = true;
        return;
    }
    LockedLanes locked(LW_SHARED);
    at_commit.wakes[at_commit.count++] = {key, find_lane(key), false};
}

void wake_tenants_at_commit(const std::string &route) {
    if (shared() == nullptr || at_commit.every_lane)
        return;
    listen();
    const Pending all{lane_key(MyDatabaseId, route, std::nullopt), -1, true};
    int kept = 0;
    for (int i = 0; i < at_commit.count; ++i)
        if (!wakes(all, at_commit.wakes[i].key))
            at_commit.wakes[kept++] = at_commit.wakes[i];
    at_commit.count = kept;
    for (int i = 0; i < at_commit.count; ++i)
        if (at_commit.wakes[i].all_tenants && same_route(at_commit.wakes[i].key, all.key))
            return;
    if (at_commit.count == kMaxPending)
        at_commit.every_lane = true;
    else
        at_commit.wakes[at_commit.count++] = all;
}

void let_go_at_commit(std::span<const AsideRow> rows) {
    if (rows.empty())
        return;
    listen();
    const std::size_t count = at_commit.aside_count + rows.size();
    AsideId *ids = pg::guard([count] {
        return static_cast<AsideId *>(MemoryContextAlloc(TopTransactionContext, count * sizeof(AsideId)));
    });
    std::copy_n(at_commit.aside, at_commit.aside_count, ids);
    std::transform(rows.begin(), rows.end(), ids + at_commit.aside_count, [](const AsideRow &row) {
        return AsideId{row.lane, row.generation, row.version.id};
    });
    at_commit.aside = ids;
    at_commit.aside_count = count;
}

void poke_at_commit() {
    if (shared() == nullptr)
        return;
    listen();
    at_commit.poked = true;
    LockedLanes locked(LW_EXCLUSIVE);
    (void)find_database(MyDatabaseId, true);
}

} // namespace outbox_relay::worker
