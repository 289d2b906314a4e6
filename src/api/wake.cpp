#include <cstring>
#include <optional>
#include <string>
#include <utility>

#include "store/relation.hpp"
#include "store/route.hpp"
#include "store/tenancy.hpp"
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

/// How the rows of one route in a statement find their lanes.
struct Lanes {
    std::string route;
    store::TenantFilter filter = store::TenantFilter::none;
    std::optional<core::Uuid> last_tenant;
    bool begun = false; ///< a row of them was seen
};

/// Wakes the lane of a row. One without a tenant belongs, in a tenant's own table, to the tenant of the
/// table, which is not known here; in a table that tenants share to nobody.
void wake_lane_of_row(Lanes &lanes, NewRows &rows) {
    if (lanes.filter == store::TenantFilter::none) {
        if (!lanes.begun)
            worker::wake_at_commit(lanes.route, std::nullopt);
    } else {
        const std::optional<core::Uuid> tenant = rows.tenant();
        if (lanes.begun && tenant == lanes.last_tenant)
            return;
        lanes.last_tenant = tenant;
        if (tenant)
            worker::wake_at_commit(lanes.route, tenant);
        else if (lanes.filter == store::TenantFilter::table)
            worker::wake_tenants_at_commit(lanes.route);
    }
    lanes.begun = true;
}

/// Wakes the lanes that the inserted rows belong to; false when the table has no columns that tell.
bool wake_lanes_of_rows(const store::Extension &extension, TriggerData *data) {
    NewRows rows(data);
    const bool told = rows.has_columns();
    Lanes lanes;
    while (told && rows.next()) {
        std::string route = rows.route();
        if (route.empty())
            continue;
        if (route != lanes.route) {
            const store::Route *known = store::find_route(extension, route);
            lanes = {std::move(route), known == nullptr ? store::TenantFilter::none : tenant_filter(*known),
                     std::nullopt, false};
        }
        wake_lane_of_row(lanes, rows);
    }
    rows.end();
    return told;
}

/// Wakes the lanes of the routes whose table this is. A route that finds its tables by tenant may have it
/// among them: to ask for each tenant takes too much.
void wake_lanes_of_table(const store::Extension &extension, Oid table) {
    for (const store::Route &route : store::all_routes(extension)) {
        if (!route.relation.empty()) {
            const std::optional<store::Relation> relation = store::find_relation(route.relation, NoLock);
            if (!relation || relation->oid != table)
                continue;
        }
        if (route.has_tenants())
            worker::wake_tenants_at_commit(route.name);
        else
            worker::wake_at_commit(route.name, std::nullopt);
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
        if (data->tg_newtable == nullptr || !api::wake_lanes_of_rows(*extension, data))
            api::wake_lanes_of_table(*extension, RelationGetRelid(data->tg_relation));
        return PointerGetDatum(nullptr);
    });
}
