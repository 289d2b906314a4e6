#include "core/url_template.hpp"

#include <algorithm>
#include <array>
#include <cctype>

#include "core/no_postgres.hpp"

namespace outbox_relay::core {

namespace {

constexpr std::array<std::string_view, 5> kWords = {"event_type", "ordering_key", "tenant_id", "event_id",
                                                    "route"};

/// `url` taken apart: calls `text` for what stands between braces' pairs and `word` for what they hold.
/// False when the braces do not pair or `word` says so.
template <class Text, class Word>
bool each_part(std::string_view url, Text &&text, Word &&word) {
    while (!url.empty()) {
        const std::size_t open = url.find_first_of("{}");
        text(url.substr(0, open));
        if (open == std::string_view::npos)
            return true;
        const std::size_t close = url.find('}', open);
        if (url[open] == '}' || close == std::string_view::npos)
            return false;
        if (!word(url.substr(open + 1, close - open - 1)))
            return false;
        url.remove_prefix(close + 1);
    }
    return true;
}

bool is_unreserved(char c) {
    const auto byte = static_cast<unsigned char>(c);
    return byte < 0x80 && (std::isalnum(byte) != 0 || c == '-' || c == '.' || c == '_' || c == '~');
}

void append_encoded(std::string &to, std::string_view value) {
    static constexpr char kHex[] = "0123456789ABCDEF";
    for (const char c : value) {
        if (is_unreserved(c)) {
            to.push_back(c);
            continue;
        }
        const auto byte = static_cast<unsigned char>(c);
        to.push_back('%');
        to.push_back(kHex[byte >> 4]);
        to.push_back(kHex[byte & 15]);
    }
}

std::optional<std::string> value_of(std::string_view word, std::string_view route, const Row &row) {
    if (word == "event_type")
        return row.event_type;
    if (word == "ordering_key")
        return row.ordering_key;
    if (word == "tenant_id")
        return row.tenant_id ? std::optional<std::string>(row.tenant_id->text()) : std::nullopt;
    if (word == "event_id")
        return row.event_id.text();
    return std::string(route);
}

/// "." and ".." would be resolved away where they are a whole path segment.
bool is_dots(std::string_view value) {
    return value == "." || value == "..";
}

} // namespace

bool has_placeholders(std::string_view url) {
    return url.find('{') != std::string_view::npos;
}

std::optional<std::string> unknown_placeholder(std::string_view url) {
    std::string unknown;
    const bool good = each_part(
        url, [](std::string_view) {},
        [&unknown](std::string_view word) {
            if (std::find(kWords.begin(), kWords.end(), word) != kWords.end())
                return true;
            unknown = "{" + std::string(word) + "}";
            return false;
        });
    if (good)
        return std::nullopt;
    return unknown.empty() ? "a brace without its partner" : unknown;
}

std::optional<std::string> fill_url(std::string_view url, std::string_view route, const Row &row) {
    std::string filled;
    const bool good = each_part(
        url, [&filled](std::string_view text) { filled += text; },
        [&](std::string_view word) {
            const std::optional<std::string> value = value_of(word, route, row);
            if (!value || value->empty() || is_dots(*value))
                return false;
            append_encoded(filled, *value);
            return true;
        });
    if (!good)
        return std::nullopt;
    return filled;
}

} // namespace outbox_relay::core
