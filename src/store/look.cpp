#include "store/look.hpp"

#include "store/index.hpp"
#include "store/outbox_sql.hpp"
#include "store/relation.hpp"
#include "store/tenancy.hpp"

extern "C" {
#include "catalog/pg_type.h"
#include "utils/timestamp.h"
}

namespace outbox_relay::store {

namespace {

pg::Context context_of(const Effective &settings, const LookPlan &plan) {
    pg::Context context;
    context.role = plan.owner;
    context.statement_timeout_ms = static_cast<int>(settings.pass_statement_timeout_ms);
    context.lock_timeout_ms = context.statement_timeout_ms;
    context.ordered_plans = true;
    context.only_index = plan.only_index;
    return context;
}

void make(const Route &route, const std::optional<core::Uuid> &tenant, const Effective &settings,
          LookPlan &plan) {
    plan.owner = owner_of(route);
    const Tables tables = tables_of(route, tenant, context_of(settings, plan));
    const Relation relation = describe(tables.relation, AccessShareLock);
    require(missing_or_wrong(relation, Needs{}));
    const ClaimShape shape{route.hlc_ordering, false, tenant_filter(route)};
    if (shape.tenant == TenantFilter::column)
        plan.only_index = tenant_index(relation, shape.hlc);
    constexpr Oid types[] = {TEXTOID, UUIDOID};
    plan.plan.prepare_as(context_of(settings, plan), look_sql(relation.qualified_name, shape),
                         std::span<const Oid>(types, shape.tenant == TenantFilter::none ? 1 : 2));
}

} // namespace

Seen look_for_rows(const Route &route, const std::optional<core::Uuid> &tenant, const Effective &settings,
                   LookPlan &plan) {
    if (plan.plan.prepared() && plan.owner != owner_of(route))
        plan = LookPlan();
    if (!plan.plan.prepared())
        make(route, tenant, settings, plan);
    const pg::Value values[] = {pg::Value(pg::text_datum(route.name)),
                                tenant ? pg::Value(PointerGetDatum(tenant->bytes.data())) : pg::Value()};
    const bool filters = tenant_filter(route) != TenantFilter::none;
    const pg::Result result =
        pg::execute_as(context_of(settings, plan), plan.plan,
                       std::span<const pg::Value>(values, filters ? 2 : 1), "outbox_relay: look for rows");
    Seen seen;
    seen.waits = DatumGetBool(result.value(0, 1).datum);
    if (const pg::Value next = result.value(0, 2); !next.null)
        seen.next = DatumGetTimestampTz(next.datum);
    pg::guard([&result] { SPI_freetuptable(result.table); });
    return seen;
}

} // namespace outbox_relay::store
