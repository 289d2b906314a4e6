#include "store/probe.hpp"

#include <cstring>

#include "pg/spi.hpp"
#include "store/array.hpp"
#include "store/index.hpp"
#include "store/relation.hpp"
#include "store/tenancy.hpp"

extern "C" {
#include "catalog/pg_type.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"
}

namespace outbox_relay::store {

namespace {

/// A statement with its parameters: $1 is always the route.
struct Statement {
    std::string sql;
    std::vector<Oid> types;
    std::vector<pg::Value> values;

    explicit Statement(const Route &route) : types{TEXTOID}, values{pg::Value(pg::text_datum(route.name))} {}

    /// Adds a parameter and gives its placeholder.
    std::string parameter(Oid type, Datum value) {
        types.push_back(type);
        values.emplace_back(value);
        return "$" + std::to_string(types.size());
    }
};

Datum uuid_datum(const core::Uuid &uuid) {
    return pg::guard([&uuid] {
        auto *copy = static_cast<pg_uuid_t *>(palloc(sizeof(pg_uuid_t)));
        std::memcpy(copy->data, uuid.bytes.data(), UUID_LEN);
        return UUIDPGetDatum(copy);
    });
}

/// " AND tenant_id = $n", or nothing; as in a claim, rows without a tenant in the tenant's own table are its
/// own.
std::string tenant_clause(Statement &statement, const Route &route, const std::optional<core::Uuid> &tenant) {
    if (!tenant.has_value())
        return {};
    const std::string own =
        "tenant_id OPERATOR(pg_catalog.=) " + statement.parameter(UUIDOID, uuid_datum(*tenant));
    if (tenant_filter(route) == TenantFilter::table)
        return " AND (" + own + " OR tenant_id IS NULL)";
    return " AND " + own;
}

/// The table that a probe looks at, for the tenant or for all.
struct Probed {
    std::string table;
    Oid only_index = InvalidOid; ///< that the planner is to take
    bool exact_order = true;     ///< fresh rows lie in created_at order in that index
    const char *order = "available_at, created_at";
};

Probed outbox_of(const Route &route, const std::optional<core::Uuid> &tenant) {
    const Relation relation = describe(tables_of(route, tenant).relation, AccessShareLock);
    require(missing_or_wrong(relation, Needs{}));
    Probed probed{relation.qualified_name};
    if (!tenant.has_value() || tenant_filter(route) != TenantFilter::column)
        return probed;
    probed.only_index = tenant_index(relation, route.hlc_ordering);
    if (OidIsValid(probed.only_index) && route.hlc_ordering) {
        probed.exact_order = false;
        probed.order = "available_at, hlc, created_at, id";
    }
    return probed;
}

/// The rows of one status, in the order of the index that has them together. The order ties the plan to
/// that index, whatever the statistics say (claims.md, rule 5); look() takes sorts out of the planner's
/// reach.
std::string rows_of(const std::string &what, const Probed &probed, const char *status,
                    const std::string &more) {
    return "SELECT " + what + " FROM ONLY " + probed.table +
           " WHERE outbox_route OPERATOR(pg_catalog.=) $1 AND status OPERATOR(pg_catalog.=) '" + status +
           "'" + more + " ORDER BY " + probed.order;
}

/// Runs the statement read only, in the caller's snapshot; its one row.
pg::Result look(const Statement &statement, const Probed &probed, Oid role) {
    pg::Plan plan;
    plan.prepare(statement.sql, statement.types, true);
    std::vector<Datum> datums;
    for (const pg::Value &value : statement.values)
        datums.push_back(value.datum);
    pg::Context context;
    context.role = role;
    context.ordered_plans = true;
    context.only_index = probed.only_index;
    return pg::run_as(context, [&] {
        const int code = SPI_execute_plan(plan.get(), datums.data(), nullptr, true, 0);
        if (code != SPI_OK_SELECT || SPI_processed != 1)
            elog(ERROR, "probe failed in SPI: %s", SPI_result_code_string(code));
        pg::Result result;
        result.processed = SPI_processed;
        result.table = SPI_tuptable;
        return result;
    });
}

} // namespace

Depth depth(const Route &route, const std::optional<core::Uuid> &tenant, Oid role) {
    const Probed probed = outbox_of(route, tenant);
    Statement statement(route);
    const std::string more = tenant_clause(statement, route, tenant);
    const auto count = [&](const char *status) {
        return "(SELECT pg_catalog.count(*) FROM (" + rows_of("1", probed, status, more) + ") AS counted)";
    };
    statement.sql = "SELECT " + count("pending") + ", " + count("processing") + ", " + count("failed");

    pg::spi_connect();
    const pg::Result result = look(statement, probed, role);
    const Depth depth{DatumGetInt64(result.value(0, 1).datum), DatumGetInt64(result.value(0, 2).datum),
                      DatumGetInt64(result.value(0, 3).datum)};
    pg::spi_finish();
    return depth;
}

bool has_undrained(const Route &route, const std::optional<core::Uuid> &tenant, Oid role) {
    const Probed probed = outbox_of(route, tenant);
    Statement statement(route);
    const std::string more = tenant_clause(statement, route, tenant);
    const auto any = [&](const char *status) {
        return "(" + rows_of("true", probed, status, more) + " LIMIT 1) IS NOT NULL";
    };
    statement.sql = "SELECT " + any("pending") + " OR " + any("processing");

    pg::spi_connect();
    const bool undrained = DatumGetBool(look(statement, probed, role).value(0, 1).datum);
    pg::spi_finish();
    return undrained;
}

std::optional<TimestampTz> oldest_pending(const Route &route, const std::optional<core::Uuid> &tenant,
                                          Oid role) {
    const Probed probed = outbox_of(route, tenant);
    Statement statement(route);
    const std::string more = tenant_clause(statement, route, tenant);
    // Fresh rows lie in created_at order: one seek. Only those parked for a retry are walked.
    const std::string fresh_rows =
        rows_of("created_at", probed, "pending", more + " AND available_at IS NULL");
    const std::string fresh = probed.exact_order
                                  ? "(" + fresh_rows + " LIMIT 1)"
                                  : "(SELECT pg_catalog.min(created_at) FROM (" + fresh_rows + ") AS fresh)";
    const std::string parked =
        "(SELECT pg_catalog.min(created_at) FROM (" +
        rows_of("created_at", probed, "pending", more + " AND available_at IS NOT NULL") + ") AS parked)";
    statement.sql = "SELECT LEAST(" + fresh + ", " + parked + ")";

    pg::spi_connect();
    const pg::Value oldest = look(statement, probed, role).value(0, 1);
    std::optional<TimestampTz> created_at;
    if (!oldest.null)
        created_at = DatumGetTimestampTz(oldest.datum);
    pg::spi_finish();
    return created_at;
}

namespace {

/// " AND event_id = ANY ($n)", or nothing.
std::string event_clause(Statement &statement, const std::optional<Datum> &event_ids) {
    if (!event_ids.has_value())
        return {};
    return " AND event_id OPERATOR(pg_catalog.=) ANY (" + statement.parameter(UUIDARRAYOID, *event_ids) + ")";
}

/// Runs the statement as `role`. Inside spi_connect().
pg::Result requeue(const Statement &statement, Oid role) {
    pg::Plan plan;
    plan.prepare(statement.sql, statement.types, false);
    pg::Context context;
    context.role = role;
    return pg::execute_as(context, plan, statement.values, "outbox_relay: requeue");
}

/// Of `versions` those that are pending rows of the route (the tenant's, of the given events) as they were
/// remembered. Inside spi_connect().
std::vector<core::Uuid> still_pending(const Requeue &what, const Relation &relation,
                                      std::span<const RowVersion> versions) {
    std::vector<Datum> places, ids;
    for (const RowVersion &version : versions)
        if (version.relation == relation.oid) {
            places.push_back(PointerGetDatum(&version.ctid));
            ids.push_back(PointerGetDatum(version.id.bytes.data()));
        }
    std::vector<core::Uuid> pending;
    if (places.empty())
        return pending;
    Statement statement(what.route);
    const std::string at = statement.parameter(TIDARRAYOID, tid_array(places).datum);
    const std::string known = statement.parameter(UUIDARRAYOID, uuid_array(ids).datum);
    statement.sql =
        "SELECT id FROM ONLY " + relation.qualified_name + " WHERE ctid OPERATOR(pg_catalog.=) ANY (" + at +
        ") AND id OPERATOR(pg_catalog.=) ANY (" + known +
        ") AND outbox_route OPERATOR(pg_catalog.=) $1 AND status OPERATOR(pg_catalog.=) 'pending'" +
        tenant_clause(statement, what.route, what.tenant) + event_clause(statement, what.event_ids);
    const pg::Result result = requeue(statement, what.owner);
    for (std::uint64_t i = 0; i < result.processed; ++i) {
        core::Uuid id;
        std::memcpy(id.bytes.data(), DatumGetUUIDP(result.value(i, 1).datum)->data, UUID_LEN);
        pending.push_back(id);
    }
    return pending;
}

} // namespace

Requeued requeue_failed(const Requeue &what, std::span<const RowVersion> aside) {
    const Route &route = what.route;
    const Relation relation = describe(tables_of(route, what.tenant).relation, RowExclusiveLock);
    const bool retain = route.storage == "retain";
    Needs needs;
    needs.retain = retain;
    require(missing_or_wrong(relation, needs));
    if (const std::optional<Finding> finding = owner_finding(relation, what.owner))
        require({*finding});

    Statement statement(route);
    const std::string where = " WHERE outbox_route OPERATOR(pg_catalog.=) $1"
                              " AND status OPERATOR(pg_catalog.=) 'failed'" +
                              tenant_clause(statement, route, what.tenant) +
                              event_clause(statement, what.event_ids);
    statement.sql = "UPDATE ONLY " + relation.qualified_name +
                    " SET status = 'pending', attempts = 0, last_error = NULL, available_at = NULL" +
                    (retain ? ", processing_at = NULL, published_at = NULL" : "") + where;

    pg::spi_connect();
    Requeued done;
    done.failed = static_cast<std::int64_t>(requeue(statement, what.owner).processed);
    done.aside = still_pending(what, relation, aside);
    pg::spi_finish();
    return done;
}

} // namespace outbox_relay::store
