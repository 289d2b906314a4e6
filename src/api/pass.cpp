#include <cstdint>
#include <optional>

#include "api/argument.hpp"
#include "api/role.hpp"
#include "core/pass.hpp"
#include "pg/entry.hpp"
#include "pg/guard.hpp"
#include "store/route.hpp"
#include "store/tenancy.hpp"
#include "worker/on_demand.hpp"
#include "worker/stats.hpp"

extern "C" {
#include "access/htup_details.h"
#include "funcapi.h"
#include "tcop/utility.h"

PGDLLEXPORT Datum outbox_relay_pass(PG_FUNCTION_ARGS);
PG_FUNCTION_INFO_V1(outbox_relay_pass);
}

namespace outbox_relay::api {

namespace {

constexpr const char *kName = "outbox_relay_pass()";

/// Argument 1; 0 for NULL. Raises 22023 below 1.
std::int64_t max_rows_argument(FunctionCallInfo fcinfo) {
    if (PG_ARGISNULL(1))
        return 0;
    const std::int32_t max_rows = PG_GETARG_INT32(1);
    if (max_rows < 1)
        pg::raise({ERRCODE_INVALID_PARAMETER_VALUE, "max_rows must be at least 1", "",
                   "Leave it out, or give NULL, for the route's max_claim_rows."});
    return max_rows;
}

/// What has to hold wherever a pass runs: a server that may write, with our shared memory, and the place
/// that the route is bound to.
void require_place(const store::Route &route) {
    pg::guard([] {
        PreventCommandDuringRecovery(kName);
        PreventCommandIfReadOnly(kName);
    });
    if (!worker::shared_memory_ready())
        pg::raise({ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                   "a pass of an outbox route needs outbox_relay to be preloaded", "",
                   "Add outbox_relay to shared_preload_libraries and restart the server."});
    if (route.bound_to != store::current_binding())
        pg::raise({ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                   "outbox route \"" + route.name + "\" is bound to another database",
                   "This database looks like a copy: the route's bound_to does not match it.",
                   "If this copy is to relay, call outbox_adopt()."});
}

Datum record_of(FunctionCallInfo fcinfo, const core::PassResult &result) {
    return pg::guard([fcinfo, &result] {
        TupleDesc descriptor = nullptr;
        if (get_call_result_type(fcinfo, nullptr, &descriptor) != TYPEFUNC_COMPOSITE)
            elog(ERROR, "outbox_relay_pass called where no record is accepted");
        Datum values[] = {Int64GetDatum(result.claimed),  Int64GetDatum(result.published),
                          Int64GetDatum(result.failed),   Int64GetDatum(result.retried),
                          Int64GetDatum(result.refused),  Int64GetDatum(result.reclaimed),
                          Int64GetDatum(result.untouched)};
        bool nulls[lengthof(values)] = {};
        return HeapTupleGetDatum(heap_form_tuple(BlessTupleDesc(descriptor), values, nulls));
    });
}

} // namespace

} // namespace outbox_relay::api

namespace api = outbox_relay::api;

/// outbox_relay_pass(route, max_rows, tenant_id): one pass now, in the caller's transaction (spec.md,
/// section 2).
Datum outbox_relay_pass(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo] {
        // A copy: code that runs in the pass may change the route.
        const outbox_relay::store::Route route = api::route_argument(fcinfo);
        (void)api::require_owner(route.name, route.owner);
        const std::int64_t max_rows = api::max_rows_argument(fcinfo);
        const std::optional<outbox_relay::core::Uuid> tenant = api::tenant_argument(fcinfo, 2, route, true);
        if (tenant && !route.has_tenants())
            pg::raise({ERRCODE_INVALID_PARAMETER_VALUE, "outbox route \"" + route.name + "\" has no tenants",
                       "", "Leave tenant_id out."});
        outbox_relay::store::require_tenant(route, tenant);
        api::require_place(route);
        return api::record_of(fcinfo, outbox_relay::worker::pass_on_demand(route, tenant, max_rows));
    });
}
