#include "core/latency.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "core/no_postgres.hpp"

namespace outbox_relay::core {

namespace {

constexpr double kFirst_us = 50.0;

using Bounds = std::array<std::int64_t, kLatencyBuckets>;

Bounds make_bounds() {
    Bounds bounds{};
    for (std::size_t i = 0; i < kLatencyBuckets; ++i)
        bounds[i] =
            static_cast<std::int64_t>(std::llround(kFirst_us * std::pow(2.0, static_cast<double>(i) / 2.0)));
    bounds.back() = std::numeric_limits<std::int64_t>::max();
    return bounds;
}

const Bounds &bounds() {
    static const Bounds kBounds = make_bounds();
    return kBounds;
}

} // namespace

std::int64_t latency_bound_us(std::size_t bucket) {
    return bounds()[bucket];
}

std::size_t latency_bucket(std::int64_t latency_us) {
    const auto at = std::lower_bound(bounds().begin(), bounds().end(), latency_us);
    return static_cast<std::size_t>(at - bounds().begin());
}

std::int64_t latency_quantile_us(const std::array<std::uint64_t, kLatencyBuckets> &counts, double quantile) {
    std::uint64_t total = 0;
    for (const std::uint64_t count : counts)
        total += count;
    if (total == 0)
        return 0;
    const double wanted = quantile * static_cast<double>(total);
    double seen = 0;
    for (std::size_t i = 0; i < kLatencyBuckets; ++i) {
        const auto count = static_cast<double>(counts[i]);
        if (count == 0 || seen + count < wanted) {
            seen += count;
            continue;
        }
        const std::int64_t low = i == 0 ? 0 : bounds()[i - 1];
        // The last bucket has no end: its beginning is all that is known.
        const std::int64_t high = i + 1 == kLatencyBuckets ? low : bounds()[i];
        return low + static_cast<std::int64_t>(static_cast<double>(high - low) * (wanted - seen) / count);
    }
    return bounds()[kLatencyBuckets - 2];
}

} // namespace outbox_relay::core
