#pragma once

#include <cstdint>

namespace outbox_relay::core {

/// When a failed attempt is tried again. Times in microseconds; max_attempts 0: no end.
struct RetryPolicy {
    std::int64_t base_us = 1'000'000;
    std::int64_t cap_us = 300'000'000;
    std::int32_t max_attempts = 20;

    /// The wait after the `attempt`-th failed attempt (1 is the first): raw = base * 2^(attempt-1),
    /// at most the cap; equal jitter: between raw/2 and raw as `uniform` in [0,1) says. No overflow
    /// at any attempt. (spec.md section 3, the seed's retry.)
    std::int64_t delay_us(std::int64_t attempt, double uniform) const;

    /// True when a row that has been rescheduled `attempts` times before must not be tried again
    /// after failing once more: attempts + 1 >= max_attempts.
    bool exhausted(std::int64_t attempts) const;
};

/// The wait of a lane after its `failures`-th consecutive failed pass: one interval, doubling, up to
/// max(cap, interval); without jitter. failures >= 1.
std::int64_t lane_backoff_us(std::int64_t interval_us, std::int64_t cap_us, std::int64_t failures);

} // namespace outbox_relay::core
