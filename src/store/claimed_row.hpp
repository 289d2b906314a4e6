#pragma once

#include <cstdint>
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

/// The bytes of a payload as jsonb, before compression, without fetching it.
std::int64_t payload_bytes(Datum payload);

/// A payload as Postgres prints it, in UTF-8, or why it can't be sent: larger than `max_bytes`, or not
/// convertible. `scratch` is reset. A payload stored out of line needs a transaction.
std::variant<std::string, core::Unsendable> render_payload(Datum payload, std::int64_t max_bytes,
                                                           MemoryContext scratch);

} // namespace outbox_relay::store
