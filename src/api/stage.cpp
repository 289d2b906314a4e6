#include <cstring>
#include <optional>
#include <string>

#include "api/staging.hpp"
#include "core/header.hpp"
#include "settings/settings.hpp"
#include "worker/hlc.hpp"
#include "worker/wake.hpp"

#include "pg/entry.hpp"
#include "pg/guard.hpp"
#include "pg/spi.hpp"

extern "C" {
#include "access/detoast.h"
#include "access/xact.h"
#include "nodes/params.h"
#include "utils/uuid.h"

PGDLLEXPORT Datum outbox_relay_stage(PG_FUNCTION_ARGS);
PG_FUNCTION_INFO_V1(outbox_relay_stage);
}

namespace outbox_relay::api {

namespace {

/// Arguments of outbox_stage, by position.
enum Argument {
    kRoute,
    kEventType,
    kPayload,
    kEventId,
    kOrderingKey,
    kOccurredAt,
    kTenant,
    kExecution,
    kCorrelation,
    kCausation,
    kTraceparent,
    kAvailableAt
};

/// True when a function, procedure or DO called us: every language and SPI push an error context; so
/// does the extended protocol, but with a callback of its own.
bool called_from_code() {
    for (const ErrorContextCallback *at = error_context_stack; at != nullptr; at = at->previous)
        if (at->callback != ParamsErrorCallback)
            return true;
    return false;
}

void require_transaction(const store::Route &route) {
    if (!route.require_transaction || IsTransactionBlock() || IsSubTransaction() || called_from_code())
        return;
    pg::raise({ERRCODE_NO_ACTIVE_SQL_TRANSACTION,
               "staging on route \"" + route.name + "\" requires a transaction block",
               "The route's require_transaction is set: an event belongs to the transaction of what it tells "
               "about.",
               "Call it between BEGIN and COMMIT."});
}

pg::Value argument(FunctionCallInfo fcinfo, int number) {
    return PG_ARGISNULL(number) ? pg::Value() : pg::Value(PG_GETARG_DATUM(number));
}

void require_argument(FunctionCallInfo fcinfo, int number, const char *name) {
    if (PG_ARGISNULL(number))
        pg::raise({ERRCODE_NULL_VALUE_NOT_ALLOWED, std::string(name) + " must not be NULL", "",
                   "Give at least route, event_type and payload; an event without data can have the payload "
                   "'{}'."});
}

store::Event event_of(FunctionCallInfo fcinfo) {
    using Column = store::StageColumn;
    store::Event event;
    event[Column::event_type] = argument(fcinfo, kEventType);
    event[Column::payload] = argument(fcinfo, kPayload);
    event[Column::event_id] = argument(fcinfo, kEventId);
    event[Column::ordering_key] = argument(fcinfo, kOrderingKey);
    event[Column::occurred_at] = argument(fcinfo, kOccurredAt);
    event[Column::tenant_id] = argument(fcinfo, kTenant);
    event[Column::execution_id] = argument(fcinfo, kExecution);
    event[Column::correlation_id] = argument(fcinfo, kCorrelation);
    event[Column::causation_id] = argument(fcinfo, kCausation);
    event[Column::traceparent] = argument(fcinfo, kTraceparent);
    event[Column::available_at] = argument(fcinfo, kAvailableAt);
    return event;
}

void fill(store::Event &event, store::StageColumn column, const char *parameter, core::Uuid &place) {
    if (!event[column].null)
        return;
    if (const std::optional<core::Uuid> uuid = settings::context_uuid(parameter)) {
        place = *uuid;
        event[column] = pg::Value(PointerGetDatum(place.bytes.data()));
    }
}

} // namespace

const store::Route &staging_route(FunctionCallInfo fcinfo) {
    require_argument(fcinfo, kRoute, "route");
    const std::string name = pg::text_of(PG_GETARG_DATUM(kRoute));
    const std::optional<store::Extension> extension = store::find_extension();
    const store::Route *route = extension ? store::find_route(*extension, name) : nullptr;
    if (route == nullptr)
        store::raise_unknown_route(name);
    require_transaction(*route);
    return *route;
}

void check_payload_size(const store::Route &route, Datum payload, const std::string &element) {
    const std::int64_t size =
        pg::guard([payload] { return static_cast<std::int64_t>(toast_raw_datum_size(payload)); }) -
        static_cast<std::int64_t>(VARHDRSZ);
    if (size <= route.max_payload_bytes)
        return;
    pg::raise(
        {ERRCODE_PROGRAM_LIMIT_EXCEEDED, element + "payload is too large for route \"" + route.name + "\"",
         "The payload has " + std::to_string(size) + " bytes as jsonb, max_payload_bytes of the route is " +
             std::to_string(route.max_payload_bytes) + ".",
         "Raise max_payload_bytes of the route, or stage a reference to the data."});
}

void wake_lane_of(const store::Route &route, const store::Event &event) {
    std::optional<core::Uuid> tenant;
    if (route.has_tenants()) {
        tenant.emplace();
        std::memcpy(tenant->bytes.data(), DatumGetUUIDP(event[store::StageColumn::tenant_id].datum)->data,
                    UUID_LEN);
    }
    worker::wake_at_commit(route.name, tenant);
}

void check_traceparent(const std::string &value, const std::string &element) {
    if (core::is_traceparent(value))
        return;
    pg::raise(
        {ERRCODE_INVALID_PARAMETER_VALUE, element + "traceparent is malformed",
         "It must have the form 00-TRACE-PARENT-FLAGS in lower-case hex, with neither id all zero (W3C Trace "
         "Context).",
         "Leave it out when there is none."});
}

void apply_context(const store::Route &route, store::Event &event, std::array<core::Uuid, 4> &ids) {
    using Column = store::StageColumn;
    const settings::Parameters &context = settings::parameters;
    fill(event, Column::tenant_id, context.tenant_id, ids[0]);
    fill(event, Column::execution_id, context.execution_id, ids[1]);
    fill(event, Column::correlation_id, context.correlation_id, ids[2]);
    fill(event, Column::causation_id, context.causation_id, ids[3]);
    if (route.propagate_trace && event[Column::traceparent].null && *context.traceparent != '\0')
        event[Column::traceparent] = pg::Value(pg::text_datum(context.traceparent));
}

} // namespace outbox_relay::api

using namespace outbox_relay;

Datum outbox_relay_stage(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo]() -> Datum {
        // A copy: the INSERT may run triggers that stage as well, which may move the cache.
        const store::Route route = api::staging_route(fcinfo);
        api::require_argument(fcinfo, api::kEventType, "event_type");
        api::require_argument(fcinfo, api::kPayload, "payload");
        store::Event event = api::event_of(fcinfo);
        if (pg::text_of(event[store::StageColumn::event_type].datum).empty())
            pg::raise({ERRCODE_INVALID_PARAMETER_VALUE, "event_type must not be empty", "",
                       "Name what happened, for example 'order.created'."});
        if (!PG_ARGISNULL(api::kTraceparent))
            api::check_traceparent(pg::text_of(PG_GETARG_DATUM(api::kTraceparent)), "");
        api::check_payload_size(route, PG_GETARG_DATUM(api::kPayload), "");
        std::array<core::Uuid, 4> context_ids;
        api::apply_context(route, event, context_ids);
        if (route.hlc_ordering)
            event[store::StageColumn::hlc] = pg::Value(Int64GetDatum(worker::take_stamps(1)));
        const std::optional<core::Uuid> staged = store::stage(route, event);
        if (!staged)
            PG_RETURN_NULL();
        api::wake_lane_of(route, event);
        const core::Uuid id = *staged;
        return pg::guard([&id] {
            auto *result = static_cast<pg_uuid_t *>(palloc(sizeof(pg_uuid_t)));
            std::memcpy(result->data, id.bytes.data(), UUID_LEN);
            return UUIDPGetDatum(result);
        });
    });
}
