#include "worker/stats.hpp"

#include <cstring>

#include "store/encoding.hpp"
#include "worker/lanes.hpp"

#include "pg/clock.hpp"

extern "C" {
#include "utils/timestamp.h"
}

namespace outbox_relay::worker {

namespace {

/// A time of the schedule as wall clock; 0 stays 0.
TimestampTz wall_of(std::int64_t monotonic_us, std::int64_t now_us, TimestampTz now) {
    return monotonic_us == 0 ? 0 : now + (monotonic_us - now_us);
}

const char *state_of(const Lane &lane, std::int64_t now_us) {
    if (lane.holder >= 0)
        return "running";
    switch (lane.state) {
    case LaneState::backoff:
        return "backoff";
    case LaneState::refused:
        return "refused";
    case LaneState::due:
        return "due";
    case LaneState::idle:
        break;
    }
    return lane.due_us <= now_us ? "due" : "idle";
}

const char *phase_name(Phase phase) {
    switch (phase) {
    case Phase::starting:
        return "starting";
    case Phase::idle:
        return "idle";
    case Phase::claim:
        return "claim";
    case Phase::publish:
        return "publish";
    case Phase::settle:
        return "settle";
    case Phase::commit:
        return "commit";
    }
    return "";
}

LaneSnapshot snapshot_of(const Lane &lane, std::int64_t now_us, TimestampTz now) {
    LaneSnapshot snapshot;
    snapshot.route = lane.key.route;
    snapshot.tenant = tenant_of(lane.key);
    snapshot.state = state_of(lane, now_us);
    snapshot.due_at = wall_of(lane.due_us, now_us, now);
    snapshot.backoff_until = lane.hold_until_us > now_us ? wall_of(lane.hold_until_us, now_us, now) : 0;
    snapshot.breaker = lane.breaker_open ? (lane.holder >= 0 ? "probing" : "open") : "closed";
    snapshot.in_flight =
        static_cast<int>(pg_atomic_read_u32(const_cast<pg_atomic_uint32 *>(&lane.in_flight)));
    snapshot.set_aside = static_cast<int>(lane.set_aside);
    snapshot.consecutive_failures = lane.health.failures;
    snapshot.counters = lane.counters;
    snapshot.last_pass_at = lane.last_pass_at;
    snapshot.last_pass_ms = lane.last_pass_ms;
    snapshot.last_error_at = lane.last_error_at;
    snapshot.last_error = lane.last_error;
    snapshot.stats_reset = lane.stats_reset;
    return snapshot;
}

} // namespace

std::vector<LaneSnapshot> snapshot_lanes(Oid database) {
    std::vector<LaneSnapshot> snapshots;
    if (shared() == nullptr)
        return snapshots;
    // Room for all first: nothing inside the lock may fail.
    snapshots.reserve(static_cast<std::size_t>(shared()->max_lanes));
    const std::int64_t now_us = pg::monotonic_us();
    const TimestampTz now = GetCurrentTimestamp();
    {
        LockedLanes locked(LW_SHARED);
        for (int i = 0; i < shared()->max_lanes; ++i)
            if (lane_at(i).used && lane_at(i).key.database == database)
                snapshots.push_back(snapshot_of(lane_at(i), now_us, now));
    }
    for (LaneSnapshot &snapshot : snapshots)
        snapshot.last_error = store::from_utf8(snapshot.last_error);
    return snapshots;
}

std::vector<WorkerSnapshot> snapshot_workers() {
    std::vector<WorkerSnapshot> snapshots;
    if (shared() == nullptr)
        return snapshots;
    snapshots.reserve(static_cast<std::size_t>(shared()->max_workers) + 1);
    LockedLanes locked(LW_SHARED);
    if (shared()->launcher_pid != 0)
        snapshots.push_back({shared()->launcher_pid, InvalidOid, "", std::nullopt, "launcher", 0});
    for (int i = 0; i < shared()->max_workers; ++i) {
        const WorkerSlot &slot = worker_at(i);
        if (!slot.used || slot.pid == 0)
            continue;
        WorkerSnapshot snapshot{slot.pid,     slot.database,          "",
                                std::nullopt, phase_name(slot.phase), slot.since};
        if (slot.lane >= 0) {
            snapshot.route = lane_at(slot.lane).key.route;
            snapshot.tenant = tenant_of(lane_at(slot.lane).key);
        }
        snapshots.push_back(std::move(snapshot));
    }
    return snapshots;
}

void reset_stats(Oid database) {
    if (shared() == nullptr)
        return;
    const TimestampTz now = GetCurrentTimestamp();
    LockedLanes locked(LW_EXCLUSIVE);
    for (int i = 0; i < shared()->max_lanes; ++i) {
        Lane &lane = lane_at(i);
        if (!lane.used || lane.key.database != database)
            continue;
        lane.counters = Counters{};
        lane.stats_reset = now;
    }
}

bool lacks_worker(Oid database) {
    if (shared() == nullptr)
        return false;
    LockedLanes locked(LW_SHARED);
    const int index = find_database(database, false);
    return index >= 0 && shared()->databases[index].no_slot;
}

} // namespace outbox_relay::worker
