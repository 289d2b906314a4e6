#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <variant>

#include "core/row.hpp"
#include "core/store.hpp"

#include "pg/spi.hpp"
#include "store/row_version.hpp"

namespace outbox_relay::store {

/// A row as a claim's statement gave it.
struct ClaimedRow {
    core::Row row;
    RowVersion version;
    Datum payload = 0; ///< points into the statement's result
    std::int64_t created_at = 0;
    bool tried_before = false; ///< it was parked for a retry
};

/// Row `index` of the result of a statement of claim_sql(); `handle` becomes the row's.
ClaimedRow read_claimed_row(const pg::Result &result, std::uint64_t index, std::uint32_t handle);

/// A uuid of a statement's result.
core::Uuid uuid_of(const pg::Value &value);

/// The same row as a value of the extension's type outbox_message, whose oid is `type`, made in `context`.
/// `route` is the route's name, a text. It holds copies of what is stored out of line; needs a transaction.
Datum message_of(const pg::Result &result, std::uint64_t index, Datum route, Oid type, MemoryContext context);

/// The bytes of a payload as jsonb, before compression, without fetching it.
std::int64_t payload_bytes(Datum payload);

/// Why a payload is not even looked at: larger than `max_bytes`. Nothing when it may be.
std::optional<core::Unsendable> oversize(Datum payload, std::int64_t max_bytes);

/// A payload as Postgres prints it, in UTF-8, or why it can't be sent: larger than `max_bytes`, or not
/// convertible. `scratch` is reset. A payload stored out of line needs a transaction.
std::variant<std::string, core::Unsendable> render_payload(Datum payload, std::int64_t max_bytes,
                                                           MemoryContext scratch);

} // namespace outbox_relay::store
