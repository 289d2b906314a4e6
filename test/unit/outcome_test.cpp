#include "core/outcome.hpp"

#include <gtest/gtest.h>

using namespace outbox_relay::core;

namespace {

constexpr std::int64_t kSecond_us = 1'000'000;
constexpr std::int64_t kNow_us = 1'796'102'400 * kSecond_us; // 2026-12-01 05:20:00

Reply answer(int status, bool uploaded = true) {
    Reply reply;
    reply.header_complete = true;
    reply.uploaded = uploaded;
    reply.status = status;
    return reply;
}

Reply broken(Failure failure, bool nothing_sent) {
    Reply reply;
    reply.failure = failure;
    reply.nothing_sent = nothing_sent;
    return reply;
}

OutcomePolicy policy() {
    OutcomePolicy policy;
    policy.fail_statuses = {422, 429};
    policy.max_hold_us = 300 * kSecond_us;
    policy.wall_us = kNow_us;
    return policy;
}

} // namespace

TEST(Outcome, published_is_a_whole_2xx_header_and_a_whole_upload) {
    for (const int status : {200, 201, 202, 204, 206, 299}) {
        EXPECT_EQ(judge(answer(status), policy()).verdict, Verdict::published) << status;
        EXPECT_EQ(judge(answer(status, false), policy()).verdict, Verdict::retried) << status;
        Reply broken_body = answer(status);
        broken_body.failure = Failure::reset;
        EXPECT_EQ(judge(broken_body, policy()).verdict, Verdict::published)
            << "the body's fate does not matter";
    }
    Reply half = broken(Failure::reset, false);
    half.status = 200;
    EXPECT_EQ(judge(half, policy()).verdict, Verdict::retried) << "the header block was not whole";
}

TEST(Outcome, other_answers) {
    for (const int status : {101, 300, 301, 308, 400, 401, 403, 404, 408, 500, 502, 503, 504, 599}) {
        const Outcome outcome = judge(answer(status), policy());
        EXPECT_EQ(outcome.verdict, Verdict::retried) << status;
        EXPECT_EQ(outcome.error_class, "HTTP " + std::to_string(status));
    }
    EXPECT_EQ(judge(answer(422), policy()).verdict, Verdict::failed);
    EXPECT_EQ(judge(answer(429), policy()).verdict, Verdict::failed) << "fail_statuses come first";
}

TEST(Outcome, what_was_not_sent_is_refused) {
    for (const Failure failure : {Failure::resolve, Failure::connect, Failure::tls, Failure::blocked}) {
        EXPECT_EQ(judge(broken(failure, true), policy()).verdict, Verdict::refused);
        EXPECT_EQ(judge(broken(failure, false), policy()).verdict, Verdict::retried)
            << "something may have been sent";
    }
    for (const Failure failure : {Failure::timeout, Failure::reset, Failure::response})
        EXPECT_EQ(judge(broken(failure, false), policy()).verdict, Verdict::retried);
    EXPECT_EQ(judge(broken(Failure::cancelled, false), policy()).verdict, Verdict::cancelled);
    EXPECT_EQ(judge(broken(Failure::cancelled, true), policy()).verdict, Verdict::cancelled);
}

TEST(Outcome, holds_where_the_endpoint_asks) {
    OutcomePolicy without = policy();
    without.fail_statuses.clear();
    Reply busy = answer(429);
    EXPECT_EQ(judge(busy, without).verdict, Verdict::held);
    EXPECT_EQ(judge(busy, without).hold_us, 0);
    busy.retry_after = "120";
    EXPECT_EQ(judge(busy, without).hold_us, 120 * kSecond_us);
    busy.retry_after = "99999999";
    EXPECT_EQ(judge(busy, without).hold_us, 300 * kSecond_us);
    Reply down = answer(503);
    down.retry_after = "garbage";
    EXPECT_EQ(judge(down, without).verdict, Verdict::retried);
    down.retry_after = "7";
    EXPECT_EQ(judge(down, without).verdict, Verdict::held);
    Reply gone = answer(410);
    gone.retry_after = "1";
    EXPECT_EQ(judge(gone, without).hold_us, 300 * kSecond_us) << "exactly retry_max_backoff";
}

TEST(Outcome, errors_are_clean_and_bounded) {
    Reply reply = answer(500);
    reply.excerpt = std::string(2000, 'x') + "\r\n\x1b";
    const Outcome outcome = judge(reply, policy());
    EXPECT_LE(outcome.error.size(), 500u);
    EXPECT_EQ(outcome.error.substr(0, 10), "HTTP 500: ");
}

TEST(RetryAfter, reads_every_form) {
    EXPECT_EQ(parse_retry_after("0", kNow_us), 0);
    EXPECT_EQ(parse_retry_after(" 120 ", kNow_us), 120 * kSecond_us);
    EXPECT_EQ(parse_retry_after("1.5", kNow_us), 1'500'000);
    EXPECT_EQ(parse_retry_after("0.0000001", kNow_us), 0);
    const std::int64_t hour = 3600 * kSecond_us;
    EXPECT_EQ(parse_retry_after("Tue, 01 Dec 2026 06:20:00 GMT", kNow_us), hour);
    EXPECT_EQ(parse_retry_after("Tuesday, 01-Dec-26 06:20:00 GMT", kNow_us), hour);
    EXPECT_EQ(parse_retry_after("Tue Dec  1 06:20:00 2026", kNow_us), hour);
    EXPECT_EQ(parse_retry_after("Sun, 06 Nov 1994 08:49:37 GMT", kNow_us), 0) << "the past";
    EXPECT_EQ(parse_retry_after("Sunday, 06-Nov-94 08:49:37 GMT", kNow_us), 0) << "1994, not 2094";
}

TEST(RetryAfter, is_bounded_and_ignores_nonsense) {
    const std::int64_t ten_years = 3650LL * 24 * 3600 * kSecond_us;
    EXPECT_EQ(parse_retry_after("999999999999", kNow_us), ten_years);
    EXPECT_EQ(parse_retry_after("99999999999999999999999999", kNow_us), ten_years);
    EXPECT_EQ(parse_retry_after("Fri, 31 Dec 9999 23:59:59 GMT", kNow_us), ten_years);
    for (const char *bad :
         {"", " ", "-5", "+5", "5s", "1.", ".5", "1.5.5", "1e3", "NaN", "garbage", "Tue, 01 Dec 2026",
          "Tue, 41 Dec 2026 06:20:00 GMT", "Tue, 01 Foo 2026 06:20:00 GMT", "Tue, 01 Dec 2026 26:20:00 GMT",
          "Tue, 01 Dec 2026 06:20:00 GMT trailing", "99999999999999999999999999x"})
        EXPECT_FALSE(parse_retry_after(bad, kNow_us).has_value()) << bad;
}
