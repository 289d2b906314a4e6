#include <cstring>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "store/relation.hpp"
#include "store/route.hpp"
#include "worker/stats.hpp"
#include "worker/wake.hpp"

#include "pg/entry.hpp"
#include "pg/guard.hpp"
#include "pg/spi.hpp"

extern "C" {
#include "catalog/pg_type.h"
#include "commands/trigger.h"
#include "executor/tuptable.h"
#include "utils/builtins.h"
#include "utils/rel.h"
#include "utils/tuplestore.h"
#include "utils/uuid.h"

PGDLLEXPORT Datum outbox_relay_wake(PG_FUNCTION_ARGS);
PG_FUNCTION_INFO_V1(outbox_relay_wake);
}

namespace outbox_relay::api {

namespace {

/// More lanes than this in one statement are not told apart.
constexpr std::size_t kMaxLanes = 64;

/// A lane by its names.
using LaneName = std::pair<std::string, std::optional<core::Uuid>>;

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

/// Reads the transition table's rows one by one.
class NewRows {
  public:
    explicit NewRows(TriggerData *data) : data_(data) {
        pg::guard([this] {
            route_ = SPI_fnumber(RelationGetDescr(data_->tg_relation), "outbox_route");
            tenant_ = SPI_fnumber(RelationGetDescr(data_->tg_relation), "tenant_id");
            slot_ = MakeSingleTupleTableSlot(RelationGetDescr(data_->tg_relation), &TTSOpsMinimalTuple);
        });
    }
    NewRows(const NewRows &) = delete;
    NewRows &operator=(const NewRows &) = delete;

    bool has_columns() const {
        return route_ > 0 && tenant_ > 0 &&
               TupleDescAttr(RelationGetDescr(data_->tg_relation), tenant_ - 1)->atttypid == UUIDOID;
    }
    bool next() {
        return pg::guard([this] { return tuplestore_gettupleslot(data_->tg_newtable, true, false, slot_); });
    }
    /// Empty for NULL, which is no route.
    std::string route() {
        const char *value = pg::guard([this]() -> const char * {
            bool null = true;
            const Datum datum = slot_getattr(slot_, route_, &null);
            return null ? nullptr : TextDatumGetCString(datum);
        });
        if (value == nullptr)
            return {};
        std::string name = value;
        pg::guard([value] { pfree(const_cast<char *>(value)); });
        return name;
    }
    std::optional<core::Uuid> tenant() {
        core::Uuid tenant;
        const bool null = pg::guard([this, &tenant] {
            bool missing = true;
            const Datum datum = slot_getattr(slot_, tenant_, &missing);
            if (!missing)
                std::memcpy(tenant.bytes.data(), DatumGetUUIDP(datum)->data, UUID_LEN);
            return missing;
        });
        return null ? std::nullopt : std::optional(tenant);
    }
    void end() {
        pg::guard([this] { ExecDropSingleTupleTableSlot(slot_); });
    }

  private:
    TriggerData *data_;
    int route_ = 0;
    int tenant_ = 0;
    TupleTableSlot *slot_ = nullptr;
};

/// The lanes that the inserted rows belong to; nothing when there are too many or the table has no such
/// columns.
std::optional<std::set<LaneName>> inserted_lanes(const store::Extension &extension, TriggerData *data) {
    NewRows rows(data);
    std::set<LaneName> lanes;
    std::string last;
    bool by_tenant = false;
    while (rows.has_columns() && lanes.size() <= kMaxLanes && rows.next()) {
        const std::string route = rows.route();
        if (route.empty() || (route == last && !by_tenant))
            continue;
        if (route != last) {
            const store::Route *known = store::find_route(extension, route);
            by_tenant = known != nullptr && known->has_tenants();
            last = route;
        }
        lanes.emplace(route, by_tenant ? rows.tenant() : std::nullopt);
    }
    const bool told = rows.has_columns() && lanes.size() <= kMaxLanes;
    rows.end();
    return told ? std::optional(lanes) : std::nullopt;
}

/// Wakes the lanes of the routes whose table this is; of those that find their tables by tenant it takes too
/// much to tell.
void wake_lanes_of(const store::Extension &extension, Oid table) {
    for (const store::Route &route : store::all_routes(extension)) {
        if (!route.has_tenants()) {
            const std::optional<store::Relation> relation = store::find_relation(route.relation, NoLock);
            if (relation && relation->oid == table)
                worker::wake_at_commit(route.name, std::nullopt);
        } else if (route.enabled) {
            worker::wake_all_at_commit();
        }
    }
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
        std::optional<std::set<api::LaneName>> lanes;
        if (data->tg_newtable != nullptr)
            lanes = api::inserted_lanes(*extension, data);
        if (!lanes)
            api::wake_lanes_of(*extension, RelationGetRelid(data->tg_relation));
        else
            for (const auto &[route, tenant] : *lanes)
                worker::wake_at_commit(route, tenant);
        return PointerGetDatum(nullptr);
    });
}
