#include "core/lane.hpp"
#include "core/retry.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

using namespace outbox_relay::core;

TEST(Retry, stays_in_its_band_and_under_its_cap) {
    const RetryPolicy policy{1'000'000, 300'000'000, 20};
    std::mt19937_64 random(7);
    std::uniform_real_distribution<double> uniform(0, 1);
    for (const std::int64_t attempt : {1, 2, 3, 4, 8, 9, 10, 12, 100, 1000, INT32_MAX}) {
        const std::int64_t raw =
            attempt >= 10 ? policy.cap_us : std::min(policy.cap_us, policy.base_us << (attempt - 1));
        std::int64_t least = INT64_MAX, most = 0;
        for (int i = 0; i < 1000; ++i) {
            const std::int64_t delay = policy.delay_us(attempt, uniform(random));
            ASSERT_GE(delay, raw / 2) << attempt;
            ASSERT_LE(delay, raw) << attempt;
            least = std::min(least, delay);
            most = std::max(most, delay);
        }
        EXPECT_GT(most - least, raw / 4) << "the jitter is real";
    }
}

TEST(Retry, base_above_cap_is_the_cap) {
    EXPECT_EQ((RetryPolicy{10, 4, 1}.delay_us(1, 0)), 2);
}

TEST(Retry, ends_after_max_attempts) {
    const RetryPolicy two{1, 1, 2};
    EXPECT_FALSE(two.exhausted(0));
    EXPECT_TRUE(two.exhausted(1));
    EXPECT_TRUE((RetryPolicy{1, 1, 1}.exhausted(0)));
    EXPECT_FALSE((RetryPolicy{1, 1, 0}.exhausted(INT32_MAX)));
    EXPECT_TRUE(two.exhausted(INT32_MAX));
}

TEST(Lane, backs_off_doubling_up_to_the_larger_of_cap_and_interval) {
    const LanePolicy policy{5'000'000, 300'000'000};
    LaneHealth health;
    for (const std::int64_t seconds : {5, 10, 20, 40, 80, 160, 300, 300}) {
        const NextTurn next = after_failure(health, policy);
        EXPECT_EQ(next.wait_us, seconds * 1'000'000);
        EXPECT_TRUE(next.holds_against_wakes);
        EXPECT_EQ(next.state, NextTurn::State::backoff);
    }
    LaneHealth slow;
    EXPECT_EQ(after_failure(slow, {600'000'000, 300'000'000}).wait_us, 600'000'000);
    EXPECT_EQ(after_failure(slow, {600'000'000, 300'000'000}).wait_us, 600'000'000);
}

TEST(Lane, starts_slowly_after_a_failure) {
    const LanePolicy policy;
    LaneHealth health;
    EXPECT_EQ(claim_limit(health, 100, false), 100u);
    after_failure(health, policy);
    PassResult result;
    for (const std::size_t rows : {1, 2, 4, 8, 16, 32, 64, 100}) {
        EXPECT_EQ(claim_limit(health, 100, false), rows);
        result.claimed = static_cast<std::int64_t>(rows);
        result.full = true;
        EXPECT_EQ(after_commit(health, policy, result, 100, 0, 0.5).wait_us, 0);
    }
    EXPECT_EQ(health.failures, 0u);
    EXPECT_EQ(claim_limit(health, 100, true), 1u) << "an open breaker lets one through";
}

TEST(Lane, refusals_back_off_at_least_as_long_as_asked) {
    // Whether or not publishing had stopped for something else by then.
    for (const Stop stop : {Stop::refused, Stop::held, Stop::breaker, Stop::deadline}) {
        LaneHealth health;
        PassResult result;
        result.stop = stop;
        result.lane_refused = true;
        EXPECT_EQ(after_commit(health, {}, result, 100, 0, 0).wait_us, 5'000'000);
        result.hold_us = 60'000'000;
        const NextTurn next = after_commit(health, {}, result, 100, 0, 0);
        EXPECT_EQ(next.wait_us, 60'000'000);
        EXPECT_TRUE(next.holds_against_wakes);
        EXPECT_EQ(health.failures, 2u);
        EXPECT_EQ(health.claim_limit, 0u) << "no slow start: nothing was undone";
    }
}

TEST(Lane, is_due_at_the_earlier_of_interval_and_retry) {
    LaneHealth health;
    PassResult result;
    EXPECT_EQ(after_commit(health, {}, result, 100, 0, 0.0).wait_us, 4'000'000);
    EXPECT_EQ(after_commit(health, {}, result, 100, 0, 0.5).wait_us, 5'000'000);
    EXPECT_LT(after_commit(health, {}, result, 100, 0, 0.999).wait_us, 6'000'000);
    result.next_retry_at_us = 1'700'000;
    EXPECT_EQ(after_commit(health, {}, result, 100, 1'000'000, 0.5).wait_us, 700'000);
    EXPECT_EQ(after_commit(health, {}, result, 100, 9'000'000, 0.5).wait_us, 0);
    EXPECT_FALSE(after_commit(health, {}, result, 100, 0, 0.5).holds_against_wakes);
}

TEST(Lane, knows_whether_rows_may_be_parked) {
    LaneHealth health;
    EXPECT_TRUE(health.parked) << "nobody has looked yet";
    PassResult result;
    result.full = true;
    after_commit(health, {}, result, 100, 0, 0.5);
    EXPECT_TRUE(health.parked) << "a full pass did not look";
    result.full = false;
    after_commit(health, {}, result, 100, 0, 0.5);
    EXPECT_FALSE(health.parked);
    result.full = true;
    result.next_retry_at_us = 5;
    after_commit(health, {}, result, 100, 0, 0.5);
    EXPECT_TRUE(health.parked);
    after_failure(health, {});
    EXPECT_TRUE(health.parked);
}
