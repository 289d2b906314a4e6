/// What a pass makes of refusals, of failures while the breaker opens, and of what the deadline cuts:
/// scripted replies, no chance (spec.md section 6).

#include "core/lane.hpp"
#include "core/pass.hpp"

#include <gtest/gtest.h>

#include <algorithm>

using namespace outbox_relay::core;

namespace {

class StoppedClock : public Clock {
  public:
    std::int64_t monotonic_us() override { return now_us; }
    std::int64_t wall_us() override { return 1'700'000'000'000'000 + now_us; }
    std::int64_t now_us = 0;
};

/// Has `rows` rows for every claim, and keeps the settlement.
class RowsStore : public Store {
  public:
    explicit RowsStore(std::size_t rows) : rows_(rows) {}
    void begin() override {}
    std::int64_t reclaim() override {
        const std::int64_t taken = std::min(stale, kReclaimRows);
        stale -= taken;
        return taken;
    }
    std::vector<Row> claim(std::size_t max_rows) override {
        std::vector<Row> rows(std::min(rows_, max_rows));
        for (std::size_t i = 0; i < rows.size(); ++i) {
            rows[i].handle = static_cast<std::uint32_t>(i);
            rows[i].event_type = "type";
            rows[i].occurred_at_us = 0;
        }
        return rows;
    }
    void ask_for_parked() override { asked = true; }
    std::int64_t next_parked_us() const override { return asked ? parked_us : 0; }
    std::variant<std::string, Unsendable> render(const Row &) override { return std::string("{}"); }
    void settle(const Settlement &settlement) override { settled = settlement; }
    std::size_t settle_chunk() const override { return 0; }
    void commit() override {}
    void rollback() noexcept override {}

    Settlement settled;
    std::int64_t stale = 0;
    std::int64_t parked_us = 0;
    bool asked = false;

  private:
    const std::size_t rows_;
};

/// Answers the n-th request as the n-th reply says, or the last one; what has status 0 and no failure hangs
/// until it is cancelled.
class ScriptedTransport : public Transport {
  public:
    ScriptedTransport(StoppedClock &clock, std::vector<Reply> script)
        : clock_(clock), script_(std::move(script)) {}
    void start(std::uint64_t ticket, Request, const RequestLimits &) override {
        Reply reply = script_[std::min(started_++, script_.size() - 1)];
        reply.ticket = ticket;
        flights_.push_back(reply);
    }
    void poll(int max_wait_ms, std::vector<Reply> &replies) override {
        clock_.now_us += max_wait_ms * 1000;
        for (const Reply &reply : flights_)
            if (reply.status != 0 || reply.failure != Failure::none)
                replies.push_back(reply);
        std::erase_if(flights_,
                      [](const Reply &reply) { return reply.status != 0 || reply.failure != Failure::none; });
    }
    void cancel(std::vector<Reply> &replies) override {
        for (Reply &reply : flights_) {
            reply.failure = Failure::cancelled;
            replies.push_back(reply);
        }
        flights_.clear();
    }
    std::size_t in_flight() const override { return flights_.size(); }

  private:
    StoppedClock &clock_;
    const std::vector<Reply> script_;
    std::size_t started_ = 0;
    std::vector<Reply> flights_;
};

class QuietHost : public PassHost {
  public:
    Order pulse() override { return Order::go_on; }
    void at(PassPoint, std::size_t) override {}
};

Reply answered(int status, const char *retry_after = "") {
    Reply reply;
    reply.status = status;
    reply.header_complete = reply.uploaded = true;
    reply.retry_after = retry_after;
    return reply;
}

Reply unsent() {
    Reply reply;
    reply.failure = Failure::connect;
    reply.nothing_sent = true;
    return reply;
}

/// Hangs; `connected`: behind the request.
Reply hanging(bool connected) {
    Reply reply;
    reply.nothing_sent = !connected;
    return reply;
}

struct Lane {
    PassSettings settings;
    LaneHealth health;
    Settlement settled;

    Lane() {
        settings.envelope.url = "http://endpoint/";
        settings.envelope.source = "/test";
        settings.envelope.route = "route";
        settings.max_claim_rows = 10;
    }
    PassResult pass(std::size_t rows, std::vector<Reply> script) {
        StoppedClock clock;
        RowsStore store(rows);
        ScriptedTransport transport(clock, std::move(script));
        QuietHost host;
        std::mt19937_64 random(1);
        settings.refused_rows = health.refused_rows;
        settings.publish_failures = health.publish_failures;
        const PassResult result = run_pass(settings, store, transport, clock, host, random);
        settled = store.settled;
        next = after_commit(health, {}, result, settings.max_claim_rows, clock.wall_us(), 0.5);
        return result;
    }
    NextTurn next;
};

} // namespace

TEST(Refusal, a_row_that_was_never_connected_at_the_deadline_burns_no_attempt) {
    Lane lane;
    lane.settings.concurrency = 3;
    const PassResult result = lane.pass(3, {hanging(false)});
    EXPECT_EQ(result.refused, 3);
    EXPECT_EQ(result.retried, 0);
    EXPECT_TRUE(lane.settled.empty());
    EXPECT_EQ(lane.next.state, NextTurn::State::refused) << "and the lane backs off";
}

TEST(Refusal, one_that_was_sent_is_an_attempt) {
    Lane lane;
    lane.settings.concurrency = 3;
    const PassResult result = lane.pass(3, {hanging(true)});
    EXPECT_EQ(result.retried, 3);
    EXPECT_EQ(lane.next.state, NextTurn::State::idle);
}

TEST(Refusal, unconnected_beside_others_that_got_through_is_left_as_it_is) {
    Lane lane;
    lane.settings.concurrency = 3;
    const PassResult result = lane.pass(3, {answered(200), hanging(false)});
    EXPECT_EQ(result.published, 1);
    EXPECT_EQ(result.untouched, 2);
    EXPECT_EQ(lane.next.state, NextTurn::State::idle);
}

TEST(Refusal, what_comes_behind_the_deadline_counts_for_the_lane) {
    Lane lane;
    lane.settings.concurrency = 2;
    // The second is not started any more; the first is answered, late.
    lane.settings.expected_latency_us = lane.settings.deadline_us - 50'000;
    const PassResult result = lane.pass(5, {answered(429, "60")});
    EXPECT_EQ(result.refused, 2);
    EXPECT_EQ(lane.next.state, NextTurn::State::refused);
    EXPECT_EQ(lane.next.wait_us, 60'000'000);
}

TEST(Refusal, that_are_the_rows_own_add_up_over_passes) {
    Lane lane;
    lane.settings.refusals_are_the_rows_own = true;
    lane.settings.max_claim_rows = 4;
    lane.settings.breaker_threshold = 10;
    for (const NextTurn::State state :
         {NextTurn::State::idle, NextTurn::State::idle, NextTurn::State::refused}) {
        lane.pass(4, {unsent()});
        EXPECT_EQ(lane.next.state, state) << "full, but not due at once: nothing of it could be sent";
    }
    EXPECT_GE(lane.health.refused_rows, 10u);
    lane.pass(4, {answered(200)});
    EXPECT_EQ(lane.health.refused_rows, 0u);
    EXPECT_EQ(lane.next.state, NextTurn::State::due);
    for (const NextTurn::State state :
         {NextTurn::State::due, NextTurn::State::due, NextTurn::State::refused}) {
        lane.pass(4, {answered(429, "1")});
        EXPECT_EQ(lane.next.state, state) << "rescheduled rows are out of the way";
    }
}

TEST(Refusal, a_fail_status_fails_rows_until_the_breaker_is_open) {
    Lane lane;
    lane.settings.fail_statuses = {422};
    lane.settings.breaker_threshold = 3;
    lane.settings.concurrency = 10;
    const PassResult result = lane.pass(10, {answered(422)});
    EXPECT_EQ(result.failed, 3);
    EXPECT_EQ(result.retried, 7);
    EXPECT_TRUE(result.lane_refused);
}

TEST(Refusal, parked_rows_are_asked_for_only_by_passes_that_have_to) {
    for (const bool asks : {false, true}) {
        StoppedClock clock;
        RowsStore store(0);
        store.parked_us = 42;
        ScriptedTransport transport(clock, {unsent()});
        QuietHost host;
        std::mt19937_64 random(1);
        PassSettings settings;
        settings.asks_for_parked = asks;
        EXPECT_EQ(run_pass(settings, store, transport, clock, host, random).next_retry_at_us, asks ? 42 : 0);
    }
}

TEST(Refusal, a_pass_reclaims_in_portions_and_leaves_a_rest_to_the_next_tick) {
    for (const std::int64_t stale : {999, 3000, 10'500}) {
        StoppedClock clock;
        RowsStore store(0);
        store.stale = stale;
        ScriptedTransport transport(clock, {unsent()});
        QuietHost host;
        std::mt19937_64 random(1);
        PassSettings settings;
        settings.reclaim = true;
        const PassResult result = run_pass(settings, store, transport, clock, host, random);
        EXPECT_EQ(result.reclaimed, std::min<std::int64_t>(stale, 10'000));
        EXPECT_EQ(result.reclaims_more, stale > 10'000);
        LaneHealth health;
        const NextTurn next = after_commit(health, {}, result, 100, 0, 0.5);
        EXPECT_EQ(next.state, stale > 10'000 ? NextTurn::State::due : NextTurn::State::idle);
    }
}
