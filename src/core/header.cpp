#include "core/header.hpp"

#include <algorithm>
#include <cctype>

#include "core/no_postgres.hpp"

namespace outbox_relay::core {

namespace {

bool is_plain(unsigned char c) {
    return c > 0x20 && c < 0x7f && c != '"' && c != '%';
}

bool is_lower_hex(std::string_view text) {
    return std::all_of(text.begin(), text.end(),
                       [](char c) { return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f'); });
}

bool all_zero(std::string_view text) {
    return text.find_first_not_of('0') == std::string_view::npos;
}

bool is_tchar(char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte < 0x80 &&
           (std::isalnum(byte) != 0 || std::string_view("!#$%&'*+-.^_`|~").find(c) != std::string_view::npos);
}

} // namespace

std::string encode_header_value(std::string_view utf8) {
    static constexpr char kHex[] = "0123456789ABCDEF";
    std::string encoded;
    encoded.reserve(utf8.size());
    for (const char c : utf8) {
        const auto byte = static_cast<unsigned char>(c);
        if (is_plain(byte)) {
            encoded.push_back(c);
            continue;
        }
        encoded.push_back('%');
        encoded.push_back(kHex[byte >> 4]);
        encoded.push_back(kHex[byte & 15]);
    }
    return encoded;
}

bool is_header_name(std::string_view name) {
    return !name.empty() && std::all_of(name.begin(), name.end(), is_tchar);
}

bool is_header_value(std::string_view value) {
    const auto blank = [](char c) { return c == ' ' || c == '\t'; };
    if (!value.empty() && (blank(value.front()) || blank(value.back())))
        return false;
    return std::all_of(value.begin(), value.end(), [blank](char c) {
        const auto byte = static_cast<unsigned char>(c);
        return blank(c) || (byte > 0x20 && byte < 0x7f);
    });
}

bool is_traceparent(std::string_view value) {
    if (value.size() != 55 || value.substr(0, 3) != "00-" || value[35] != '-' || value[52] != '-')
        return false;
    const std::string_view trace = value.substr(3, 32);
    const std::string_view parent = value.substr(36, 16);
    return is_lower_hex(trace) && is_lower_hex(parent) && is_lower_hex(value.substr(53)) &&
           !all_zero(trace) && !all_zero(parent);
}

} // namespace outbox_relay::core
