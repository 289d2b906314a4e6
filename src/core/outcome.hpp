#pragma once

#include "core/transport.hpp"

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace outbox_relay::core {

/// What a reply means for its row and its lane (the table of spec.md section 6).
enum class Verdict {
    published, ///< acknowledged: a complete final 2xx header block and the whole body uploaded
    failed,    ///< parked at once: the status is in fail_statuses
    refused,   ///< nothing was sent: the row is untouched, no attempt counts
    held,      ///< 429, 410, 503 with Retry-After: rescheduled without an attempt, the lane waits
    cancelled, ///< given up by a shutdown before an answer: untouched
    retried    ///< everything else: an attempt that failed
};

struct Outcome {
    Verdict verdict = Verdict::retried;
    std::string error;        ///< for last_error: class, status, cleaned excerpt; empty when published
    std::string error_class;  ///< short and stable: "HTTP 500", "timeout", "connect", ...
    std::int64_t hold_us = 0; ///< held: how long the endpoint asks us to wait, 0 when it does not say
};

struct OutcomePolicy {
    std::vector<int> fail_statuses;
    std::int64_t max_hold_us = 0; ///< retry_max_backoff: bound of Retry-After, and the wait of a 410
    std::int64_t wall_us = 0;     ///< now, to read an HTTP date
};

/// Judges one reply.
Outcome judge(const Reply &reply, const OutcomePolicy &policy);

/// Microseconds that a Retry-After value asks for: delay-seconds (a fraction is allowed) or an HTTP
/// date in any of its three forms (RFC 9110, sections 5.6.7 and 10.2.3), counted from `wall_us`.
/// The past is 0; what is malformed or negative is nothing; at most ten years.
std::optional<std::int64_t> parse_retry_after(std::string_view value, std::int64_t wall_us);

} // namespace outbox_relay::core
