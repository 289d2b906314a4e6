#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/latency.hpp"
#include "core/uuid.hpp"

#include "pg/postgres.hpp"

extern "C" {
#include "datatype/timestamp.h"
}

namespace outbox_relay::worker {

/// What the lane counts since stats_reset; spec.md section 9.
struct Counters {
    std::uint64_t passes;
    std::uint64_t failed_passes;
    std::uint64_t claimed;
    std::uint64_t published;
    std::uint64_t failed;
    std::uint64_t retried;
    std::uint64_t refused;
    std::uint64_t reclaimed;
    std::uint64_t duplicates_avoided;
    std::uint64_t bytes_published;
    std::array<std::uint64_t, core::kLatencyBuckets> latency;
};

/// One lane as outbox_stat_route shows it. Times are 0 where there is none.
struct LaneSnapshot {
    std::string route;
    std::optional<core::Uuid> tenant;
    std::string state; ///< idle, due, running, backoff, refused
    TimestampTz due_at;
    TimestampTz backoff_until;
    std::string breaker; ///< closed, open, probing
    int in_flight;
    int set_aside;
    std::uint64_t consecutive_failures;
    Counters counters;
    TimestampTz last_pass_at;
    std::int64_t last_pass_ms;
    TimestampTz last_error_at;
    std::string last_error;
    TimestampTz stats_reset;
};

/// One process as outbox_stat_worker shows it.
struct WorkerSnapshot {
    int pid;
    Oid database; ///< InvalidOid: the launcher
    std::string route;
    std::optional<core::Uuid> tenant;
    std::string phase; ///< starting, idle, claim, publish, settle, commit, launcher
    TimestampTz since;
};

/// True when the library was preloaded, so that lanes, workers and wakes exist.
bool shared_memory_ready();

std::vector<LaneSnapshot> snapshot_lanes(Oid database);
std::vector<WorkerSnapshot> snapshot_workers();
void reset_stats(Oid database);

/// True while a database has no worker because the server had no slot for one.
bool lacks_worker(Oid database);

} // namespace outbox_relay::worker
