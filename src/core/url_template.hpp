#pragma once

#include "core/row.hpp"

#include <optional>
#include <string>
#include <string_view>

namespace outbox_relay::core {

/// True when `url` holds a placeholder: {event_type}, {ordering_key}, {tenant_id}, {event_id}, {route}.
bool has_placeholders(std::string_view url);

/// The first `{word}` of `url` that is no placeholder, or an unmatched brace; nothing when it is fine.
std::optional<std::string> unknown_placeholder(std::string_view url);

/// `url` with its placeholders replaced by the row's values, percent-encoded (everything but RFC 3986
/// unreserved, so a value can't leave its place). Nothing when a value is missing or empty (a tenant or an
/// ordering key that the row has not) or is "." or ".." alone in its segment.
std::optional<std::string> fill_url(std::string_view url, std::string_view route, const Row &row);

} // namespace outbox_relay::core
