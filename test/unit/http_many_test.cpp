#include "http_harness.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <mutex>
#include <set>

namespace outbox_relay::test {
namespace {

using core::Failure;
using core::Reply;
using http::CurlTransport;

// Many at once.

TEST(HttpMany, FiftyAtOnceAreSeenAtOnce) {
    constexpr std::size_t kMany = 50;
    std::mutex mutex;
    std::condition_variable all_here;
    std::size_t waiting = 0;
    ScriptedServer server([&](Connection &connection) {
        ReceivedRequest request;
        if (!connection.read_request(request))
            return;
        {
            std::unique_lock lock(mutex);
            if (++waiting == kMany)
                all_here.notify_all();
            all_here.wait_for(lock, std::chrono::seconds(10), [&] { return waiting >= kMany; });
        }
        do
            connection.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        while (connection.read_request(request));
    });
    CurlTransport transport({.max_connections = kMany, .ca_file = {}});
    for (int round = 0; round < 2; ++round) {
        for (std::size_t i = 0; i < kMany; ++i)
            transport.start(100 + i, make_request(server.url(), std::to_string(i)), kLimits);
        std::set<std::uint64_t> tickets;
        for (const Reply &reply : wait_for(transport, kMany)) {
            EXPECT_TRUE(is_published(reply)) << reply.detail;
            tickets.insert(reply.ticket);
        }
        EXPECT_EQ(tickets.size(), kMany);
    }
    EXPECT_EQ(server.connections(), static_cast<int>(kMany));
}

TEST(HttpMany, CancelCountsWhatHasArrived) {
    std::atomic<int> sent = 0;
    const auto then_silent = [&sent](std::string answer) {
        return [&sent, answer](Connection &connection) {
            ReceivedRequest request;
            if (!connection.read_request(request))
                return;
            connection.send(answer);
            ++sent;
            connection.wait_for_close();
        };
    };
    ScriptedServer hanging(then_silent(""));
    ScriptedServer answering(then_silent("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"));
    ScriptedServer failing(then_silent("HTTP/1.1 503 No\r\nRetry-After: 5\r\nContent-Length: 9\r\n\r\nbusy"));
    ScriptedServer finished(always(kOk));
    CurlTransport transport({});
    transport.start(1, make_request(hanging.url()), kLimits);
    transport.start(2, make_request(answering.url()), kLimits);
    transport.start(3, make_request(failing.url()), kLimits);
    transport.start(4, make_request(finished.url()), kLimits);
    std::vector<Reply> replies;
    while (replies.empty() || sent < 3)
        transport.poll(10, replies);
    ASSERT_EQ(replies.at(0).ticket, 4u);
    ASSERT_EQ(transport.in_flight(), 3u);
    const auto before = http::steady_us();
    transport.cancel(replies);
    EXPECT_LT(http::steady_us() - before, 500'000);
    EXPECT_EQ(transport.in_flight(), 0u);
    ASSERT_EQ(replies.size(), 4u);
    std::sort(replies.begin(), replies.end(),
              [](const Reply &a, const Reply &b) { return a.ticket < b.ticket; });
    EXPECT_EQ(replies[0].failure, Failure::cancelled);
    EXPECT_FALSE(replies[0].nothing_sent);
    EXPECT_FALSE(replies[0].header_complete);
    EXPECT_TRUE(is_published(replies[1]));
    EXPECT_EQ(replies[1].failure, Failure::none);
    EXPECT_EQ(replies[2].status, 503);
    EXPECT_EQ(replies[2].retry_after, "5");
    EXPECT_EQ(replies[2].excerpt, "busy");
    EXPECT_EQ(replies[2].failure, Failure::none);
    EXPECT_TRUE(is_published(exchange(transport, make_request(finished.url())))) << "usable after a cancel";
}

TEST(HttpMany, CancelTakesInWhatLiesInTheSocket) {
    std::atomic<bool> answered = false;
    ScriptedServer server([&](Connection &connection) {
        ReceivedRequest request;
        if (!connection.read_request(request))
            return;
        connection.send(kOk);
        answered = true;
        connection.wait_for_close();
    });
    CurlTransport transport({});
    transport.start(1, make_request(server.url()), kLimits);
    std::vector<Reply> replies;
    while (!answered && replies.empty())
        transport.poll(0, replies);
    transport.cancel(replies);
    ASSERT_EQ(replies.size(), 1u);
    EXPECT_TRUE(is_published(replies[0]));
}

TEST(HttpMany, APollWithNothingInFlightReturnsAtOnce) {
    CurlTransport transport({});
    std::vector<Reply> replies;
    const auto before = http::steady_us();
    transport.poll(5'000, replies);
    EXPECT_LT(http::steady_us() - before, 1'000'000);
    EXPECT_TRUE(replies.empty());
}

TEST(HttpMany, ATransportMayDieWithRequestsInFlight) {
    ScriptedServer server(once_then_silent(""));
    CurlTransport transport({});
    transport.start(1, make_request(server.url()), kLimits);
    std::vector<Reply> replies;
    transport.poll(10, replies);
    EXPECT_TRUE(replies.empty());
}

} // namespace
} // namespace outbox_relay::test
