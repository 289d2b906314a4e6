#pragma once

#include "core/uuid.hpp"

#include <cstdint>
#include <optional>
#include <string>

namespace outbox_relay::core {

/// A claimed outbox row as the pass sees it. All text is UTF-8. The payload stays with the store,
/// which renders it when the row's turn comes, so that a pass holds few payloads at a time.
struct Row {
    std::uint32_t handle = 0; ///< names the row to the store that claimed it
    Uuid id;
    Uuid event_id;
    std::string event_type;
    std::optional<std::string> ordering_key;
    std::optional<Uuid> tenant_id;
    std::optional<Uuid> execution_id;
    std::optional<Uuid> correlation_id;
    std::optional<Uuid> causation_id;
    std::optional<std::string> traceparent;
    std::optional<std::int64_t> hlc;
    std::optional<std::int64_t> occurred_at_us; ///< since 1970; nothing for infinity
    std::int32_t attempts = 0;
    bool acknowledged = false; ///< published by an earlier pass that failed to settle: only settle it
    std::string problem;       ///< why the row can't be sent whatever the endpoint says; empty: it can
};

} // namespace outbox_relay::core
