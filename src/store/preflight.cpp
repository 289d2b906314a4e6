#include "store/preflight.hpp"

#include <algorithm>
#include <optional>

#include "pg/error.hpp"
#include "pg/session.hpp"
#include "store/delivery_log.hpp"
#include "store/relation.hpp"
#include "store/tenancy.hpp"

extern "C" {
#include "catalog/pg_class.h"
#include "storage/lockdefs.h"
#include "utils/timestamp.h"
}

namespace outbox_relay::store {

namespace {

Finding missing_relation(const std::string &name, const char *column) {
    Finding finding;
    finding.sqlstate = ERRCODE_UNDEFINED_TABLE;
    finding.problem = "relation " + name + " does not exist";
    finding.remedy = std::string("Create the table (outbox_ddl() shows how), or set the route's ") + column +
                     " to an existing one.";
    return finding;
}

pg::Context context_of(Oid owner, const Limits &limits) {
    pg::Context context;
    context.role = owner;
    context.statement_timeout_ms = limits.statement_ms;
    context.lock_timeout_ms = limits.lock_ms;
    return context;
}

/// Opens a relation under its lock, as the owner. A pass that waits in vain says for what: DDL that itself
/// waits for a lock holds up everybody who comes after it.
std::optional<Relation> open_relation(const pg::Context &context, const std::string &name, LOCKMODE lock) {
    try {
        return pg::act_as(context, [&name, lock] { return find_relation(name, lock); });
    } catch (const pg::Error &error) {
        if (error.sqlstate() != ERRCODE_LOCK_NOT_AVAILABLE && error.sqlstate() != ERRCODE_QUERY_CANCELED)
            throw;
        pg::raise(
            {error.sqlstate(), error.message() + " while waiting for a lock on " + name,
             "Somebody holds a strong lock on it, or waits for one.",
             "Look for it in pg_locks and pg_blocking_pids(); run such DDL with a short lock_timeout."});
    }
}

void append(std::vector<Finding> &all, std::vector<Finding> more) {
    std::move(more.begin(), more.end(), std::back_inserter(all));
}

/// The log as it will be wanted when the pass settles: at the latest when its time is over.
std::vector<Finding> check_log(const std::string &name, const Effective &settings, Oid owner,
                               const pg::Context &context, Checked &checked) {
    const std::optional<Relation> log = open_relation(context, name, AccessShareLock);
    if (!log)
        return {missing_relation(name, "delivery_log")};
    checked.log_name = log->qualified_name;
    const TimestampTz now = GetCurrentTimestamp();
    return log_findings(*log, owner, now,
                        now + 1000 * (settings.pass_deadline_ms + settings.pass_statement_timeout_ms));
}

} // namespace

std::vector<Finding> check_route(const Route &route, const std::optional<core::Uuid> &tenant,
                                 const Effective &settings, Oid owner, const Limits &limits,
                                 Checked &checked) {
    const pg::Context context = context_of(owner, limits);
    const Tables tables = tables_of(route, tenant, context);
    const std::optional<Relation> relation = open_relation(context, tables.relation, RowExclusiveLock);
    if (!relation)
        return {missing_relation(tables.relation, "relation")};

    checked.relation = relation->oid;
    checked.table_owner = relation->owner;
    checked.kind = relation->kind;
    checked.qualified_name = relation->qualified_name;
    checked.has_processing_at = relation->column("processing_at") != nullptr;

    Needs needs;
    needs.hlc = route.hlc_ordering;
    needs.trace = route.propagate_trace;
    // Reclaim that nobody asked for is skipped where the column is missing.
    needs.retain = route.storage == "retain";
    needs.processing_at = route.reclaim_stale_after_ms.has_value() && settings.reclaim_stale_after_ms > 0;
    needs.reclaims = settings.reclaim_stale_after_ms > 0;
    std::vector<Finding> findings = missing_or_wrong(*relation, needs);
    if (std::optional<Finding> finding = owner_finding(*relation, owner))
        findings.push_back(*finding);
    // Those that are no tables have no such columns as ctid to have rights on.
    if (relation->kind == RELKIND_RELATION)
        append(findings, privilege_findings(*relation, needs, owner));
    if (!tables.delivery_log.empty())
        append(findings, check_log(tables.delivery_log, settings, owner, context, checked));
    return findings;
}

void hold_checked(const Route &route, Oid owner, const Limits &limits, const Checked &checked) {
    const std::optional<Relation> relation =
        open_relation(context_of(owner, limits), checked.qualified_name, RowExclusiveLock);
    if (relation && relation->oid == checked.relation && relation->owner == checked.table_owner &&
        relation->kind == checked.kind)
        return;
    pg::raise({ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
               "relation " + checked.qualified_name + " was replaced while a pass of route \"" + route.name +
                   "\" was under way",
               relation ? "It is not the table any more, or not the same owner's, that the pass has checked."
                        : "There is no relation of this name any more.",
               "The lane's next pass checks the relation anew; pause the route before such a change."});
}

void raise_blocking(const Route &route, const std::vector<Finding> &findings) {
    const auto first =
        std::find_if(findings.begin(), findings.end(), [](const Finding &finding) { return finding.blocks; });
    if (first == findings.end())
        return;
    pg::raise({first->sqlstate, "route \"" + route.name + "\" cannot be relayed: " + first->problem,
               first->detail, first->remedy});
}

} // namespace outbox_relay::store
