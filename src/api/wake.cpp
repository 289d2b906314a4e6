#include <optional>
#include <set>
#include <string>
#include <vector>

#include "store/relation.hpp"
#include "store/route.hpp"
#include "worker/stats.hpp"
#include "worker/wake.hpp"

#include "pg/entry.hpp"
#include "pg/guard.hpp"
#include "pg/spi.hpp"

extern "C" {
#include "commands/trigger.h"
#include "executor/tuptable.h"
#include "utils/builtins.h"
#include "utils/rel.h"
#include "utils/tuplestore.h"

PGDLLEXPORT Datum outbox_relay_wake(PG_FUNCTION_ARGS);
PG_FUNCTION_INFO_V1(outbox_relay_wake);
}

namespace outbox_relay::api {

namespace {

/// More routes than this in one statement are not told apart.
constexpr std::size_t kMaxRoutes = 64;

TriggerData *trigger_data(FunctionCallInfo fcinfo) {
    auto *data = reinterpret_cast<TriggerData *>(fcinfo->context);
    if (!CALLED_AS_TRIGGER(fcinfo) || !TRIGGER_FIRED_AFTER(data->tg_event) ||
        TRIGGER_FIRED_FOR_ROW(data->tg_event) || !TRIGGER_FIRED_BY_INSERT(data->tg_event))
        pg::raise({ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED,
                   "outbox_wake must be fired after INSERT for each statement", "",
                   "CREATE TRIGGER name AFTER INSERT ON table REFERENCING NEW TABLE AS staged FOR EACH "
                   "STATEMENT EXECUTE "
                   "FUNCTION outbox_wake()."});
    return data;
}

/// The distinct values of outbox_route in the transition table; nothing when there are too many or no
/// such column.
std::optional<std::set<std::string>> inserted_routes(TriggerData *data) {
    const int column =
        pg::guard([data] { return SPI_fnumber(RelationGetDescr(data->tg_relation), "outbox_route"); });
    if (column <= 0)
        return std::nullopt;
    TupleTableSlot *slot = pg::guard([data] {
        return MakeSingleTupleTableSlot(RelationGetDescr(data->tg_relation), &TTSOpsMinimalTuple);
    });
    std::set<std::string> routes;
    std::string last;
    bool more = true;
    while (more && routes.size() <= kMaxRoutes) {
        const char *value = pg::guard([&]() -> const char * {
            more = tuplestore_gettupleslot(data->tg_newtable, true, false, slot);
            bool null = true;
            const Datum datum = more ? slot_getattr(slot, column, &null) : (Datum)0;
            return null ? nullptr : TextDatumGetCString(datum);
        });
        if (value == nullptr)
            continue;
        if (last != value)
            routes.insert(last = value);
        pg::guard([value] { pfree(const_cast<char *>(value)); });
    }
    pg::guard([slot] { ExecDropSingleTupleTableSlot(slot); });
    if (routes.size() > kMaxRoutes)
        return std::nullopt;
    return routes;
}

/// The names of the routes whose table this is.
std::set<std::string> routes_of(const store::Extension &extension, Oid table) {
    std::set<std::string> names;
    for (const store::Route &route : store::all_routes(extension)) {
        const std::optional<store::Relation> relation = store::find_relation(route.relation, NoLock);
        if (relation && relation->oid == table)
            names.insert(route.name);
    }
    return names;
}

} // namespace

} // namespace outbox_relay::api

using namespace outbox_relay;

Datum outbox_relay_wake(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo]() -> Datum {
        TriggerData *data = api::trigger_data(fcinfo);
        const std::optional<store::Extension> extension = store::find_extension();
        if (!worker::shared_memory_ready() || !extension)
            return PointerGetDatum(nullptr);
        std::optional<std::set<std::string>> routes;
        if (data->tg_newtable != nullptr)
            routes = api::inserted_routes(data);
        if (!routes)
            routes = api::routes_of(*extension, RelationGetRelid(data->tg_relation));
        for (const std::string &route : *routes)
            worker::wake_at_commit(route, std::nullopt);
        return PointerGetDatum(nullptr);
    });
}
