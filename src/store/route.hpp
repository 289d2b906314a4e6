#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pg/postgres.hpp"

namespace outbox_relay::store {

enum class Ordering { none, key };

/// A row of outbox_route, parsed. What is NULL in a tuning column stays empty: effective() decides.
struct Route {
    std::string name;
    std::string relation; ///< as written: schema.table, SQL-quoted where needed; empty: relation_function
    std::string url;      ///< empty: target_function it is
    std::string target_function; ///< as written: schema.function; empty: url it is
    std::string method;
    bool enabled = true;
    std::string storage = "consume";   ///< or retain
    std::string delivery_log;          ///< as relation; empty: none
    std::string tenants_function;      ///< as target_function; empty: no tenants
    std::string relation_function;     ///< needs tenants_function
    std::string delivery_log_function; ///< needs tenants_function
    bool isolates_tenants = false;     ///< tenant_isolation is namespace
    bool propagate_trace = false;
    bool require_transaction = false;
    bool hlc_ordering = false;
    bool drain_on_shutdown = false;
    Ordering ordering = Ordering::key;
    bool cloudevents = true;
    bool forze = true;
    std::string source; ///< empty: /database/route
    std::vector<std::pair<std::string, std::string>> headers;
    std::vector<int> fail_statuses;
    std::int64_t max_payload_bytes = 4 * 1024 * 1024;
    std::string ca_file;
    std::string owner;
    std::string bound_to;

    std::optional<std::int64_t> interval_ms;
    std::optional<std::int64_t> max_claim_rows;
    std::optional<std::int64_t> pass_deadline_ms;
    std::optional<std::int64_t> pass_statement_timeout_ms;
    std::optional<std::int64_t> request_timeout_ms;
    std::optional<std::int64_t> connect_timeout_ms;
    std::optional<std::int64_t> concurrency;
    std::optional<std::int64_t> max_attempts;
    std::optional<std::int64_t> retry_base_delay_ms;
    std::optional<std::int64_t> retry_max_backoff_ms;
    std::optional<std::int64_t> breaker_threshold;
    std::optional<std::int64_t> reclaim_stale_after_ms;

    std::uint64_t version = 0; ///< changes whenever the row does

    bool has_tenants() const { return !tenants_function.empty(); }
    bool has_log() const { return !delivery_log.empty() || !delivery_log_function.empty(); }
};

/// The settings of a route with the configuration parameters filled in, now.
struct Effective {
    std::int64_t interval_ms;
    std::int64_t max_claim_rows;
    std::int64_t pass_deadline_ms;
    std::int64_t pass_statement_timeout_ms;
    std::int64_t request_timeout_ms;
    std::int64_t connect_timeout_ms;
    std::int64_t concurrency;
    std::int64_t max_attempts;
    std::int64_t retry_base_delay_ms;
    std::int64_t retry_max_backoff_ms;
    std::int64_t breaker_threshold;
    std::int64_t reclaim_stale_after_ms;
};

/// One tuning column: its name (column and GUC), where it lies in Route and Effective, and its GUC.
struct TuningColumn {
    const char *name;
    bool is_time; ///< interval column in milliseconds, else int
    std::int64_t low;
    std::int64_t high;
    std::optional<std::int64_t> Route::*column;
    std::int64_t Effective::*effective;
    const int *parameter;
};

/// All tuning columns, in the order of outbox_route.
const std::vector<TuningColumn> &tuning_columns();

Effective effective(const Route &route);

/// Where this extension lives in the current database.
struct Extension {
    Oid oid = InvalidOid;
    Oid schema = InvalidOid;
    Oid route_table = InvalidOid;
    std::string schema_name;
};

/// Looks the extension up; nothing when the database has none. Needs a transaction.
std::optional<Extension> find_extension();

/// The version of the extension's SQL, as pg_extension has it now; empty when the database has none. Needs a
/// transaction.
std::string extension_version();

/// The version of the SQL that this library belongs to. Nothing is relayed by another one's.
inline constexpr const char *kLibraryVersion = OUTBOX_RELAY_VERSION;

/// The route of this name, from the backend's cache or, on a miss, from outbox_route as last
/// committed; nothing when there is none. Reads the table without regard to the caller's rights:
/// route settings are internal. Needs a transaction. The pointer is valid until the transaction's
/// end, also when the route changes meanwhile (then the next call gives another).
const Route *find_route(const Extension &extension, const std::string &name);

/// Every route of the database, fresh, by name. Needs a transaction.
std::vector<Route> all_routes(const Extension &extension);

/// Raises 42704 unknown route for `name`.
[[noreturn]] void raise_unknown_route(const std::string &name);

/// Counts up whenever outbox_route may have changed, or the extension; starts at 1.
std::uint64_t routes_generation();

/// What bound_to has to be for a route to run here: system identifier/database oid/environment.
std::string current_binding();

} // namespace outbox_relay::store
