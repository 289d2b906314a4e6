#include "core/uuid.hpp"

#include "core/no_postgres.hpp"

namespace outbox_relay::core {

namespace {

constexpr std::size_t kTextBytes = 36;

int hex_value(char c) {
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

bool hyphen_before(std::size_t byte) {
    return byte == 4 || byte == 6 || byte == 8 || byte == 10;
}

} // namespace

std::string Uuid::text() const {
    static constexpr char kHex[] = "0123456789abcdef";
    std::string text;
    text.reserve(kTextBytes);
    for (std::size_t i = 0; i < bytes.size(); ++i) {
        if (hyphen_before(i))
            text.push_back('-');
        text.push_back(kHex[bytes[i] >> 4]);
        text.push_back(kHex[bytes[i] & 15]);
    }
    return text;
}

std::optional<Uuid> parse_uuid(std::string_view text) {
    if (text.size() != kTextBytes)
        return std::nullopt;
    Uuid uuid;
    std::size_t at = 0;
    for (std::size_t i = 0; i < uuid.bytes.size(); ++i) {
        if (hyphen_before(i) && text[at++] != '-')
            return std::nullopt;
        const int high = hex_value(text[at]);
        const int low = hex_value(text[at + 1]);
        if (high < 0 || low < 0)
            return std::nullopt;
        uuid.bytes[i] = static_cast<std::uint8_t>(high << 4 | low);
        at += 2;
    }
    return uuid;
}

Uuid uuid_v7(std::int64_t unix_us, std::uint64_t random) {
    const auto ms = static_cast<std::uint64_t>(unix_us / 1000);
    // 12 bits for a thousand microseconds: scaled, so that they keep their order and use the range.
    const auto fraction = static_cast<std::uint64_t>(unix_us % 1000) * 4096 / 1000;
    Uuid uuid;
    for (int i = 0; i < 6; ++i)
        uuid.bytes[static_cast<std::size_t>(i)] = static_cast<std::uint8_t>(ms >> (40 - 8 * i));
    uuid.bytes[6] = static_cast<std::uint8_t>(0x70 | fraction >> 8);
    uuid.bytes[7] = static_cast<std::uint8_t>(fraction);
    for (int i = 0; i < 8; ++i)
        uuid.bytes[static_cast<std::size_t>(8 + i)] = static_cast<std::uint8_t>(random >> (56 - 8 * i));
    uuid.bytes[8] = static_cast<std::uint8_t>(0x80 | (uuid.bytes[8] & 0x3f));
    return uuid;
}

} // namespace outbox_relay::core
