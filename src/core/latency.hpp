#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace outbox_relay::core {

constexpr std::size_t kLatencyBuckets = 48;

/// Upper bound of bucket `i` in microseconds: 50 * 2^(i/2), two buckets an octave from 50 us to
/// some seven minutes; the last has no end.
std::int64_t latency_bound_us(std::size_t bucket);

/// The bucket that a latency falls into.
std::size_t latency_bucket(std::int64_t latency_us);

/// The `quantile` (0..1) of a histogram in microseconds, interpolated inside its bucket; 0 when empty.
std::int64_t latency_quantile_us(const std::array<std::uint64_t, kLatencyBuckets> &counts, double quantile);

} // namespace outbox_relay::core
