#include "store/probe.hpp"

#include <cstring>

#include "pg/spi.hpp"
#include "store/relation.hpp"

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

/// " AND tenant_id = $n", or nothing.
std::string tenant_clause(Statement &statement, const std::optional<core::Uuid> &tenant) {
    if (!tenant.has_value())
        return {};
    return " AND tenant_id OPERATOR(pg_catalog.=) " + statement.parameter(UUIDOID, uuid_datum(*tenant));
}

/// The rows of one status, in the claim index's order. The order ties the plan to that index, whatever
/// the statistics say (claims.md, rule 5); run() takes sorts out of the planner's reach.
std::string rows_of(const std::string &what, const std::string &table, const char *status,
                    const std::string &more) {
    return "SELECT " + what + " FROM ONLY " + table +
           " WHERE outbox_route OPERATOR(pg_catalog.=) $1 AND status OPERATOR(pg_catalog.=) '" + status +
           "'" + more + " ORDER BY available_at, created_at";
}

Relation outbox_of(const Route &route) {
    Relation relation = describe(route.relation, AccessShareLock);
    require(missing_or_wrong(relation, Needs{}));
    return relation;
}

/// Runs the statement read only, in the caller's snapshot; its one row.
pg::Result look(const Statement &statement, Oid role) {
    pg::Plan plan;
    plan.prepare(statement.sql, statement.types, true);
    std::vector<Datum> datums;
    for (const pg::Value &value : statement.values)
        datums.push_back(value.datum);
    pg::Context context;
    context.role = role;
    context.ordered_plans = true;
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
    const std::string table = outbox_of(route).qualified_name;
    Statement statement(route);
    const std::string more = tenant_clause(statement, tenant);
    const auto count = [&](const char *status) {
        return "(SELECT pg_catalog.count(*) FROM (" + rows_of("1", table, status, more) + ") AS counted)";
    };
    statement.sql = "SELECT " + count("pending") + ", " + count("processing") + ", " + count("failed");

    pg::spi_connect();
    const pg::Result result = look(statement, role);
    const Depth depth{DatumGetInt64(result.value(0, 1).datum), DatumGetInt64(result.value(0, 2).datum),
                      DatumGetInt64(result.value(0, 3).datum)};
    pg::spi_finish();
    return depth;
}

bool has_undrained(const Route &route, const std::optional<core::Uuid> &tenant, Oid role) {
    const std::string table = outbox_of(route).qualified_name;
    Statement statement(route);
    const std::string more = tenant_clause(statement, tenant);
    const auto any = [&](const char *status) {
        return "(" + rows_of("true", table, status, more) + " LIMIT 1) IS NOT NULL";
    };
    statement.sql = "SELECT " + any("pending") + " OR " + any("processing");

    pg::spi_connect();
    const bool undrained = DatumGetBool(look(statement, role).value(0, 1).datum);
    pg::spi_finish();
    return undrained;
}

std::optional<TimestampTz> oldest_pending(const Route &route, const std::optional<core::Uuid> &tenant,
                                          Oid role) {
    const std::string table = outbox_of(route).qualified_name;
    Statement statement(route);
    const std::string more = tenant_clause(statement, tenant);
    // Fresh rows lie in created_at order: one seek. Only those parked for a retry are walked.
    const std::string fresh =
        "(" + rows_of("created_at", table, "pending", more + " AND available_at IS NULL") + " LIMIT 1)";
    const std::string parked =
        "(SELECT pg_catalog.min(created_at) FROM (" +
        rows_of("created_at", table, "pending", more + " AND available_at IS NOT NULL") + ") AS parked)";
    statement.sql = "SELECT LEAST(" + fresh + ", " + parked + ")";

    pg::spi_connect();
    const pg::Value oldest = look(statement, role).value(0, 1);
    std::optional<TimestampTz> created_at;
    if (!oldest.null)
        created_at = DatumGetTimestampTz(oldest.datum);
    pg::spi_finish();
    return created_at;
}

std::int64_t requeue_failed(const Route &route, const std::optional<Datum> &event_ids,
                            const std::optional<core::Uuid> &tenant, Oid role) {
    const Relation relation = describe(route.relation, RowExclusiveLock);
    const bool retain = route.storage == "retain";
    Needs needs;
    needs.retain = retain;
    require(missing_or_wrong(relation, needs));
    if (const std::optional<Finding> finding = owner_finding(relation, role))
        require({*finding});

    Statement statement(route);
    std::string where = " WHERE outbox_route OPERATOR(pg_catalog.=) $1"
                        " AND status OPERATOR(pg_catalog.=) 'failed'" +
                        tenant_clause(statement, tenant);
    if (event_ids.has_value())
        where += " AND event_id OPERATOR(pg_catalog.=) ANY (" +
                 statement.parameter(UUIDARRAYOID, *event_ids) + ")";
    statement.sql = "UPDATE ONLY " + relation.qualified_name +
                    " SET status = 'pending', attempts = 0, last_error = NULL, available_at = NULL" +
                    (retain ? ", processing_at = NULL, published_at = NULL" : "") + where;

    pg::spi_connect();
    pg::Plan plan;
    plan.prepare(statement.sql, statement.types, false);
    pg::Context context;
    context.role = role;
    const pg::Result result = pg::execute_as(context, plan, statement.values, "outbox_relay: requeue");
    pg::spi_finish();
    return static_cast<std::int64_t>(result.processed);
}

} // namespace outbox_relay::store
