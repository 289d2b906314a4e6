#include "store/outbox_sql.hpp"

namespace outbox_relay::store {

namespace {

/// The columns of a claim; read_row() in outbox.cpp reads them by position.
std::string claim_columns(bool trace) {
    return std::string(
               "ctid, tableoid, xmin, id, event_id, event_type, tenant_id, execution_id, correlation_id, "
               "causation_id, occurred_at, payload, ordering_key, attempts::pg_catalog.int8 AS attempts, "
               "created_at, available_at, ") +
           (trace ? "traceparent" : "NULL::pg_catalog.text AS traceparent");
}

// ONLY in all of these: rows of an inheriting table are not this table's, and may have the same ctid.

/// One arm of a claim. ORDER BY starts with available_at in every arm: the planner does not take
/// IS NULL for a constant of the index order.
std::string arm(const std::string &relation, bool trace, const char *ripe, const char *limit,
                const char *extra) {
    return "SELECT * FROM (SELECT " + claim_columns(trace) + " FROM ONLY " + relation +
           " WHERE outbox_route = $1 AND status = 'pending' AND " + ripe + extra +
           " ORDER BY available_at, created_at LIMIT " + limit + " FOR UPDATE SKIP LOCKED) AS arm";
}

constexpr const char *kDue = "available_at <= $3";
constexpr const char *kFresh = "available_at IS NULL";
/// A version of a row, by its place and its id: a changed row has another place.
constexpr const char *kExcept = " AND NOT (ctid = ANY ($5) AND id = ANY ($6))";

} // namespace

std::string claim_sql(const std::string &relation, bool trace, bool except) {
    const char *extra = except ? kExcept : "";
    return "SELECT * FROM (" + arm(relation, trace, kDue, "$4", extra) + " UNION ALL " +
           arm(relation, trace, kFresh, "$2", extra) + ") AS claim LIMIT $2";
}

std::string claim_more_sql(const std::string &relation, bool trace) {
    const std::string extra = std::string(" AND NOT (ctid = ANY ($4))") + kExcept;
    return arm(relation, trace, kDue, "$2", extra.c_str());
}

std::string remove_sql(const std::string &relation) {
    // ctid = ANY must be the only qualification: with another beside it, a generic plan may walk the
    // backlog's index and filter ctids.
    return "DELETE FROM ONLY " + relation + " WHERE ctid = ANY ($1)";
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

std::string reclaim_sql(const std::string &relation) {
    return "UPDATE ONLY " + relation +
           " SET status = 'pending', processing_at = NULL WHERE ctid = ANY (ARRAY(SELECT ctid FROM ONLY " +
           relation +
           " WHERE outbox_route = $1 AND status = 'processing' AND processing_at < $2"
           " LIMIT 1000 FOR UPDATE SKIP LOCKED))";
}

} // namespace outbox_relay::store
