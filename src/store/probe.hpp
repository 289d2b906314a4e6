#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "core/uuid.hpp"
#include "pg/postgres.hpp"
#include "store/route.hpp"
#include "store/row_version.hpp"

extern "C" {
#include "datatype/timestamp.h"
}

namespace outbox_relay::store {

/// Rows of a route by status; published ones are never looked at.
struct Depth {
    std::int64_t pending;
    std::int64_t processing;
    std::int64_t failed;
};

/// The probes look at the route's table as `role`, with its rights, in the caller's snapshot: they
/// change nothing, so they run in READ ONLY transactions and on standbys. Each raises what
/// describe() and missing_or_wrong() say of the table.
Depth depth(const Route &route, const std::optional<core::Uuid> &tenant, Oid role);

/// Whether a row is pending or processing: two seeks into the claim index.
bool has_undrained(const Route &route, const std::optional<core::Uuid> &tenant, Oid role);

/// created_at of the oldest pending row; nothing without one.
std::optional<TimestampTz> oldest_pending(const Route &route, const std::optional<core::Uuid> &tenant,
                                          Oid role);

/// Which rows to give a new start, and as whom.
struct Requeue {
    const Route &route;
    std::optional<core::Uuid> tenant;
    std::optional<Datum> event_ids; ///< a uuid[] datum, or nothing for all
    Oid owner;
};

struct Requeued {
    std::int64_t failed = 0;       ///< rows that are pending again
    std::vector<core::Uuid> aside; ///< ids of pending rows that the route's lanes have set aside
};

/// Failed rows back to pending, attempts 0, on retain storage without its two times. `aside`: what the
/// lanes have set aside, of which those are returned that the call is about; their rows stay as they are.
/// Raises 42501 when the owner must not run passes on the table.
Requeued requeue_failed(const Requeue &what, std::span<const RowVersion> aside);

} // namespace outbox_relay::store
