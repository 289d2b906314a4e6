#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "api/role.hpp"
#include "api/rows.hpp"
#include "core/latency.hpp"
#include "pg/entry.hpp"
#include "pg/guard.hpp"
#include "store/route.hpp"
#include "worker/launcher.hpp"
#include "worker/stats.hpp"

extern "C" {
#include "catalog/pg_authid.h"
#include "commands/dbcommands.h"
#include "utils/builtins.h"

PGDLLEXPORT Datum outbox_relay_stat_route(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_stat_worker(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_stat_reset(PG_FUNCTION_ARGS);
PG_FUNCTION_INFO_V1(outbox_relay_stat_route);
PG_FUNCTION_INFO_V1(outbox_relay_stat_worker);
PG_FUNCTION_INFO_V1(outbox_relay_stat_reset);
}

namespace outbox_relay::api {

namespace {

using Lanes = std::multimap<std::string, worker::LaneSnapshot>;

std::vector<store::Route> watched_routes() {
    std::vector<store::Route> routes;
    if (const std::optional<store::Extension> extension = store::find_extension())
        for (store::Route &route : store::all_routes(*extension))
            if (may_watch(route.owner))
                routes.push_back(std::move(route));
    return routes;
}

/// What the extension and the route say comes first: a lane of a paused or foreign route may still show its
/// last state. `broken`: nothing here can be relayed; a route whose owner is gone can't either.
std::string state_of(const store::Route &route, const worker::LaneSnapshot &lane, bool broken) {
    if (broken)
        return "broken";
    if (!route.enabled)
        return "paused";
    if (route.bound_to != store::current_binding())
        return "foreign";
    if (!OidIsValid(find_role(route.owner)))
        return "broken";
    return lane.state.empty() ? "idle" : lane.state;
}

/// A lane that nobody runs, and why: an error of its past is not what it lacks.
void show_lack(worker::LaneSnapshot &lane, const char *reason) {
    lane.state = "broken";
    lane.last_error = reason;
}

/// Why this database has no worker, as far as that is known; nullptr when it may have one.
const char *lack_of_worker() {
    if (!worker::serves(MyDatabaseId))
        return "the database is a template, takes no connections or is not in outbox_relay.databases";
    if (worker::lacks_worker(MyDatabaseId))
        return "no background worker slot is free: raise max_worker_processes";
    return nullptr;
}

/// A quantile of the lane's latencies in milliseconds; NULL before the first request.
pg::Value latency_value(const worker::Counters &counters, double quantile) {
    const std::int64_t us = core::latency_quantile_us(counters.latency, quantile);
    return us == 0 ? pg::Value() : double_value(static_cast<double>(us) / 1000.0);
}

void put_lane(Rows &rows, const store::Route &route, const worker::LaneSnapshot &lane, bool broken) {
    const worker::Counters &counters = lane.counters;
    const bool ran = lane.last_pass_at != 0;
    const pg::Value values[] = {
        text_value(route.name),
        uuid_value(lane.tenant),
        text_value(state_of(route, lane, broken)),
        time_value(lane.due_at),
        time_value(lane.backoff_until),
        text_or_null(lane.breaker),
        int_value(lane.in_flight),
        int_value(lane.set_aside),
        bigint_value(counters.passes),
        bigint_value(counters.failed_passes),
        bigint_value(lane.consecutive_failures),
        bigint_value(counters.claimed),
        bigint_value(counters.published),
        bigint_value(counters.failed),
        bigint_value(counters.retried),
        bigint_value(counters.refused),
        bigint_value(counters.reclaimed),
        bigint_value(counters.duplicates_avoided),
        bigint_value(counters.bytes_published),
        latency_value(counters, 0.50),
        latency_value(counters, 0.95),
        latency_value(counters, 0.99),
        bigints_value(counters.latency),
        time_value(lane.last_pass_at),
        ran ? bigint_value(static_cast<std::uint64_t>(lane.last_pass_ms)) : pg::Value(),
        time_value(lane.last_error_at),
        text_or_null(lane.last_error),
        time_value(lane.stats_reset),
    };
    rows.put(values);
}

/// Every route of the database, one row a lane; one row of zeroes for a route without a lane.
void put_routes(Rows &rows) {
    Lanes lanes;
    if (worker::shared_memory_ready())
        for (worker::LaneSnapshot &lane : worker::snapshot_lanes(MyDatabaseId)) {
            std::string name = lane.route;
            lanes.emplace(std::move(name), std::move(lane));
        }
    const bool broken = store::extension_version() != store::kLibraryVersion;
    worker::LaneSnapshot none{};
    if (const char *reason = lack_of_worker()) {
        show_lack(none, reason);
        for (auto &[name, lane] : lanes)
            show_lack(lane, reason);
    }
    for (const store::Route &route : watched_routes()) {
        const auto [first, last] = lanes.equal_range(route.name);
        if (first == last)
            put_lane(rows, route, none, broken);
        for (auto lane = first; lane != last; ++lane)
            put_lane(rows, route, lane->second, broken);
    }
}

pg::Value database_value(Oid database) {
    if (!OidIsValid(database))
        return {};
    const char *name = pg::guard([database] { return get_database_name(database); });
    if (name == nullptr)
        return {};
    return pg::Value(pg::guard([name] {
        auto *copy = static_cast<Name>(palloc0(NAMEDATALEN));
        namestrcpy(copy, name);
        return NameGetDatum(copy);
    }));
}

/// Every process of the server. Which lane it serves only for those who may watch the route; of
/// another database's routes that is pg_monitor alone.
void put_workers(Rows &rows) {
    if (!worker::shared_memory_ready())
        return;
    const bool all = has_privileges_of(ROLE_PG_MONITOR);
    std::set<std::string> watched;
    for (const store::Route &route : watched_routes())
        watched.insert(route.name);
    for (const worker::WorkerSnapshot &process : worker::snapshot_workers()) {
        const bool shown = all || (process.database == MyDatabaseId && watched.contains(process.route));
        const pg::Value values[] = {
            int_value(process.pid),
            database_value(process.database),
            shown ? text_or_null(process.route) : pg::Value(),
            shown ? uuid_value(process.tenant) : pg::Value(),
            text_or_null(process.phase),
            time_value(process.since),
        };
        rows.put(values);
    }
}

void reset() {
    if (!worker::shared_memory_ready())
        pg::raise({ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, "outbox_relay is not preloaded",
                   "There are no statistics to reset.",
                   "Add outbox_relay to shared_preload_libraries and restart the server."});
    worker::reset_stats(MyDatabaseId);
}

} // namespace

} // namespace outbox_relay::api

namespace api = outbox_relay::api;

/// The rows of outbox_stat_route (spec.md, section 9).
Datum outbox_relay_stat_route(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo] {
        api::Rows rows(fcinfo);
        api::put_routes(rows);
        return Datum(0);
    });
}

/// The rows of outbox_stat_worker.
Datum outbox_relay_stat_worker(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo] {
        api::Rows rows(fcinfo);
        api::put_workers(rows);
        return Datum(0);
    });
}

/// outbox_stat_reset(): this database's counters to zero. 55000 when not preloaded.
Datum outbox_relay_stat_reset(PG_FUNCTION_ARGS) {
    (void)fcinfo;
    return pg::entry([] {
        api::reset();
        return Datum(0);
    });
}
