#pragma once

#include "core/transport.hpp"

#include <curl/curl.h>

namespace outbox_relay::http {

/// How far a transfer had come when it ended.
struct Progress {
    bool resolved = false;      ///< the name had been resolved
    bool connected = false;     ///< the TCP connection stood
    bool request_begun = false; ///< a byte of the request may have been sent
};

/// What a result code of libcurl means, by one table with a reason for each line. CURLE_OK is
/// Failure::none. As long as no byte of the request can have been sent the answer is one of
/// resolve, connect, tls and blocked; afterwards it is none of these.
core::Failure classify(CURLcode code, const Progress &progress);

} // namespace outbox_relay::http
