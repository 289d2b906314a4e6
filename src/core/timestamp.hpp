#pragma once

#include <cstdint>
#include <string>

namespace outbox_relay::core {

/// `unix_us` as RFC 3339 in UTC with six fractional digits: 2026-12-01T05:20:00.123456Z. Years
/// below 1 or above 9999 have no such form: callers refuse them with fits_rfc3339().
std::string rfc3339(std::int64_t unix_us);

/// The same moment in ISO 8601 with a numeric offset: 2026-12-01T05:20:00.123456+00:00.
std::string iso8601(std::int64_t unix_us);

bool fits_rfc3339(std::int64_t unix_us);

} // namespace outbox_relay::core
