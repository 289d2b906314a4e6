#include <algorithm>
#include <optional>
#include <vector>

#include "api/argument.hpp"
#include "api/role.hpp"
#include "pg/entry.hpp"
#include "pg/guard.hpp"
#include "store/probe.hpp"
#include "store/route.hpp"
#include "worker/memory.hpp"
#include "worker/wake.hpp"

extern "C" {
#include "access/htup_details.h"
#include "access/xact.h"
#include "funcapi.h"
#include "utils/fmgrprotos.h"
#include "utils/timestamp.h"

PGDLLEXPORT Datum outbox_relay_depth(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_has_undrained(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_oldest_pending_age(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_requeue_failed(PG_FUNCTION_ARGS);
PG_FUNCTION_INFO_V1(outbox_relay_depth);
PG_FUNCTION_INFO_V1(outbox_relay_has_undrained);
PG_FUNCTION_INFO_V1(outbox_relay_oldest_pending_age);
PG_FUNCTION_INFO_V1(outbox_relay_requeue_failed);
}

namespace outbox_relay::api {

namespace {

/// The record (pending, processing, failed).
Datum depth_record(FunctionCallInfo fcinfo, const store::Depth &depth) {
    return pg::guard([fcinfo, &depth] {
        TupleDesc descriptor = nullptr;
        if (get_call_result_type(fcinfo, nullptr, &descriptor) != TYPEFUNC_COMPOSITE)
            elog(ERROR, "outbox_depth called where no record is accepted");
        Datum values[] = {Int64GetDatum(depth.pending), Int64GetDatum(depth.processing),
                          Int64GetDatum(depth.failed)};
        bool nulls[] = {false, false, false};
        return HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(descriptor), values, nulls));
    });
}

/// Time from `created_at` to the start of the statement; nothing for infinite times, zero for those
/// ahead of the clock.
std::optional<Datum> age_of(TimestampTz created_at) {
    if (TIMESTAMP_NOT_FINITE(created_at))
        return std::nullopt;
    return pg::guard([created_at] {
        const TimestampTz now = GetCurrentStatementStartTimestamp();
        return DirectFunctionCall2(timestamp_mi, TimestampTzGetDatum(now),
                                   TimestampTzGetDatum(Min(created_at, now)));
    });
}

/// How many rows get a new start: failed ones, and those that lanes have set aside.
std::int64_t requeue(const store::Requeue &what) {
    std::vector<worker::AsideRow> aside = worker::rows_aside(what.route.name);
    std::vector<store::RowVersion> versions;
    for (const worker::AsideRow &row : aside)
        versions.push_back(row.version);
    const store::Requeued done = store::requeue_failed(what, versions);
    std::erase_if(aside, [&done](const worker::AsideRow &row) {
        return std::find(done.aside.begin(), done.aside.end(), row.version.id) == done.aside.end();
    });
    worker::let_go_at_commit(aside);
    return done.failed + static_cast<std::int64_t>(done.aside.size());
}

} // namespace

} // namespace outbox_relay::api

namespace api = outbox_relay::api;
namespace store = outbox_relay::store;
namespace worker = outbox_relay::worker;

/// outbox_depth(route, tenant_id): pending, processing and failed rows (spec.md, section 2).
Datum outbox_relay_depth(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo] {
        const store::Route &route = api::route_argument(fcinfo);
        return api::depth_record(fcinfo,
                                 store::depth(route, api::tenant_argument(fcinfo, 1, route), GetUserId()));
    });
}

/// outbox_has_undrained(route, tenant_id): whether rows are pending or processing.
Datum outbox_relay_has_undrained(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo] {
        const store::Route &route = api::route_argument(fcinfo);
        return BoolGetDatum(store::has_undrained(route, api::tenant_argument(fcinfo, 1, route), GetUserId()));
    });
}

/// outbox_oldest_pending_age(route, tenant_id): an interval, or NULL without pending rows.
Datum outbox_relay_oldest_pending_age(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo] {
        const store::Route &route = api::route_argument(fcinfo);
        const std::optional<TimestampTz> created_at =
            store::oldest_pending(route, api::tenant_argument(fcinfo, 1, route), GetUserId());
        const std::optional<Datum> age = created_at.has_value() ? api::age_of(*created_at) : std::nullopt;
        fcinfo->isnull = !age.has_value();
        return age.value_or(Datum(0));
    });
}

/// outbox_requeue_failed(route, event_ids, tenant_id): failed rows back to pending, as the owner; rows that
/// lanes have set aside are forgotten at commit.
Datum outbox_relay_requeue_failed(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo] {
        const store::Route &route = api::route_argument(fcinfo);
        const Oid owner = api::require_owner(route.name, route.owner);
        const std::optional<Datum> event_ids =
            PG_ARGISNULL(1) ? std::nullopt : std::optional<Datum>(PG_GETARG_DATUM(1));
        const std::optional<outbox_relay::core::Uuid> tenant = api::tenant_argument(fcinfo, 2, route);
        const std::int64_t count = api::requeue({route, tenant, event_ids, owner});
        if (count > 0 && route.has_tenants() && !tenant)
            worker::wake_tenants_at_commit(route.name);
        else if (count > 0)
            worker::wake_at_commit(route.name, route.has_tenants() ? tenant : std::nullopt);
        return Int64GetDatum(count);
    });
}
