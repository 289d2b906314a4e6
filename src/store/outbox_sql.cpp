#include "store/outbox_sql.hpp"

#include "core/store.hpp"

namespace outbox_relay::store {

namespace {

/// The columns of a claim; read_row() in outbox.cpp reads them by position.
std::string claim_columns(const ClaimShape &shape) {
    return std::string(
               "ctid, tableoid, xmin, id, event_id, event_type, tenant_id, execution_id, correlation_id, "
               "causation_id, occurred_at, payload, ordering_key, attempts::pg_catalog.int8 AS attempts, "
               "created_at, available_at, ") +
           (shape.trace ? "traceparent, " : "NULL::pg_catalog.text AS traceparent, ") +
           (shape.hlc ? "hlc" : "NULL::pg_catalog.int8 AS hlc");
}

// ONLY in all of these: rows of an inheriting table are not this table's, and may have the same ctid.

/// A tenant's rows. The second form is for a table that belongs to the tenant: its own index is walked, and
/// no row of another tenant is in the way, as long as the table is not shared.
std::string tenant_clause(TenantFilter filter, const char *parameter) {
    const std::string own = std::string("tenant_id = ") + parameter;
    switch (filter) {
    case TenantFilter::column:
        return " AND " + own;
    case TenantFilter::table:
        return " AND (" + own + " OR tenant_id IS NULL)";
    case TenantFilter::none:
        break;
    }
    return "";
}

/// The claim index has the tenant before the times: naming it in ORDER BY ties the plan to that index.
std::string claim_order(const ClaimShape &shape) {
    return std::string(shape.tenant == TenantFilter::column ? "tenant_id, " : "") +
           (shape.hlc ? "available_at, hlc, created_at, id" : "available_at, created_at");
}

/// One arm of a claim. ORDER BY starts with available_at in every arm: the planner does not take
/// IS NULL for a constant of the index order. In hlc order fresh rows without a stamp come last of
/// themselves: an index has its NULLs at the end.
std::string arm(const std::string &relation, const ClaimShape &shape, const char *ripe, const char *limit,
                const char *extra) {
    return "SELECT * FROM (SELECT " + claim_columns(shape) + " FROM ONLY " + relation +
           " WHERE outbox_route = $1 AND status = 'pending'" + tenant_clause(shape.tenant, "$7") + " AND " +
           ripe + extra + " ORDER BY " + claim_order(shape) + " LIMIT " + limit +
           " FOR UPDATE SKIP LOCKED) AS arm";
}

constexpr const char *kDue = "available_at <= $3";
constexpr const char *kFresh = "available_at IS NULL";
/// A version of a row, by its place and its id: a changed row has another place.
constexpr const char *kExcept = " AND NOT (ctid = ANY ($5) AND id = ANY ($6))";

} // namespace

std::string claim_sql(const std::string &relation, const ClaimShape &shape, bool except) {
    const char *extra = except ? kExcept : "";
    return "SELECT * FROM (" + arm(relation, shape, kDue, "$4", extra) + " UNION ALL " +
           arm(relation, shape, kFresh, "$2", extra) + ") AS claim LIMIT $2";
}

std::string claim_fresh_first_sql(const std::string &relation, const ClaimShape &shape) {
    return "SELECT * FROM (" + arm(relation, shape, kFresh, "$2", kExcept) + " UNION ALL " +
           arm(relation, shape, kDue, "$2", kExcept) + ") AS claim LIMIT $2";
}

std::string claim_more_sql(const std::string &relation, const ClaimShape &shape) {
    const std::string extra = std::string(" AND NOT (ctid = ANY ($4))") + kExcept;
    return arm(relation, shape, kDue, "$2", extra.c_str());
}

std::string remove_sql(const std::string &relation) {
    // ctid = ANY must be the only qualification: with another beside it, a generic plan may walk the
    // backlog's index and filter ctids.
    return "DELETE FROM ONLY " + relation + " WHERE ctid = ANY ($1)";
}

std::string remove_and_log_sql(const std::string &relation, const std::string &log) {
    return "WITH deleted AS (" + remove_sql(relation) +
           " RETURNING id, outbox_route, event_id, tenant_id), logged AS (INSERT INTO " + log +
           " (id, outbox_route, event_id, tenant_id, published_at) SELECT id, outbox_route, event_id, "
           "tenant_id,"
           " $2 FROM deleted RETURNING 1)"
           " SELECT (SELECT pg_catalog.count(*) FROM deleted), (SELECT pg_catalog.count(*) FROM logged)";
}

std::string publish_sql(const std::string &relation) {
    return "UPDATE ONLY " + relation +
           " SET status = 'published', published_at = $2, last_error = NULL WHERE ctid = ANY ($1)";
}

std::string update_sql(const std::string &relation) {
    return "UPDATE ONLY " + relation +
           " AS o SET status = u.status,"
           " attempts = LEAST(o.attempts::pg_catalog.int8 + u.added, 2147483647),"
           " available_at = COALESCE(u.available_at, o.available_at), last_error = u.error"
           // unnest of several arguments is the server's own, by its grammar; qualified, it is no function.
           " FROM unnest($1::pg_catalog.tid[], $2::pg_catalog.text[], $3::pg_catalog.int4[],"
           " $4::pg_catalog.timestamptz[], $5::pg_catalog.text[])"
           " AS u(row_id, status, added, available_at, error) WHERE o.ctid = u.row_id";
}

std::string reclaim_sql(const std::string &relation, TenantFilter tenant) {
    return "UPDATE ONLY " + relation +
           " SET status = 'pending', processing_at = NULL WHERE ctid = ANY (ARRAY(SELECT ctid FROM ONLY " +
           relation +
           " WHERE outbox_route = $1 AND status = 'processing' AND processing_at < $2 AND processing_at <> "
           "$3 AND (id, processing_at) NOT IN"
           " (SELECT * FROM unnest($4::pg_catalog.uuid[], $5::pg_catalog.timestamptz[]))" +
           tenant_clause(tenant, "$6") + " LIMIT " + std::to_string(core::Store::kReclaimRows) +
           " FOR UPDATE SKIP LOCKED)) RETURNING ctid";
}

std::string parked_sql(const std::string &relation, const ClaimShape &shape) {
    return "SELECT available_at FROM ONLY " + relation + " WHERE outbox_route = $1 AND status = 'pending'" +
           tenant_clause(shape.tenant, "$3") + " AND available_at > $2 ORDER BY " + claim_order(shape) +
           " LIMIT 1";
}

namespace {

/// Claimed rows that are still ours, as u(id, taken_at, …).
constexpr const char *kOurs =
    " WHERE o.id = u.id AND o.status = 'processing' AND o.processing_at = u.taken_at";

std::string ours(const std::string &more_arrays, const std::string &more_columns) {
    return " FROM unnest($1::pg_catalog.uuid[], $2::pg_catalog.timestamptz[]" + more_arrays +
           ") AS u(id, taken_at" + more_columns + ")" + kOurs;
}

} // namespace

std::string take_sql(const std::string &relation) {
    return "UPDATE ONLY " + relation +
           " SET status = 'processing', processing_at = $2 WHERE ctid = ANY ($1) RETURNING id, processing_at";
}

std::string payload_sql(const std::string &relation) {
    return "SELECT payload FROM ONLY " + relation +
           " WHERE id = $1 AND status = 'processing' AND processing_at = $2";
}

std::string mark_published_sql(const std::string &relation) {
    return "UPDATE ONLY " + relation +
           " AS o SET status = 'published', published_at = $3, last_error = NULL" + ours("", "");
}

std::string mark_rest_sql(const std::string &relation) {
    return "UPDATE ONLY " + relation +
           " AS o SET status = u.status, processing_at = NULL,"
           " attempts = LEAST(o.attempts::pg_catalog.int8 + u.added, 2147483647),"
           " available_at = COALESCE(u.available_at, o.available_at), last_error = u.error" +
           ours(", $3::pg_catalog.text[], $4::pg_catalog.int4[], $5::pg_catalog.timestamptz[],"
                " $6::pg_catalog.text[]",
                ", status, added, available_at, error");
}

std::string give_back_sql(const std::string &relation) {
    return "UPDATE ONLY " + relation + " AS o SET status = 'pending', processing_at = NULL" + ours("", "") +
           " RETURNING o.id, o.ctid";
}

std::string still_ours_sql(const std::string &relation) {
    return "SELECT pg_catalog.count(*) FROM ONLY " + relation +
           " AS o, unnest($1::pg_catalog.uuid[], $2::pg_catalog.timestamptz[]) AS u(id, taken_at)" + kOurs;
}

} // namespace outbox_relay::store
