#include "api/adopt.hpp"

#include <optional>
#include <string>

#include "api/role.hpp"
#include "store/route.hpp"

#include "pg/entry.hpp"
#include "pg/guard.hpp"
#include "pg/spi.hpp"

extern "C" {
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/relcache.h"

PGDLLEXPORT Datum outbox_relay_adopt(PG_FUNCTION_ARGS);
PG_FUNCTION_INFO_V1(outbox_relay_adopt);
}

namespace outbox_relay::api {

namespace {

bool adopting = false;

/// Lets the trigger of outbox_route take a changed bound_to for the life of a scope.
class Adopting {
  public:
    Adopting() { adopting = true; }
    ~Adopting() { adopting = false; }
    Adopting(const Adopting &) = delete;
    Adopting &operator=(const Adopting &) = delete;
};

Oid owner_of_table(Oid table) {
    return pg::guard([table] {
        const ::Relation relation = RelationIdGetRelation(table);
        const Oid owner = relation->rd_rel->relowner;
        RelationClose(relation);
        return owner;
    });
}

/// Binds the route here, as the owner of outbox_route: who was given this function need not be given that
/// table.
void bind(const store::Extension &extension, const store::Route &route, const std::string &binding) {
    static constexpr Oid kTypes[] = {TEXTOID, TEXTOID};
    pg::Context context;
    context.role = owner_of_table(extension.route_table);
    const std::string table = pg::guard([&extension] {
        return quote_qualified_identifier(get_namespace_name(extension.schema), "outbox_route");
    });
    pg::spi_connect();
    pg::Plan plan;
    plan.prepare_as(context, "UPDATE " + table + " SET bound_to = $2 WHERE name = $1", kTypes);
    const pg::Value values[] = {pg::Value(pg::text_datum(route.name)), pg::Value(pg::text_datum(binding))};
    const Adopting scope;
    (void)pg::execute_as(context, plan, values, nullptr);
    pg::spi_finish();
}

/// True when the caller may adopt the route; raises where it was named and the caller may not.
bool may_adopt(const store::Route &route, bool named) {
    if (named) {
        if (!superuser())
            (void)require_owner(route.name, route.owner);
        return true;
    }
    const Oid owner = find_role(route.owner);
    return OidIsValid(owner) ? is_member_of(owner) : superuser();
}

} // namespace

bool is_adopting() noexcept {
    return adopting;
}

} // namespace outbox_relay::api

using namespace outbox_relay;

/// outbox_adopt(route): binds the route, or all that the caller is a member of the owner of, to this server,
/// database and outbox_relay.environment; how many were bound elsewhere (spec.md section 8, copies).
Datum outbox_relay_adopt(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo]() -> Datum {
        pg::guard([] { PreventCommandIfReadOnly("outbox_adopt()"); });
        const std::optional<std::string> name =
            PG_ARGISNULL(0) ? std::nullopt : std::optional(pg::text_of(PG_GETARG_DATUM(0)));
        const std::optional<store::Extension> extension = store::find_extension();
        if (!extension)
            PG_RETURN_INT64(0);
        const std::string binding = store::current_binding();
        std::int64_t adopted = 0;
        bool found = false;
        for (const store::Route &route : store::all_routes(*extension)) {
            if (name && route.name != *name)
                continue;
            found = true;
            if (route.bound_to == binding || !api::may_adopt(route, name.has_value()))
                continue;
            api::bind(*extension, route, binding);
            ++adopted;
        }
        if (name && !found)
            store::raise_unknown_route(*name);
        PG_RETURN_INT64(adopted);
    });
}
