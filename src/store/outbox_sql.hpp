#pragma once

#include <string>

#include "store/tenancy.hpp"

namespace outbox_relay::store {

/// The texts of every statement that a pass runs on an outbox table (claims.md, sections 1, 2 and 5).
/// `relation` is the qualified, quoted name. Parameters are said at each.

/// What a claim goes by besides its relation: which optional columns the route uses.
struct ClaimShape {
    bool hlc = false;   ///< order (hlc NULLS LAST, created_at, id), not (created_at, id)
    bool trace = false; ///< traceparent is read
    TenantFilter tenant = TenantFilter::none;

    bool operator==(const ClaimShape &) const = default;
};

/// Rows that are ripe again and fresh rows, both walking the claim index from its low end:
/// $1 route, $2 limit of the whole, $3 now, $4 share of the ripe-again rows; with `except` also
/// $5 ctids and $6 ids of rows to leave out. With a tenant filter $7 is the tenant.
std::string claim_sql(const std::string &relation, const ClaimShape &shape, bool except);

/// The same without a share, fresh rows first: for a claim of one row. $4 is not used.
std::string claim_fresh_first_sql(const std::string &relation, const ClaimShape &shape);

/// The rest of a pass in which fresh rows were fewer than their share: $1 route, $2 limit, $3 now,
/// $4 ctids claimed before, $5 ctids and $6 ids of rows to leave out, $7 the tenant.
std::string claim_more_sql(const std::string &relation, const ClaimShape &shape);

/// $1 ctids.
std::string remove_sql(const std::string &relation);

/// $1 ctids, $2 published_at. One row: how many were deleted, how many appended to `log`.
std::string remove_and_log_sql(const std::string &relation, const std::string &log);

/// Retain storage in the claim's transaction: $1 ctids, $2 published_at.
std::string publish_sql(const std::string &relation);

/// $1 ctids, $2 statuses, $3 attempts to add, $4 available_at (NULL keeps), $5 last_error.
std::string update_sql(const std::string &relation);

/// At most a thousand stale rows at a time: $1 route, $2 processed before this time, $3 but not at this
/// one: a live pass's; $4 ids and $5 processing_at of rows that are acknowledged; with a tenant filter $6 the
/// tenant. Gives their new ctids.
std::string reclaim_sql(const std::string &relation, TenantFilter tenant);

/// When the next row is ripe that is not at $2: $1 route, with a tenant filter $3 the tenant.
std::string parked_sql(const std::string &relation, const ClaimShape &shape);

// Retain storage in transactions of its own. Rows are named by id and by the processing_at that their claim
// wrote, and touched only while they still have both.

/// $1 ctids, $2 processing_at. Gives id and processing_at as they are now: a trigger may have its say.
std::string take_sql(const std::string &relation);

/// $1 id, $2 processing_at.
std::string payload_sql(const std::string &relation);

/// $1 ids, $2 processing_at of each, $3 published_at.
std::string mark_published_sql(const std::string &relation);

/// $1 ids, $2 processing_at of each, $3 statuses, $4 attempts to add, $5 available_at (NULL keeps),
/// $6 last_error.
std::string mark_rest_sql(const std::string &relation);

/// $1 ids, $2 processing_at of each. Gives ids and new ctids.
std::string give_back_sql(const std::string &relation);

/// How many of these are ours still: $1 ids, $2 processing_at of each.
std::string still_ours_sql(const std::string &relation);

} // namespace outbox_relay::store
