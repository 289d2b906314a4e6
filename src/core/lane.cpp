#include "core/lane.hpp"

#include "core/retry.hpp"

#include <algorithm>

#include "core/no_postgres.hpp"

namespace outbox_relay::core {

std::int64_t jittered_us(std::int64_t interval_us, double uniform) {
    return static_cast<std::int64_t>(static_cast<double>(interval_us) * (0.8 + 0.4 * uniform));
}

NextTurn after_commit(LaneHealth &health, const LanePolicy &policy, const PassResult &result,
                      std::size_t max_claim_rows, std::int64_t wall_us, double uniform) {
    health.publish_failures = result.publish_failures;
    health.refused_rows = result.refused_rows;
    // A full pass did not look for others.
    health.parked = result.next_retry_at_us > 0 || (health.parked && result.full);
    NextTurn next;
    if (result.lane_refused) {
        ++health.failures;
        next.state = NextTurn::State::refused;
        next.holds_against_wakes = true;
        next.wait_us = std::max(result.hold_us,
                                lane_backoff_us(policy.interval_us, policy.max_backoff_us, health.failures));
        return next;
    }
    health.failures = 0;
    // Slow start doubles the claim until it is back at the full size.
    if (health.claim_limit > 0 && result.claimed > 0) {
        const std::uint64_t doubled = std::uint64_t{health.claim_limit} * 2;
        health.claim_limit = doubled >= max_claim_rows ? 0 : static_cast<std::uint32_t>(doubled);
    }
    next.reclaims = result.reclaims_more;
    const bool only_unsent = result.unsent > 0 && result.published == 0;
    if ((result.full && !only_unsent) || result.reclaims_more) {
        next.state = NextTurn::State::due;
        return next;
    }
    next.wait_us = jittered_us(policy.interval_us, uniform);
    if (result.next_retry_at_us > 0)
        next.wait_us = std::min(next.wait_us, std::max<std::int64_t>(0, result.next_retry_at_us - wall_us));
    return next;
}

NextTurn after_failure(LaneHealth &health, const LanePolicy &policy) {
    ++health.failures;
    health.claim_limit = 1;
    NextTurn next;
    next.state = NextTurn::State::backoff;
    next.holds_against_wakes = true;
    next.wait_us = lane_backoff_us(policy.interval_us, policy.max_backoff_us, health.failures);
    return next;
}

std::size_t claim_limit(const LaneHealth &health, std::size_t max_claim_rows, bool breaker_open) {
    if (breaker_open)
        return 1;
    if (health.claim_limit == 0)
        return max_claim_rows;
    return std::min<std::size_t>(health.claim_limit, max_claim_rows);
}

} // namespace outbox_relay::core
