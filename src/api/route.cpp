#include <string>
#include <vector>

#include "api/adopt.hpp"
#include "api/role.hpp"
#include "api/route_form.hpp"
#include "pg/entry.hpp"
#include "pg/guard.hpp"
#include "pg/spi.hpp"
#include "store/delivery_log.hpp"
#include "store/index.hpp"
#include "store/probe.hpp"
#include "store/relation.hpp"
#include "store/route.hpp"
#include "store/route_row.hpp"
#include "store/target.hpp"
#include "store/tenancy.hpp"
#include "worker/wake.hpp"

extern "C" {
#include "access/htup_details.h"
#include "catalog/pg_authid.h"
#include "commands/trigger.h"
#include "utils/builtins.h"
#include "utils/inval.h"
#include "utils/rel.h"
#include "utils/timestamp.h"

PGDLLEXPORT Datum outbox_relay_route_check(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_route_changed(PG_FUNCTION_ARGS);
PG_FUNCTION_INFO_V1(outbox_relay_route_check);
PG_FUNCTION_INFO_V1(outbox_relay_route_changed);
}

namespace outbox_relay::api {

namespace {

using store::Route;
using store::RouteRow;

/// The trigger's data; raises when it is not a trigger of outbox_route that calls.
TriggerData *trigger_of(FunctionCallInfo fcinfo) {
    if (!CALLED_AS_TRIGGER(fcinfo))
        pg::raise(
            {ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED, "this function can only be called as a trigger"});
    auto *data = reinterpret_cast<TriggerData *>(fcinfo->context);
    const std::optional<store::Extension> extension = store::find_extension();
    if (!extension.has_value() || extension->route_table != RelationGetRelid(data->tg_relation))
        pg::raise({ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED,
                   std::string("trigger function of outbox_route called for table \"") +
                       RelationGetRelationName(data->tg_relation) + "\""});
    return data;
}

/// Raises 42501 unless the writer is a member of the owner. Of a role that does not exist nobody is
/// but a superuser, who may restore what such a role owned.
void check_writer(const std::string &route, const std::string &owner) {
    const Oid role = find_role(owner);
    if (OidIsValid(role) ? is_member_of(role) : superuser())
        return;
    pg::raise({ERRCODE_INSUFFICIENT_PRIVILEGE, "permission denied to write outbox route \"" + route + "\"",
               "Its owner is \"" + owner + "\", of which \"" + role_name(GetUserId()) + "\" is no member.",
               "Writing a route needs membership in its old and in its new owner."});
}

void check_ca_file_right(const Route &route) {
    if (route.ca_file.empty() || has_privileges_of(ROLE_PG_READ_SERVER_FILES))
        return;
    pg::raise({ERRCODE_INSUFFICIENT_PRIVILEGE,
               "permission denied to set ca_file of outbox route \"" + route.name + "\"",
               "It names a file of the server.", "It needs the privileges of pg_read_server_files."});
}

/// The owner of a route that names none: the relation's, where the writer is a member of it, so that
/// a superuser does not run passes on somebody else's table as a superuser.
std::string default_owner(const std::string &relation_name) {
    if (relation_name.empty())
        return role_name(GetUserId());
    const std::optional<store::Relation> relation = store::find_relation(relation_name, AccessShareLock);
    if (relation.has_value() && is_member_of(relation->owner))
        return role_name(relation->owner);
    return role_name(GetUserId());
}

store::Needs needs_of(const Route &route) {
    return {route.hlc_ordering, route.propagate_trace, route.reclaim_stale_after_ms.value_or(0) > 0,
            route.storage == "retain", store::effective(route).reclaim_stale_after_ms > 0};
}

void warn(const store::Finding &finding) {
    pg::report_at(WARNING, {finding.sqlstate, finding.problem, finding.detail, finding.remedy});
}

/// The delivery log: what a later statement can still mend, such as rights and partitions, is a warning.
void check_log_existence(const Route &route, Oid role) {
    if (route.delivery_log.empty())
        return;
    const std::optional<store::Relation> log = store::find_relation(route.delivery_log, AccessShareLock);
    if (!log)
        pg::raise({ERRCODE_UNDEFINED_TABLE, "relation \"" + route.delivery_log + "\" does not exist",
                   "It is to be the delivery log of outbox route \"" + route.name + "\".",
                   "Create it: SELECT outbox_ddl('schema.table', delivery_log => 'schema.log') gives the "
                   "statements."});
    store::require(store::log_form_findings(*log));
    const TimestampTz now = GetCurrentTimestamp();
    for (const store::Finding &finding : store::log_findings(*log, role, now, now))
        warn(finding);
}

/// The function has to be there and to be one; who may call it is for the pass to judge.
void check_target_exists(const Route &route, Oid role) {
    store::Target target;
    for (const store::Finding &finding :
         store::check_target(route, store::find_extension().value(), role, target)) {
        if (finding.sqlstate == ERRCODE_INSUFFICIENT_PRIVILEGE)
            warn(finding);
        else
            store::require({finding});
    }
}

/// The functions that tell of tenants have to be there and to be some; who may call them is for the pass to
/// judge.
void check_tenancy_exists(const Route &route, Oid role) {
    for (const store::Finding &finding : store::tenancy_findings(route, role)) {
        if (finding.sqlstate == ERRCODE_INSUFFICIENT_PRIVILEGE)
            warn(finding);
        else
            store::require({finding});
    }
}

/// The relation that a route has for all its tenants.
store::Relation check_relation_exists(const Route &route) {
    const store::Relation relation = store::describe(route.relation, AccessShareLock);
    const std::vector<store::Finding> findings = store::missing_or_wrong(relation, needs_of(route));
    store::require(findings);
    for (const store::Finding &finding : findings)
        warn(finding);
    if (store::tenant_filter(route) == store::TenantFilter::column)
        for (const store::Finding &finding : store::tenant_index_findings(relation, route.hlc_ordering))
            warn(finding);
    return relation;
}

void check_relation_rights(const store::Relation &relation, const Route &route, Oid role) {
    if (const std::optional<store::Finding> finding = store::owner_finding(relation, role))
        warn(*finding);
    for (const store::Finding &finding : store::privilege_findings(relation, needs_of(route), role))
        warn(finding);
}

/// The objects that the route names: missing or wrong ones are errors, rights and indexes at most warnings.
void check_existence(const Route &route) {
    std::optional<store::Relation> relation;
    if (!route.relation.empty())
        relation = check_relation_exists(route);
    const Oid role = find_role(route.owner);
    if (!OidIsValid(role))
        pg::raise({ERRCODE_UNDEFINED_OBJECT, "role \"" + route.owner + "\" does not exist",
                   "It is to be the owner of outbox route \"" + route.name + "\".",
                   "Name a role that exists, or leave owner out for the owner of the relation."});
    if (relation)
        check_relation_rights(*relation, route, role);
    check_tenancy_exists(route, role);
    check_log_existence(route, role);
    if (!route.target_function.empty())
        check_target_exists(route, role);
}

/// 55006 while rows carry the old name: nobody would relay them any more.
void check_rename(const Route &before, const Route &after) {
    if (before.name == after.name)
        return;
    if (before.relation.empty())
        pg::raise({ERRCODE_OBJECT_IN_USE,
                   "outbox route \"" + before.name + "\" can't be renamed while it has a relation_function",
                   "Rows in the tables of all its tenants may carry its name.",
                   "Add a second route, let this one drain, then delete it."});
    if (!store::find_relation(before.relation, AccessShareLock).has_value())
        return;
    const Oid owner = find_role(before.owner);
    if (!store::has_undrained(before, std::nullopt, OidIsValid(owner) ? owner : GetUserId()))
        return;
    pg::raise(
        {ERRCODE_OBJECT_IN_USE,
         "outbox route \"" + before.name + "\" can't be renamed while it has rows to relay",
         "Rows of " + before.relation + " carry its name and are pending or processing.",
         "Stop staging under the old name, wait until outbox_has_undrained is false, then rename; or add a "
         "second route."});
}

bool needs_existence_check(const Route &before, const Route &after) {
    return before.relation != after.relation || before.storage != after.storage ||
           before.delivery_log != after.delivery_log || before.tenants_function != after.tenants_function ||
           before.relation_function != after.relation_function ||
           before.delivery_log_function != after.delivery_log_function ||
           before.target_function != after.target_function || before.owner != after.owner ||
           before.hlc_ordering != after.hlc_ordering || before.propagate_trace != after.propagate_trace ||
           before.reclaim_stale_after_ms != after.reclaim_stale_after_ms;
}

bool tuning_changed(const Route &before, const Route &after) {
    for (const store::TuningColumn &column : store::tuning_columns())
        if (before.*column.column != after.*column.column)
            return true;
    return false;
}

void check_binding_kept(const Route &before, const RouteRow &row) {
    if (row.text("bound_to") == before.bound_to || is_adopting())
        return;
    pg::raise({ERRCODE_INVALID_PARAMETER_VALUE,
               "column \"bound_to\" of outbox route \"" + before.name + "\" can't be updated",
               "It says where the route runs, so that copies of the database stay silent.",
               "Call outbox_adopt('" + before.name + "') to bind the route to this database."});
}

/// The columns that the trigger fills in.
class Filled {
  public:
    explicit Filled(const RouteRow &row) : row_(row) {}

    void text(const char *column, const std::string &value) { add(column, pg::text_datum(value)); }
    void name(const char *column, const std::string &value) {
        add(column, pg::guard([&value] {
                auto *name = static_cast<Name>(palloc0(NAMEDATALEN));
                namestrcpy(name, value.c_str());
                return NameGetDatum(name);
            }));
    }

    /// The row's tuple with them; the tuple itself when there are none.
    HeapTuple apply() {
        if (columns_.empty())
            return row_.tuple();
        const auto nulls = std::make_unique<bool[]>(columns_.size());
        return pg::guard([this, &nulls] {
            return heap_modify_tuple_by_cols(row_.tuple(), row_.descriptor(),
                                             static_cast<int>(columns_.size()), columns_.data(),
                                             values_.data(), nulls.get());
        });
    }

  private:
    void add(const char *column, Datum value) {
        columns_.push_back(row_.number(column));
        values_.push_back(value);
    }

    const RouteRow &row_;
    std::vector<int> columns_;
    std::vector<Datum> values_;
};

std::string upper(std::string text) {
    for (char &byte : text)
        byte = static_cast<char>(pg_ascii_toupper(static_cast<unsigned char>(byte)));
    return text;
}

/// Fills owner, binding and method into `route` and gives the tuple with them.
HeapTuple fill(const RouteRow &row, Route &route) {
    Filled filled(row);
    if (row.is_null("owner")) {
        route.owner = default_owner(route.relation);
        filled.name("owner", route.owner);
    }
    if (row.is_null("bound_to")) {
        route.bound_to = store::current_binding();
        filled.text("bound_to", route.bound_to);
    }
    if (const std::string method = upper(route.method); method != route.method) {
        route.method = method;
        filled.text("method", method);
    }
    return filled.apply();
}

/// A row that brings its binding comes out of a dump: nothing that it names need exist yet.
HeapTuple check_insert(const TriggerData *data) {
    const RouteRow row(data->tg_trigtuple, RelationGetDescr(data->tg_relation));
    const bool restored = !row.is_null("bound_to");
    check_form(row);
    Route route = store::parse_route(row);
    HeapTuple tuple = fill(row, route);
    check_writer(route.name, route.owner);
    check_ca_file_right(route);
    check_contradictions(route, !restored);
    if (!restored)
        check_existence(route);
    return tuple;
}

HeapTuple check_update(const TriggerData *data) {
    const TupleDesc descriptor = RelationGetDescr(data->tg_relation);
    const Route before = store::parse_route(RouteRow(data->tg_trigtuple, descriptor));
    const RouteRow row(data->tg_newtuple, descriptor);
    check_form(row);
    check_binding_kept(before, row);
    Route after = store::parse_route(row);
    HeapTuple tuple = fill(row, after);
    check_writer(before.name, before.owner);
    check_writer(after.name, after.owner);
    if (after.ca_file != before.ca_file)
        check_ca_file_right(after);
    check_contradictions(after, tuning_changed(before, after));
    if (needs_existence_check(before, after))
        check_existence(after);
    check_rename(before, after);
    return tuple;
}

HeapTuple check_delete(const TriggerData *data) {
    const Route route = store::parse_route(RouteRow(data->tg_trigtuple, RelationGetDescr(data->tg_relation)));
    check_writer(route.name, route.owner);
    return data->tg_trigtuple;
}

void check_truncate() {
    for (const Route &route : store::all_routes(store::find_extension().value()))
        check_writer(route.name, route.owner);
}

HeapTuple check(const TriggerData *data) {
    if (TRIGGER_FIRED_BY_INSERT(data->tg_event))
        return check_insert(data);
    if (TRIGGER_FIRED_BY_UPDATE(data->tg_event))
        return check_update(data);
    if (TRIGGER_FIRED_BY_DELETE(data->tg_event))
        return check_delete(data);
    check_truncate();
    return nullptr;
}

} // namespace

} // namespace outbox_relay::api

/// BEFORE trigger of outbox_route: validates, and fills owner and bound_to (spec.md, section 2).
Datum outbox_relay_route_check(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo] {
        return PointerGetDatum(outbox_relay::api::check(outbox_relay::api::trigger_of(fcinfo)));
    });
}

/// AFTER statement trigger of outbox_route: caches of all backends drop the routes when this
/// transaction commits, ours at once; the launcher and the workers are told at commit.
Datum outbox_relay_route_changed(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo] {
        const TriggerData *data = outbox_relay::api::trigger_of(fcinfo);
        pg::guard([data] { CacheInvalidateRelcache(data->tg_relation); });
        outbox_relay::worker::poke_at_commit();
        return PointerGetDatum(nullptr);
    });
}
