#include <set>
#include <string>
#include <vector>

#include "api/role.hpp"
#include "api/rows.hpp"
#include "pg/entry.hpp"
#include "pg/guard.hpp"
#include "store/ddl.hpp"
#include "store/effective.hpp"
#include "store/route.hpp"

extern "C" {
#include "utils/acl.h"
#include "utils/lsyscache.h"

PGDLLEXPORT Datum outbox_relay_route_settings(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_ddl(PG_FUNCTION_ARGS);
PG_FUNCTION_INFO_V1(outbox_relay_route_settings);
PG_FUNCTION_INFO_V1(outbox_relay_ddl);
}

namespace outbox_relay::api {

namespace {

/// The function behind outbox_route_effective is executable by everybody, as a function in a view has
/// to be; what it shows takes the right to read the view.
void check_view_right(const store::Extension &extension) {
    const bool allowed = pg::guard([&extension] {
        const Oid view = get_relname_relid("outbox_route_effective", extension.schema);
        return OidIsValid(view) && pg_class_aclcheck(view, GetUserId(), ACL_SELECT) == ACLCHECK_OK;
    });
    if (!allowed)
        pg::raise({ERRCODE_INSUFFICIENT_PRIVILEGE, "permission denied for view outbox_route_effective", "",
                   "Ask for SELECT on that view."});
}

void put_settings(Rows &rows) {
    const std::optional<store::Extension> extension = store::find_extension();
    if (!extension.has_value())
        return;
    check_view_right(*extension);
    const std::set<std::string> changed = store::changed_parameters();
    for (const store::Route &route : store::all_routes(*extension)) {
        const Oid owner = find_role(route.owner);
        if (OidIsValid(owner) ? !is_member_of(owner) : !superuser())
            continue;
        for (const store::Setting &setting : store::effective_settings(route, changed)) {
            const pg::Value values[] = {text_value(route.name), text_value(setting.setting),
                                        text_or_null(setting.value), text_value(setting.source)};
            rows.put(values);
        }
    }
}

/// Argument `number` as text. Raises 22004 for NULL.
std::string name_argument(FunctionCallInfo fcinfo, int number) {
    if (PG_ARGISNULL(number))
        pg::raise({ERRCODE_NULL_VALUE_NOT_ALLOWED, "the relation must not be NULL", "",
                   "Give it as schema.table."});
    return pg::text_of(PG_GETARG_DATUM(number));
}

bool flag_argument(FunctionCallInfo fcinfo, int number) {
    return !PG_ARGISNULL(number) && PG_GETARG_BOOL(number);
}

void put_ddl(FunctionCallInfo fcinfo, Rows &rows) {
    std::vector<std::string> statements =
        store::outbox_ddl(name_argument(fcinfo, 0), flag_argument(fcinfo, 1), flag_argument(fcinfo, 2));
    if (!PG_ARGISNULL(3))
        for (std::string &statement : store::delivery_log_ddl(name_argument(fcinfo, 3)))
            statements.push_back(std::move(statement));
    for (const std::string &statement : statements) {
        const pg::Value values[] = {text_value(statement)};
        rows.put(values);
    }
}

} // namespace

} // namespace outbox_relay::api

namespace api = outbox_relay::api;

/// The rows of outbox_route_effective: (name, setting, value, source).
Datum outbox_relay_route_settings(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo] {
        api::Rows rows(fcinfo);
        api::put_settings(rows);
        return Datum(0);
    });
}

/// outbox_ddl(relation, hlc, trace, delivery_log): statements for \gexec; creates nothing.
Datum outbox_relay_ddl(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo] {
        api::Rows rows(fcinfo, true);
        api::put_ddl(fcinfo, rows);
        return Datum(0);
    });
}
