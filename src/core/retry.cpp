#include "core/retry.hpp"

#include <algorithm>

#include "core/no_postgres.hpp"

namespace outbox_relay::core {

namespace {

/// base * 2^doublings, at most `cap`, without overflow.
std::int64_t doubled(std::int64_t base, std::int64_t doublings, std::int64_t cap) {
    std::int64_t value = std::min(base, cap);
    for (std::int64_t i = 0; i < doublings && value < cap; ++i)
        value = value > cap / 2 ? cap : value * 2;
    return value;
}

} // namespace

std::int64_t RetryPolicy::delay_us(std::int64_t attempt, double uniform) const {
    const std::int64_t raw = doubled(base_us, attempt - 1, cap_us);
    return raw / 2 + static_cast<std::int64_t>(static_cast<double>(raw - raw / 2) * uniform);
}

bool RetryPolicy::exhausted(std::int64_t attempts) const {
    return max_attempts > 0 && attempts + 1 >= max_attempts;
}

std::int64_t lane_backoff_us(std::int64_t interval_us, std::int64_t cap_us, std::int64_t failures) {
    return doubled(interval_us, failures - 1, std::max(cap_us, interval_us));
}

} // namespace outbox_relay::core
