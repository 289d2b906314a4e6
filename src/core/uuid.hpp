#pragma once

#include <array>
#include <compare>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace outbox_relay::core {

/// A UUID as its 16 bytes in network order, the layout of Postgres' uuid type.
struct Uuid {
    std::array<std::uint8_t, 16> bytes{};

    auto operator<=>(const Uuid &) const = default;

    /// 36 characters, lower case, with hyphens (RFC 9562, section 4).
    std::string text() const;
};

/// The UUID that `text` spells in the hyphenated form, or nothing.
std::optional<Uuid> parse_uuid(std::string_view text);

/// A version 7 UUID (RFC 9562, section 5.7, method 3): 48 bits of milliseconds, 12 bits of the
/// fraction of a millisecond, then 62 of the 64 bits of `random`.
/// `unix_us` is microseconds since 1970; callers keep it strictly increasing to keep ids ascending.
Uuid uuid_v7(std::int64_t unix_us, std::uint64_t random);

} // namespace outbox_relay::core
