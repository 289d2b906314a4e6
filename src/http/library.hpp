#pragma once

#include <optional>
#include <string>

namespace outbox_relay::http {

/// The libcurl that is loaded, with its TLS and resolver libraries, as curl_version() prints them.
std::string library_version();

/// Why the loaded libcurl can't be used; nothing when it can. It has to be 7.85 or newer
/// (CURLOPT_PROTOCOLS_STR), speak https, and resolve names without blocking: without AsynchDNS a
/// dead resolver would hold a pass beyond its deadline.
std::optional<std::string> library_problem();

/// Initialises libcurl, once in this process. Call it in the process that sends, never in the
/// postmaster. Throws std::runtime_error when libcurl can't be initialised or used.
void initialise_library();

} // namespace outbox_relay::http
