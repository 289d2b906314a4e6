#pragma once

#include <string>

namespace outbox_relay::store {

/// The texts of every statement that a pass runs on an outbox table (claims.md, sections 1, 2 and 5).
/// `relation` is the qualified, quoted name. Parameters are said at each.

/// What a claim goes by besides its relation: which optional columns the route uses.
struct ClaimShape {
    bool hlc = false;   ///< order (hlc NULLS LAST, created_at, id), not (created_at, id)
    bool trace = false; ///< traceparent is read

    bool operator==(const ClaimShape &) const = default;
};

/// Rows that are ripe again and fresh rows, both walking the claim index from its low end:
/// $1 route, $2 limit of the whole, $3 now, $4 share of the ripe-again rows; with `except` also
/// $5 ctids and $6 ids of rows to leave out.
std::string claim_sql(const std::string &relation, const ClaimShape &shape, bool except);

/// The rest of a pass in which fresh rows were fewer than their share: $1 route, $2 limit, $3 now,
/// $4 ctids claimed before, $5 ctids and $6 ids of rows to leave out.
std::string claim_more_sql(const std::string &relation, const ClaimShape &shape);

/// $1 ctids.
std::string remove_sql(const std::string &relation);

/// $1 ctids, $2 statuses, $3 attempts to add, $4 available_at (NULL keeps), $5 last_error.
std::string update_sql(const std::string &relation);

/// At most a thousand stale rows at a time: $1 route, $2 processed before this time.
std::string reclaim_sql(const std::string &relation);

} // namespace outbox_relay::store
