#include "core/text.hpp"

#include <cstdint>

#include "core/no_postgres.hpp"

namespace outbox_relay::core {

namespace {

struct Character {
    std::size_t size = 0; ///< 0: the bytes here are no character
    std::uint32_t code = 0;
};

/// The character at the front of `bytes`, which is not empty (RFC 3629).
Character decode(std::string_view bytes) {
    const auto at = [bytes](std::size_t i) { return static_cast<unsigned char>(bytes[i]); };
    const unsigned char first = at(0);
    if (first < 0x80)
        return {1, first};
    const std::size_t size = first >= 0xf0 ? 4 : first >= 0xe0 ? 3 : 2;
    if (first < 0xc2 || first > 0xf4 || bytes.size() < size)
        return {};
    std::uint32_t code = first & (0x7fu >> size);
    for (std::size_t i = 1; i < size; ++i) {
        if ((at(i) & 0xc0) != 0x80)
            return {};
        code = code << 6 | (at(i) & 0x3f);
    }
    static constexpr std::uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
    if (code < kSmallest[size] || code > 0x10ffff || (code >= 0xd800 && code <= 0xdfff))
        return {};
    return {size, code};
}

bool is_blank(std::uint32_t code) {
    return code <= 0x20 || (code >= 0x7f && code <= 0xa0) || code == 0x2028 || code == 0x2029;
}

} // namespace

bool is_utf8(std::string_view bytes) {
    while (!bytes.empty()) {
        const Character character = decode(bytes);
        if (character.size == 0)
            return false;
        bytes.remove_prefix(character.size);
    }
    return true;
}

std::string clean_text(std::string_view bytes, std::size_t max_bytes) {
    static constexpr std::string_view kCut = "...";
    std::string clean;
    std::size_t fits = 0; ///< bytes of `clean` that leave room for the dots
    bool gap = false;
    while (!bytes.empty()) {
        const Character character = decode(bytes);
        const std::size_t size = character.size == 0 ? 1 : character.size;
        const std::string_view piece = character.size == 0 ? std::string_view("?") : bytes.substr(0, size);
        bytes.remove_prefix(size);
        if (character.size != 0 && is_blank(character.code)) {
            gap = !clean.empty();
            continue;
        }
        if (clean.size() + (gap ? 1 : 0) + piece.size() > max_bytes) {
            clean.resize(fits);
            if (max_bytes >= kCut.size())
                clean += kCut;
            return clean;
        }
        if (gap)
            clean.push_back(' ');
        gap = false;
        clean += piece;
        if (clean.size() + kCut.size() <= max_bytes)
            fits = clean.size();
    }
    return clean;
}

} // namespace outbox_relay::core
