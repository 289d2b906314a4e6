#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/uuid.hpp"

#include "store/limits.hpp"
#include "store/route.hpp"

namespace outbox_relay::store {

/// One finding about a route: what outbox_check shows and what a pass refuses to start with.
struct Finding {
    enum class Severity { error, warning, info };
    Severity severity = Severity::error;
    int sqlstate = 0;
    std::string problem; ///< a primary message in the server's style
    std::string detail;
    std::string remedy; ///< SQL to run, or a sentence
    bool blocks = true; ///< a pass does not start with it
};

/// What preflight learned about the table that a pass needs.
struct Checked {
    Oid relation = InvalidOid;
    Oid table_owner = InvalidOid;
    char kind = 0; ///< pg_class.relkind
    std::string qualified_name;
    bool has_processing_at = false;
    std::string log_name; ///< qualified; empty: no delivery log
};

/// Everything that is wrong with the route's table (the tenant's, where the route has tenants) for a pass of
/// `owner`, and the table as it is now, locked ROW EXCLUSIVE to the end of the transaction when it exists.
/// Runs as `owner`, lock waits bounded by `limits`. Raises only for what the server itself raises (no right
/// on the schema, lock timeout).
std::vector<Finding> check_route(const Route &route, const std::optional<core::Uuid> &tenant,
                                 const Effective &settings, Oid owner, const Limits &limits,
                                 Checked &checked);

/// Locks the table that preflight has checked ROW EXCLUSIVE in a further transaction of its pass, by its name
/// and as `owner`. Raises when the name is another table's by now, or the table another owner's: its triggers
/// would run as `owner` without anybody having checked whose they are.
void hold_checked(const Route &route, Oid owner, const Limits &limits, const Checked &checked);

/// Raises the first blocking finding as an error that names route and table.
void raise_blocking(const Route &route, const std::vector<Finding> &findings);

} // namespace outbox_relay::store
