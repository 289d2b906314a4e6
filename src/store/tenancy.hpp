#pragma once

#include <optional>
#include <string>
#include <vector>

#include "core/uuid.hpp"
#include "pg/session.hpp"
#include "store/preflight.hpp"
#include "store/route.hpp"

namespace outbox_relay::store {

/// Routes with tenants (spec.md section 8; the seed, tenants): a lane for each tenant that
/// tenants_function lists; where relation_function and delivery_log_function are given, they say which
/// tables are a tenant's.

/// Which rows of its table a lane takes for its own.
enum class TenantFilter {
    none,   ///< all: the route has no tenants
    column, ///< those with its tenant_id: the table is shared
    table   ///< those with its tenant_id or without one: relation_function gives it the table
};

TenantFilter tenant_filter(const Route &route);

/// The tables of a route, schema.table as SQL spells it.
struct Tables {
    std::string relation;
    std::string delivery_log; ///< empty: none
};

/// The tables of `route` for `tenant`. The functions are called under `context`, as the route's owner.
/// Raises 22004 when the route has its tables by tenant and none is given, 42883, 42809, 42804 and 42501
/// for functions that are missing, wrong or not the owner's to call, what they raise, and 22004 when they
/// give NULL.
Tables tables_of(const Route &route, const std::optional<core::Uuid> &tenant, const pg::Context &context);

/// The same as the owner, for a session's own statement: with its own limits. Raises 42704 when the owner
/// does not exist.
Tables tables_of(const Route &route, const std::optional<core::Uuid> &tenant);

/// Raises 22004 when `route` has tenants and none is given.
void require_tenant(const Route &route, const std::optional<core::Uuid> &tenant);

/// What tenants_function gives, in its order, each once, in a transaction of its own, as the owner, under
/// the route's pass_statement_timeout. Raises what the function raises; the caller aborts.
std::vector<core::Uuid> list_tenants(const Route &route, const Effective &settings);

/// What is wrong with the functions that the route names, as far as the catalogs tell, for passes of `role`.
std::vector<Finding> tenancy_findings(const Route &route, Oid role);

/// The role of the route's owner. Raises 42704 when it does not exist.
Oid owner_of(const Route &route);

} // namespace outbox_relay::store
