#pragma once

#include <string>
#include <string_view>

namespace outbox_relay::core {

/// `utf8` as the value of an HTTP header: space, '"', '%' and everything outside U+0021..U+007E is
/// percent-encoded per byte, upper-case hex (CloudEvents 1.0 HTTP binding, section 3.1.3.2).
std::string encode_header_value(std::string_view utf8);

/// True for a field name: one or more tchar (RFC 9110, section 5.6.2).
bool is_header_name(std::string_view name);

/// True for a value that may be sent as it is: visible ASCII, inner spaces and tabs, no others
/// (RFC 9110, section 5.5, without obs-text); may be empty.
bool is_header_value(std::string_view value);

/// True for a W3C traceparent: version 00, lower-case hex, trace id and parent id not all zero.
bool is_traceparent(std::string_view value);

} // namespace outbox_relay::core
