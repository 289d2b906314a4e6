#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace outbox_relay::store {

/// `bytes` of the database's encoding as UTF-8; nothing when they can't be converted or are no valid
/// text (a C function or a SQL_ASCII database may have stored such). Never raises for the bytes.
std::optional<std::string> to_utf8(std::string_view bytes);

/// UTF-8 `text` in the database's encoding; what it lacks becomes '?'.
std::string from_utf8(const std::string &text);

} // namespace outbox_relay::store
