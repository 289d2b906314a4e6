#pragma once

#include "core/clock.hpp"
#include "core/envelope.hpp"
#include "core/latency.hpp"
#include "core/retry.hpp"
#include "core/store.hpp"
#include "core/transport.hpp"

#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace outbox_relay::core {

/// What one pass of a lane goes by. Times in microseconds.
struct PassSettings {
    std::size_t max_claim_rows = 100;
    std::size_t concurrency = 32;
    std::size_t max_bytes_in_flight = 64 * 1024 * 1024;
    std::int64_t deadline_us = 5'000'000; ///< publishing stops this long after the pass's start
    std::int64_t request_timeout_us = 0;  ///< 0: the deadline alone
    std::int64_t connect_timeout_us = 2'000'000;
    std::int64_t expected_latency_us = 0;   ///< the lane's recent p95; a request needs this much time left
    bool key_order = true;                  ///< rows of one key go out one after another
    bool reclaim = false;                   ///< the first pass of a tick, where reclaim is on
    bool refusals_are_the_rows_own = false; ///< the url has placeholders: one target a row, not a lane
    std::uint32_t breaker_threshold = 10;   ///< 0: no breaker
    std::uint32_t publish_failures = 0;     ///< consecutive failed publishes of the lane before this pass
    std::uint32_t refused_rows = 0;         ///< the same of rows whose refusals are their own
    bool asks_for_parked = false;           ///< rows of the lane may be parked: the pass finds out until when
    RetryPolicy retry;
    std::vector<int> fail_statuses;
    EnvelopeSettings envelope;
};

/// Why publishing ended.
enum class Stop {
    drained,  ///< every claimed row was tried
    deadline, ///< pass_deadline
    refused,  ///< requests in a row could not be sent
    held,     ///< the endpoint asked us to wait
    breaker,  ///< too many consecutive failed publishes
    asked     ///< the process has to end
};

/// What a committed pass did. claimed = published + failed + retried + refused + untouched.
struct PassResult {
    std::int64_t claimed = 0;
    std::int64_t published = 0;
    std::int64_t failed = 0;
    std::int64_t retried = 0;
    std::int64_t refused = 0; ///< rescheduled or left without an attempt, by a refusal
    std::int64_t reclaimed = 0;
    std::int64_t untouched = 0;
    std::int64_t duplicates_avoided = 0; ///< of the published: those that an earlier pass had published
    std::int64_t bytes_published = 0;
    Stop stop = Stop::drained;  ///< the first reason
    bool lane_refused = false;  ///< refused, held or breaker, whether or not publishing had stopped by then
    bool full = false;          ///< as many rows came back as were asked for
    bool reclaims_more = false; ///< there are more stale rows than one pass takes
    std::int64_t unsent = 0;    ///< of the refused: nothing of them was sent
    std::int64_t hold_us = 0;   ///< held: how long the endpoint asks the lane to wait
    std::int64_t next_retry_at_us = 0;  ///< wall clock of the earliest parked row that is known; 0: none
    std::uint32_t publish_failures = 0; ///< consecutive failed publishes at the pass's end
    std::uint32_t refused_rows = 0;     ///< consecutive refusals that were the rows' own
    std::string error_class;            ///< of the last publish that failed; empty when none did
    std::string error;
    std::array<std::uint32_t, kLatencyBuckets> latency{};
};

/// Places in a pass where a test build can make it fail, and where the worker shows its phase.
enum class PassPoint {
    after_begin,
    in_claim, ///< retain: before the claim commits
    after_claim,
    after_publish,
    before_settle,
    in_settle,
    before_commit,
    after_commit
};

/// What the pass asks of the process that runs it.
class PassHost {
  public:
    enum class Order {
        go_on,
        finish, ///< start nothing more, give what is in flight a second
        leave   ///< start nothing more, cancel what is in flight
    };

    virtual ~PassHost() = default;

    /// Called at least every 100 ms while publishing: serves interrupts (may throw) and says whether
    /// to go on.
    virtual Order pulse() = 0;

    /// True when the process was told to leave at once: what a later pass can do as well is not waited for.
    virtual bool has_to_leave() const { return false; }

    /// Called at each PassPoint; `count` is the number of published rows so far.
    virtual void at(PassPoint point, std::size_t count) = 0;
};

/// Runs one claim-publish-settle round. When anything throws, what is in flight is cancelled, the
/// store rolled back, and the exception goes on: the pass has failed and every row is as it was.
PassResult run_pass(const PassSettings &settings, Store &store, Transport &transport, Clock &clock,
                    PassHost &host, std::mt19937_64 &random);

/// The same for a target inside the database: rows are delivered by the store, one after another in
/// claim order, in the transaction that settles them. What the target throws fails the pass and undoes
/// every delivery, so no attempt is ever counted; the deadline is judged between two deliveries.
PassResult run_local_pass(const PassSettings &settings, Store &store, Clock &clock, PassHost &host);

} // namespace outbox_relay::core
