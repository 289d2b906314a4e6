#pragma once

#include "core/pass.hpp"

#include <cstdint>

namespace outbox_relay::core {

/// What a lane remembers about how its passes went.
struct LaneHealth {
    std::uint32_t failures = 0;         ///< consecutive passes that failed or ended by a refusal
    std::uint32_t publish_failures = 0; ///< consecutive failed publishes, for the breaker
    std::uint32_t refused_rows = 0;     ///< consecutive refusals that were the rows' own
    std::uint32_t claim_limit = 0;      ///< slow start: rows the next pass may claim; 0: no limit
    bool parked = true;                 ///< rows may be parked for a retry: passes ask until when
};

struct LanePolicy {
    std::int64_t interval_us = 5'000'000;
    std::int64_t max_backoff_us = 300'000'000;
};

/// When a lane's next turn is, and what it is called until then.
struct NextTurn {
    enum class State { due, idle, backoff, refused };
    std::int64_t wait_us = 0; ///< from now
    State state = State::idle;
    bool holds_against_wakes = false; ///< a wake does not shorten it
    bool reclaims = false;            ///< due: stale rows are left
};

/// After a pass that committed: nothing to wait for while passes come back full (and something of them
/// could be sent), else one interval with 20 % jitter or the time of the earliest parked row, whichever is
/// first. A pass that ended by refusal or breaker backs off like a failed one, at least as long as the
/// endpoint asked. `uniform` in [0,1); `wall_us` is now.
NextTurn after_commit(LaneHealth &health, const LanePolicy &policy, const PassResult &result,
                      std::size_t max_claim_rows, std::int64_t wall_us, double uniform);

/// After a pass that failed: one interval, doubling with each consecutive one up to
/// max(max_backoff, interval) (the seed, "A failing route backs off on its own"); the next pass
/// starts with a single row.
NextTurn after_failure(LaneHealth &health, const LanePolicy &policy);

/// The rows the next pass may claim.
std::size_t claim_limit(const LaneHealth &health, std::size_t max_claim_rows, bool breaker_open);

/// `interval` with 20 % jitter either way.
std::int64_t jittered_us(std::int64_t interval_us, double uniform);

} // namespace outbox_relay::core
