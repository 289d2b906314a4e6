#pragma once

#include <cstdint>

#include "pg/postgres.hpp"

extern "C" {
#include "datatype/timestamp.h"
}

namespace pg {

/// Microseconds of a clock that never goes back, the same for all processes of this server.
std::int64_t monotonic_us();

/// A timestamptz as microseconds since 1970, and back.
inline constexpr std::int64_t kEpochOffset_us =
    static_cast<std::int64_t>(POSTGRES_EPOCH_JDATE - UNIX_EPOCH_JDATE) * SECS_PER_DAY * USECS_PER_SEC;
inline std::int64_t unix_us_of(TimestampTz at) {
    return at + kEpochOffset_us;
}
inline TimestampTz timestamp_of(std::int64_t unix_us) {
    return unix_us - kEpochOffset_us;
}

} // namespace pg
