#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace outbox_relay::http {

/// Why `url` can't be a route's target; nothing when it can. It has to be http://host… or
/// https://host…, in the characters of RFC 3986, without user name or password, fragment, spaces and
/// control characters, with a port between 1 and 65535 if any. `{placeholders}` may stand behind
/// the host and port only; which of them exist is core::unknown_placeholder's business. The reason
/// does not repeat the url, which may hold a secret.
std::optional<std::string> url_problem(std::string_view url);

/// "scheme://host" or "scheme://host:port" of `url`, fit for logs: nothing of its credentials, path
/// or query. Empty when `url` is none that url_problem() accepts.
std::string url_origin(std::string_view url);

} // namespace outbox_relay::http
