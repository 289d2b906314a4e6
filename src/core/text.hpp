#pragma once

#include <cstddef>
#include <string>
#include <string_view>

namespace outbox_relay::core {

/// `bytes` from outside made fit for last_error and logs: valid UTF-8 (what is not is replaced by
/// '?'), control characters (C0, DEL, C1, line and paragraph separators) turned into single spaces,
/// runs of spaces folded, trimmed, cut to `max_bytes` on a character's edge with "..." when cut.
std::string clean_text(std::string_view bytes, std::size_t max_bytes);

/// True when `bytes` is well-formed UTF-8 (no surrogates, no overlong forms, at most U+10FFFF).
bool is_utf8(std::string_view bytes);

} // namespace outbox_relay::core
