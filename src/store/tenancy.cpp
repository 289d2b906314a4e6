#include "store/tenancy.hpp"

#include <algorithm>
#include <cstring>
#include <set>

#include "pg/clock.hpp"
#include "pg/spi.hpp"
#include "pg/transaction.hpp"
#include "pg/watchdog.hpp"
#include "store/function.hpp"
#include "store/limits.hpp"

extern "C" {
#include "catalog/pg_collation.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "fmgr.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/snapmgr.h"
#include "utils/uuid.h"
}

namespace outbox_relay::store {

namespace {

/// A worker holds the list in memory; more than this is a mistake in the function.
constexpr std::uint64_t kMostTenants = 100'000;

std::string of_route(const Route &route) {
    return " of route \"" + route.name + "\"";
}

/// A function that the route names, and what it has to be.
struct Named {
    const char *column;
    const std::string &name;
    std::span<const Oid> arguments;
    bool set;
    const char *form;
};

constexpr Oid kTenantArgument[] = {UUIDOID};

Named tenants_named(const Route &route) {
    return {"tenants_function", route.tenants_function, {}, true, "() RETURNS SETOF uuid"};
}

Named table_named(const char *column, const std::string &name) {
    return {column, name, kTenantArgument, false, "(tenant uuid) RETURNS text"};
}

/// Everything that is wrong with it, and the function.
std::vector<Finding> findings_of(const Named &named, Oid role, Function &function) {
    function = find_function(named.name, named.arguments);
    const std::string signature = function.qualified_name + (named.arguments.empty() ? "()" : "(uuid)");
    const bool fits =
        named.set ? function.result == UUIDOID : function.result == TEXTOID || function.result == VARCHAROID;
    Finding wrong;
    wrong.detail = std::string("It is the ") + named.column + " of a route.";
    wrong.remedy = "Create it as " + function.qualified_name + named.form + ", or name another function.";
    if (!OidIsValid(function.oid)) {
        wrong.sqlstate = ERRCODE_UNDEFINED_FUNCTION;
        wrong.problem = "function " + signature + " does not exist";
        return {wrong};
    }
    if (function.kind != PROKIND_FUNCTION || function.set != named.set) {
        wrong.sqlstate = ERRCODE_WRONG_OBJECT_TYPE;
        wrong.problem =
            "function " + signature + (named.set ? " does not return a set" : " is not an ordinary function");
        return {wrong};
    }
    if (!fits) {
        wrong.sqlstate = ERRCODE_DATATYPE_MISMATCH;
        wrong.problem = "function " + signature + " does not return " + (named.set ? "uuid" : "text");
        return {wrong};
    }
    return function_right_findings(function, signature, role);
}

/// The function, which is fit to be called. Raises the first finding.
Function require_function(const Route &route, const Named &named, Oid role) {
    Function function;
    raise_blocking(route, findings_of(named, role, function));
    return function;
}

/// C regime: calls function(tenant); nullptr for NULL.
const char *call(Oid function, const core::Uuid &tenant) {
    pg_uuid_t argument;
    std::memcpy(argument.data, tenant.bytes.data(), UUID_LEN);
    FmgrInfo info;
    fmgr_info(function, &info);
    LOCAL_FCINFO(fcinfo, 1);
    InitFunctionCallInfoData(*fcinfo, &info, 1, DEFAULT_COLLATION_OID, nullptr, nullptr);
    fcinfo->args[0].value = UUIDPGetDatum(&argument);
    fcinfo->args[0].isnull = false;
    PushActiveSnapshot(GetTransactionSnapshot());
    const Datum result = FunctionCallInvoke(fcinfo);
    const char *table = fcinfo->isnull ? nullptr : TextDatumGetCString(result);
    PopActiveSnapshot();
    return table;
}

/// The table that the route's function names for the tenant.
std::string table_of(const Route &route, const Named &named, const core::Uuid &tenant,
                     const pg::Context &context) {
    const Function function = require_function(route, named, context.role);
    const Oid oid = function.oid;
    const char *table = nullptr;
    try {
        table = pg::run_as(context, [oid, &tenant] { return call(oid, tenant); });
    } catch (const pg::Error &error) {
        if (error.sqlstate() == ERRCODE_QUERY_CANCELED || error.sqlstate() == ERRCODE_ADMIN_SHUTDOWN)
            throw;
        // Rethrown at once as another error: the transaction ends either way.
        pg::raise({error.sqlstate(), std::string(named.column) + of_route(route) + " failed for tenant " +
                                         tenant.text() + ": " + error.message()});
    }
    if (table == nullptr)
        pg::raise(
            {ERRCODE_NULL_VALUE_NOT_ALLOWED,
             std::string(named.column) + of_route(route) + " gives no table for tenant " + tenant.text(),
             function.qualified_name + "(uuid) returned NULL.",
             "Let it return schema.table for every tenant that tenants_function lists."});
    return table;
}

} // namespace

TenantFilter tenant_filter(const Route &route) {
    if (route.tenants_function.empty())
        return TenantFilter::none;
    return route.relation_function.empty() ? TenantFilter::column : TenantFilter::table;
}

void require_tenant(const Route &route, const std::optional<core::Uuid> &tenant) {
    if (tenant || route.tenants_function.empty())
        return;
    pg::raise({ERRCODE_NULL_VALUE_NOT_ALLOWED, "outbox route \"" + route.name + "\" needs a tenant",
               "The route has a tenants_function: every row and every pass of it belongs to one tenant.",
               "Give tenant_id, or SET LOCAL outbox_relay.tenant_id."});
}

Tables tables_of(const Route &route, const std::optional<core::Uuid> &tenant, const pg::Context &context) {
    Tables tables{route.relation, route.delivery_log};
    const bool by_tenant = !route.relation_function.empty() || !route.delivery_log_function.empty();
    if (!by_tenant)
        return tables;
    require_tenant(route, tenant);
    if (!route.relation_function.empty())
        tables.relation =
            table_of(route, table_named("relation_function", route.relation_function), *tenant, context);
    if (!route.delivery_log_function.empty())
        tables.delivery_log = table_of(
            route, table_named("delivery_log_function", route.delivery_log_function), *tenant, context);
    return tables;
}

Tables tables_of(const Route &route, const std::optional<core::Uuid> &tenant) {
    if (route.relation_function.empty())
        return {route.relation, route.delivery_log};
    pg::Context context;
    context.role = owner_of(route);
    Route of_relation = route;
    of_relation.delivery_log_function.clear();
    return tables_of(of_relation, tenant, context);
}

std::vector<core::Uuid> list_tenants(const Route &route, const Effective &settings) {
    pg::start_transaction();
    const Oid owner = owner_of(route);
    const Limits limits = limits_for(owner, settings);
    pg::set_local("statement_timeout", std::to_string(limits.statement_ms).c_str());
    pg::set_local("lock_timeout", std::to_string(limits.lock_ms).c_str());
    pg::set_local("idle_in_transaction_session_timeout", std::to_string(limits.idle_ms).c_str());
    pg::arm_watchdog(limits.statement_ms + limits.idle_ms);
    const Function function = require_function(route, tenants_named(route), owner);

    pg::Context context;
    context.role = owner;
    context.statement_timeout_ms = limits.statement_ms;
    context.lock_timeout_ms = limits.lock_ms;
    pg::spi_connect();
    pg::Plan plan;
    plan.prepare_as(context, "SELECT t.tenant FROM " + function.qualified_name + "() AS t(tenant)", {});
    const pg::Result result =
        pg::execute_as(context, plan, {}, "outbox_relay: list tenants", kMostTenants + 1);
    if (result.processed > kMostTenants)
        pg::raise({ERRCODE_PROGRAM_LIMIT_EXCEEDED,
                   "tenants_function" + of_route(route) + " gives more than " + std::to_string(kMostTenants) +
                       " tenants",
                   "", "Split the route by groups of tenants."});
    std::vector<core::Uuid> tenants;
    std::set<core::Uuid> seen;
    for (std::uint64_t i = 0; i < result.processed; ++i) {
        const pg::Value value = result.value(i, 1);
        if (value.null)
            continue;
        core::Uuid tenant;
        std::memcpy(tenant.bytes.data(), DatumGetUUIDP(value.datum)->data, UUID_LEN);
        if (seen.insert(tenant).second)
            tenants.push_back(tenant);
    }
    pg::spi_finish();
    pg::disarm_watchdog();
    pg::commit_transaction();
    return tenants;
}

std::vector<Finding> tenancy_findings(const Route &route, Oid role) {
    std::vector<Finding> findings;
    const auto judge = [&](const Named &named) {
        if (named.name.empty())
            return;
        Function function;
        std::vector<Finding> more = findings_of(named, role, function);
        std::move(more.begin(), more.end(), std::back_inserter(findings));
    };
    judge(tenants_named(route));
    judge(table_named("relation_function", route.relation_function));
    judge(table_named("delivery_log_function", route.delivery_log_function));
    return findings;
}

Oid owner_of(const Route &route) {
    const Oid owner = pg::guard([&route] { return get_role_oid(route.owner.c_str(), true); });
    if (!OidIsValid(owner))
        pg::raise({ERRCODE_UNDEFINED_OBJECT,
                   "owner \"" + route.owner + "\" of route \"" + route.name + "\" does not exist",
                   "Every pass of a route runs as its owner.",
                   "Create the role, or set the owner column of outbox_route to an existing one."});
    return owner;
}

} // namespace outbox_relay::store
