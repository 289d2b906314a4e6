#include "store/look.hpp"

#include "store/array.hpp"
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
    constexpr Oid types[] = {TEXTOID, UUIDARRAYOID};
    plan.plan.prepare_as(context_of(settings, plan), look_sql(relation.qualified_name, shape), types);
}

} // namespace

std::vector<Seen> look_for_rows(const Route &route, std::span<const std::optional<core::Uuid>> tenants,
                                const Effective &settings, LookPlan &plan) {
    if (plan.plan.prepared() && plan.owner != owner_of(route))
        plan = LookPlan();
    if (!plan.plan.prepared())
        make(route, tenants.front(), settings, plan);
    static const core::Uuid kAny{};
    std::vector<Datum> elements;
    elements.reserve(tenants.size());
    for (const std::optional<core::Uuid> &tenant : tenants)
        elements.push_back(PointerGetDatum((tenant ? *tenant : kAny).bytes.data()));
    const pg::Value values[] = {pg::Value(pg::text_datum(route.name)), uuid_array(elements)};
    const pg::Result result =
        pg::execute_as(context_of(settings, plan), plan.plan, values, "outbox_relay: look for rows");
    std::vector<Seen> seen(tenants.size());
    for (std::uint64_t i = 0; i < result.processed; ++i) {
        Seen &one = seen.at(static_cast<std::size_t>(DatumGetInt64(result.value(i, 1).datum) - 1));
        one.waits = DatumGetBool(result.value(i, 2).datum);
        if (const pg::Value next = result.value(i, 3); !next.null)
            one.next = DatumGetTimestampTz(next.datum);
    }
    pg::guard([&result] { SPI_freetuptable(result.table); });
    return seen;
}

} // namespace outbox_relay::store
