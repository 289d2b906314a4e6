#pragma once

#include <optional>
#include <span>
#include <vector>

#include "core/uuid.hpp"
#include "pg/spi.hpp"
#include "store/route.hpp"

extern "C" {
#include "datatype/timestamp.h"
}

namespace outbox_relay::store {

/// The kept statement that looks whether a table has rows for a lane; of one table under one owner.
struct LookPlan {
    Oid owner = InvalidOid;
    Oid only_index = InvalidOid;
    pg::Plan plan;
};

/// What a lane's table has for it.
struct Seen {
    bool waits = false;              ///< fresh rows, or rows in processing that may be stale
    std::optional<TimestampTz> next; ///< when the first row that is parked for a retry is ripe
};

/// Looks, without a claim, for each of the tenants: three seeks, no row is locked. Several tenants only where
/// they share the route's table; without tenants one element that is none. Runs as the route's owner, in the
/// transaction that is open, with SPI connected. The table is the one that the route and its functions named
/// when the statement was made: `plan` is made when it is empty. Raises what the server raises; a table that
/// is not fit for a pass may be one of the reasons, which is for a pass to find out.
std::vector<Seen> look_for_rows(const Route &route, std::span<const std::optional<core::Uuid>> tenants,
                                const Effective &settings, LookPlan &plan);

} // namespace outbox_relay::store
