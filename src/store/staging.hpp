#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/uuid.hpp"
#include "pg/spi.hpp"
#include "store/route.hpp"

namespace outbox_relay::store {

/// The columns that staging binds, in the order of the statement's parameters. status and attempts
/// are constants of the statement.
enum class StageColumn : std::size_t {
    id,
    route,
    created_at,
    event_id,
    event_type,
    payload,
    occurred_at,
    ordering_key,
    available_at,
    tenant_id,
    execution_id,
    correlation_id,
    causation_id,
    hlc,         ///< only on routes with hlc_ordering
    traceparent, ///< only on routes that propagate traces
};
inline constexpr std::size_t kStageColumns = static_cast<std::size_t>(StageColumn::traceparent) + 1;

/// One event to stage: a value for each column, NULL at first. Datums are borrowed: what they point
/// to has to live until the statement has run.
class Event {
  public:
    pg::Value &operator[](StageColumn column) { return values_[static_cast<std::size_t>(column)]; }
    const pg::Value &operator[](StageColumn column) const {
        return values_[static_cast<std::size_t>(column)];
    }
    const std::array<pg::Value, kStageColumns> &values() const { return values_; }

  private:
    std::array<pg::Value, kStageColumns> values_;
};

/// Inserts `event` as one pending row of `route`, as the current user and in its transaction: its
/// rights, triggers and policies hold. event_type and payload have to be set, and hlc on a route with
/// hlc_ordering; id, route and created_at are set here, event_id and occurred_at where they are NULL.
/// created_at is the clock at the call, strictly ascending in microseconds within a backend, and id is a
/// UUIDv7 of the same instant, so that a writer that locks its aggregate first can't be overtaken (claims.md
/// section 4). Gives the event id; nothing when the table has a row of this route and event id already. Waits
/// for a transaction that is about to delete such a row. Raises what the INSERT raises.
/// On a route with tenants tenant_id has to be set, which says into which table. Raises 22004 without.
std::optional<core::Uuid> stage(const Route &route, Event event);

/// The same for many: one created_at, ids ascending in the order of `events`, one INSERT (on a route with a
/// relation_function one for each tenant, in the order of their first events). Gives how many rows were new.
std::uint64_t stage_many(const Route &route, std::vector<Event> events);

} // namespace outbox_relay::store
