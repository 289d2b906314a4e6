#pragma once

#include <optional>
#include <span>
#include <vector>

#include "core/uuid.hpp"
#include "store/route.hpp"

extern "C" {
#include "access/attnum.h"
#include "datatype/timestamp.h"
}

namespace outbox_relay::store {

/// Where a look seeks: a table, and its index on (outbox_route, status, with tenants on one table tenant_id,
/// available_at).
struct LookPath {
    Oid owner = InvalidOid; ///< of the route: InvalidOid as long as nothing was looked up
    Oid table = InvalidOid;
    Oid index = InvalidOid; ///< InvalidOid: there is none that fits
    AttrNumber available_at = 0;
};

/// What a lane's table has for it.
struct Seen {
    bool waits = false;              ///< fresh rows, or rows in processing that may be stale
    std::optional<TimestampTz> next; ///< when the first row that is parked for a retry is ripe
};

/// Looks, without a claim and without a statement, for each of the tenants: three seeks, no row is locked, no
/// plan is kept, so that it fits ten thousand tables. Several tenants only where they share the route's
/// table; without tenants one element that is none. Runs as the route's owner, in the transaction that is
/// open. Where it can't tell (no index, the table is locked or gone) rows wait, and a pass finds out. The
/// table is the one that the route and its functions named when `path` was filled: it is when it is empty.
/// Raises what the functions raise, and 57014 beyond pass_statement_timeout.
std::vector<Seen> look_for_rows(const Route &route, std::span<const std::optional<core::Uuid>> tenants,
                                const Effective &settings, LookPath &path);

} // namespace outbox_relay::store
