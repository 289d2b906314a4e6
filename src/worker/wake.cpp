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

/// A lane to wake at commit: slot and the generation it had when its rows were staged.
struct Pending {
    int lane;
    std::uint32_t generation;
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
    Pending lanes[kMaxPending];
    int count = 0;
    bool every_lane = false;   ///< more lanes than fit
    bool unknown_lane = false; ///< one without a slot: it is due as soon as a worker makes it
    int poked_database = -1;
    AsideId *aside = nullptr;
    std::size_t aside_count = 0;
};

AtCommit at_commit;
bool registered = false;

void make_due(Lane &lane) {
    std::uint64_t expected = 0;
    (void)pg_atomic_compare_exchange_u64(&lane.wake_us, &expected,
                                         static_cast<std::uint64_t>(pg::monotonic_us()));
}

void wake_every_lane() {
    for (int i = 0; i < shared()->max_lanes; ++i)
        if (lane_at(i).used && lane_at(i).key.database == MyDatabaseId)
            make_due(lane_at(i));
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

/// After ProcArrayEndTransaction: the rows are visible. Raising here would be a PANIC, so: atomics
/// and latches, and what can't fail.
void committed() noexcept {
    let_rows_go();
    const bool staged = at_commit.count > 0 || at_commit.every_lane || at_commit.unknown_lane;
    for (int i = 0; i < at_commit.count; ++i) {
        Lane &lane = lane_at(at_commit.lanes[i].lane);
        if (lane.generation == at_commit.lanes[i].generation)
            make_due(lane);
    }
    if (at_commit.every_lane)
        wake_every_lane();
    if (staged)
        wake_worker(MyDatabaseId);
    if (at_commit.poked_database >= 0) {
        (void)pg_atomic_exchange_u32(&shared()->databases[at_commit.poked_database].poked, 1);
        wake_process(pg_atomic_read_u32(&shared()->launcher_proc));
        wake_worker(MyDatabaseId);
    }
}

void forget() noexcept {
    at_commit.count = 0;
    at_commit.every_lane = false;
    at_commit.unknown_lane = false;
    at_commit.poked_database = -1;
    at_commit.aside = nullptr;
    at_commit.aside_count = 0;
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

} // namespace

void wake_at_commit(const std::string &route, const std::optional<core::Uuid> &tenant) {
    if (shared() == nullptr || at_commit.every_lane)
        return;
    listen();
    const LaneKey key = lane_key(MyDatabaseId, route, tenant);
    for (int i = 0; i < at_commit.count; ++i) {
        const Lane &lane = lane_at(at_commit.lanes[i].lane);
        if (std::memcmp(&lane.key, &key, sizeof(key)) == 0)
            return;
    }
    LockedLanes locked(LW_SHARED);
    const int index = find_lane(key);
    if (index < 0)
        at_commit.unknown_lane = true;
    else if (at_commit.count == kMaxPending)
        at_commit.every_lane = true;
    else
        at_commit.lanes[at_commit.count++] = {index, lane_at(index).generation};
}

void wake_all_at_commit() {
    if (shared() == nullptr)
        return;
    listen();
    at_commit.every_lane = true;
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
    LockedLanes locked(LW_EXCLUSIVE);
    at_commit.poked_database = find_database(MyDatabaseId, true);
}

} // namespace outbox_relay::worker
