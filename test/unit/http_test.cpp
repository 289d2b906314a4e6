#include "http_harness.hpp"
#include "scripted_server.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <condition_variable>
#include <set>

namespace outbox_relay::test {
namespace {

using core::Failure;
using core::Reply;
using http::CurlTransport;

const std::string kOk = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// Answers every request of a connection with the same bytes.
ScriptedServer::Script always(std::string answer) {
    return [answer](Connection &connection) {
        ReceivedRequest request;
        while (connection.read_request(request) && connection.send(answer))
            ;
    };
}

/// Reads one request, sends these bytes, and keeps the connection until the client closes it.
ScriptedServer::Script once_then_silent(std::string answer) {
    return [answer](Connection &connection) {
        ReceivedRequest request;
        if (connection.read_request(request) && connection.send(answer))
            connection.wait_for_close();
    };
}

/// Reads one request, sends `start`, then `more` for as long as the client takes it.
ScriptedServer::Script endless(std::string start, std::string more) {
    return [start, more](Connection &connection) {
        ReceivedRequest request;
        if (!connection.read_request(request) || !connection.send(start))
            return;
        while (connection.send(more))
            ;
    };
}

Reply reply_to(const ScriptedServer &server, const core::RequestLimits &limits = kLimits) {
    CurlTransport transport({});
    return exchange(transport, make_request(server.url()), limits);
}

class Http : public testing::Test {
  protected:
    CurlTransport transport_{http::TransportSettings{}};
};

TEST_F(Http, PublishesOn200) {
    ScriptedServer server(always(kOk));
    const Reply reply = exchange(transport_, make_request(server.url(), "{\"a\":1}"));
    EXPECT_TRUE(is_published(reply));
    EXPECT_EQ(reply.ticket, 1u);
    EXPECT_EQ(reply.failure, Failure::none);
    EXPECT_EQ(reply.status, 200);
    EXPECT_EQ(reply.body_bytes, 7);
    EXPECT_FALSE(reply.nothing_sent);
    EXPECT_GT(reply.latency_us, 0);
    EXPECT_EQ(reply.excerpt, "");
    EXPECT_EQ(transport_.in_flight(), 0u);
}

TEST_F(Http, SendsExactlyWhatTheRequestSays) {
    ReceivedRequest seen;
    ScriptedServer server([&seen](Connection &connection) {
        if (connection.read_request(seen))
            connection.send(kOk);
    });
    auto request = make_request(server.url("/in?x=1"), "{\"a\":1}", "PATCH");
    request.headers.push_back("X-Empty: ");
    ASSERT_TRUE(is_published(exchange(transport_, std::move(request))));
    EXPECT_EQ(seen.head,
              "PATCH /in?x=1 HTTP/1.1\r\nHost: 127.0.0.1:" + std::to_string(server.port()) +
                  "\r\nContent-Length: 7\r\nContent-Type: application/json\r\nce-id: 1\r\nX-Empty:\r\n\r\n");
    EXPECT_EQ(seen.body, "{\"a\":1}");
}

TEST_F(Http, MethodAndBodyFollowTheRequestOnAKeptHandle) {
    std::vector<ReceivedRequest> seen;
    ScriptedServer server([&seen](Connection &connection) {
        ReceivedRequest request;
        while (connection.read_request(request) && connection.send(kOk))
            seen.push_back(request);
    });
    for (const char *method : {"POST", "PUT", "PATCH", "POST"})
        ASSERT_TRUE(is_published(exchange(transport_, make_request(server.url(), method, method))));
    ASSERT_TRUE(is_published(exchange(transport_, make_request(server.url(), "", "PUT"))));
    EXPECT_EQ(server.connections(), 1);
    transport_.drop_idle(); // ends the connection, and with it the script
    ASSERT_EQ(seen.size(), 5u);
    for (std::size_t i = 0; i < 4; ++i)
        EXPECT_TRUE(seen[i].head.starts_with(seen[i].body + " / HTTP/1.1\r\n")) << seen[i].head;
    EXPECT_TRUE(seen[4].head.find("Content-Length: 0\r\n") != std::string::npos) << seen[4].head;
}

TEST_F(Http, KeepsConnections) {
    ScriptedServer server(always(kOk));
    for (int i = 0; i < 20; ++i)
        ASSERT_TRUE(is_published(exchange(transport_, make_request(server.url()))));
    EXPECT_EQ(server.connections(), 1);
    EXPECT_EQ(transport_.connections_made(), 1u);
}

TEST_F(Http, DropIdleClosesKeptConnections) {
    ScriptedServer server(always(kOk));
    ASSERT_TRUE(is_published(exchange(transport_, make_request(server.url()))));
    EXPECT_FALSE(transport_.is_idle_too_long(60'000));
    EXPECT_TRUE(transport_.is_idle_too_long(-1));
    transport_.drop_idle();
    ASSERT_TRUE(is_published(exchange(transport_, make_request(server.url()))));
    EXPECT_EQ(server.connections(), 2);
}

TEST_F(Http, DropIdleLeavesWhatIsInFlight) {
    ScriptedServer server(always(kOk));
    transport_.start(1, make_request(server.url()), kLimits);
    EXPECT_FALSE(transport_.is_idle_too_long(-1));
    transport_.drop_idle();
    EXPECT_TRUE(is_published(wait_for(transport_, 1).at(0)));
}

TEST_F(Http, KeepsTheBeginningOfAnErrorsBody) {
    const std::string body = "no such thing" + std::string(2000, 'x');
    ScriptedServer server(always("HTTP/1.1 404 Not Found\r\nContent-Length: " + std::to_string(body.size()) +
                                 "\r\n\r\n" + body));
    const Reply reply = exchange(transport_, make_request(server.url()));
    EXPECT_EQ(reply.status, 404);
    EXPECT_EQ(reply.failure, Failure::none);
    EXPECT_TRUE(reply.header_complete);
    EXPECT_EQ(reply.excerpt, body.substr(0, 512));
    EXPECT_TRUE(is_published(exchange(transport_, make_request(server.url()))) == false);
    EXPECT_EQ(server.connections(), 1) << "an error's body must not cost the connection";
}

TEST_F(Http, NothingOfAReplyLeaksIntoTheNext) {
    std::atomic<int> requests = 0;
    ScriptedServer server([&requests](Connection &connection) {
        ReceivedRequest request;
        while (connection.read_request(request))
            connection.send(requests++ == 0
                                ? "HTTP/1.1 503 No\r\nRetry-After: 9\r\nContent-Length: 3\r\n\r\nbad"
                                : "HTTP/1.1 500 No\r\nContent-Length: 0\r\n\r\n");
    });
    const Reply first = exchange(transport_, make_request(server.url()));
    EXPECT_EQ(first.retry_after, "9");
    EXPECT_EQ(first.excerpt, "bad");
    const Reply second = exchange(transport_, make_request(server.url()));
    EXPECT_EQ(second.status, 500);
    EXPECT_EQ(second.retry_after, "");
    EXPECT_EQ(second.excerpt, "");
    EXPECT_EQ(second.detail, "");
}

TEST_F(Http, TakesRetryAfterOfTheFinalBlockOnly) {
    ScriptedServer server(always("HTTP/1.1 103 Early\r\nRetry-After: 1\r\n\r\n"
                                 "HTTP/1.1 429 Slow\r\nretry-after: \t Fri, 31 Dec 1999 23:59:59 GMT \r\n"
                                 "Content-Length: 0\r\n\r\n"));
    const Reply reply = exchange(transport_, make_request(server.url()));
    EXPECT_EQ(reply.status, 429);
    EXPECT_EQ(reply.retry_after, "Fri, 31 Dec 1999 23:59:59 GMT");
}

TEST_F(Http, SkipsInterimAnswers) {
    ScriptedServer server(always("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n" + kOk));
    EXPECT_TRUE(is_published(exchange(transport_, make_request(server.url()))));
}

TEST_F(Http, AnInterimAnswerAloneIsNone) {
    ScriptedServer server([](Connection &connection) {
        ReceivedRequest request;
        connection.read_request(request);
        connection.send("HTTP/1.1 102 Processing\r\n\r\n");
    });
    const Reply reply = exchange(transport_, make_request(server.url()));
    EXPECT_FALSE(reply.header_complete);
    EXPECT_EQ(reply.status, 0);
    EXPECT_EQ(reply.failure, Failure::reset);
}

TEST_F(Http, SwitchingProtocolsIsNoAnswer) {
    ScriptedServer server(once_then_silent("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n"));
    const Reply reply = exchange(transport_, make_request(server.url()));
    EXPECT_EQ(reply.failure, Failure::response);
    EXPECT_EQ(reply.status, 0);
    EXPECT_FALSE(reply.nothing_sent);
}

TEST_F(Http, DoesNotFollowRedirects) {
    ScriptedServer target(always(kOk));
    for (const char *status : {"301", "302", "303", "307", "308"}) {
        ScriptedServer server(
            always(std::string("HTTP/1.1 ") + status + " Moved\r\nLocation: " + target.url() +
                   "\r\nRefresh: 0; url=" + target.url() + "\r\nContent-Length: 0\r\n\r\n"));
        const Reply reply = exchange(transport_, make_request(server.url()));
        EXPECT_EQ(std::to_string(reply.status), status);
    }
    EXPECT_EQ(target.connections(), 0);
}

TEST_F(Http, IgnoresTheProxyOfTheEnvironment) {
    ScriptedServer proxy(always(kOk));
    ScriptedServer server(always("HTTP/1.1 204 No Content\r\n\r\n"));
    for (const char *name : {"http_proxy", "all_proxy", "ALL_PROXY"})
        setenv(name, proxy.url().c_str(), 1);
    const Reply reply = exchange(transport_, make_request(server.url()));
    for (const char *name : {"http_proxy", "all_proxy", "ALL_PROXY"})
        unsetenv(name);
    EXPECT_EQ(reply.status, 204);
    EXPECT_EQ(proxy.connections(), 0);
}

// An endpoint that answers before it has the body: spec.md, section 6, first line.

TEST_F(Http, AnEarly200WithAnUnsentBodyIsNotPublished) {
    ScriptedServer server([](Connection &connection) {
        connection.read_head();
        connection.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\nConnection: close\r\n\r\n");
        connection.reset();
    });
    const Reply reply = exchange(transport_, make_request(server.url(), std::string(20 << 20, 'x')));
    EXPECT_FALSE(reply.uploaded);
    EXPECT_FALSE(reply.nothing_sent);
    EXPECT_FALSE(is_published(reply));
}

TEST_F(Http, AnEarly200WhoseBodyIsNeverReadEndsInTime) {
    ScriptedServer server([](Connection &connection) {
        connection.send("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n");
        connection.wait_for_hangup();
    });
    const Reply reply =
        exchange(transport_, make_request(server.url(), std::string(20 << 20, 'x')), {500, 500});
    EXPECT_FALSE(is_published(reply));
    EXPECT_EQ(reply.failure, Failure::timeout);
}

TEST_F(Http, AnEarly200WhoseBodyIsReadAfterwardsIsPublished) {
    ScriptedServer server([](Connection &connection) {
        connection.read_head();
        connection.send(kOk);
        connection.wait_for_close();
    });
    const Reply reply = exchange(transport_, make_request(server.url(), std::string(2 << 20, 'x')));
    EXPECT_TRUE(is_published(reply)) << reply.detail;
}

TEST_F(Http, AnEarlyErrorCountsWithoutTheBody) {
    ScriptedServer server([](Connection &connection) {
        connection.read_head();
        connection.send("HTTP/1.1 413 Too Large\r\nContent-Length: 3\r\n\r\nbig");
        connection.wait_for_close();
    });
    const Reply reply = exchange(transport_, make_request(server.url(), std::string(20 << 20, 'x')));
    EXPECT_EQ(reply.status, 413);
    EXPECT_EQ(reply.failure, Failure::none);
    EXPECT_EQ(reply.excerpt, "big");
    EXPECT_FALSE(reply.uploaded);
}

TEST_F(Http, AnEndpointMaySendOurBodyBack) {
    ScriptedServer server([](Connection &connection) {
        ReceivedRequest request;
        if (connection.read_request(request))
            connection.send("HTTP/1.1 200 OK\r\nContent-Length: " + std::to_string(request.body.size()) +
                            "\r\n\r\n" + request.body);
    });
    EXPECT_TRUE(is_published(exchange(transport_, make_request(server.url(), std::string(4 << 20, 'x')))));
}

// Connections that break.

TEST_F(Http, ARefusedPortSendsNothing) {
    std::string url;
    {
        ScriptedServer server(always(kOk));
        url = server.url();
    }
    const Reply reply = exchange(transport_, make_request(url));
    EXPECT_EQ(reply.failure, Failure::connect);
    EXPECT_TRUE(reply.nothing_sent);
    EXPECT_FALSE(reply.uploaded);
    EXPECT_NE(reply.detail, "");
}

TEST_F(Http, AnEmptyBodyThatWasNotSentIsNotUploaded) {
    std::string url;
    {
        ScriptedServer server(always(kOk));
        url = server.url();
    }
    EXPECT_FALSE(exchange(transport_, make_request(url, "")).uploaded);
}

TEST_F(Http, AResetAfterTheRequestMaySendSomething) {
    ScriptedServer server([](Connection &connection) {
        ReceivedRequest request;
        connection.read_request(request);
        connection.reset();
    });
    const Reply reply = exchange(transport_, make_request(server.url()));
    EXPECT_EQ(reply.failure, Failure::reset);
    EXPECT_FALSE(reply.nothing_sent);
    EXPECT_FALSE(reply.header_complete);
}

TEST_F(Http, ACloseWithoutAnAnswerIsAReset) {
    ScriptedServer server([](Connection &connection) {
        ReceivedRequest request;
        connection.read_request(request);
    });
    EXPECT_EQ(exchange(transport_, make_request(server.url())).failure, Failure::reset);
}

TEST_F(Http, ADeadKeptConnectionIsReplaced) {
    ScriptedServer server([](Connection &connection) {
        ReceivedRequest request;
        if (connection.read_request(request))
            connection.send(kOk);
    });
    for (int i = 0; i < 3; ++i)
        ASSERT_TRUE(is_published(exchange(transport_, make_request(server.url()))));
    EXPECT_EQ(server.connections(), 3);
}

/// The kept connection dies with the request in it, and nobody listens any more: something was sent.
TEST_F(Http, ADeadKeptConnectionWithNoSuccessorDidSend) {
    auto server = std::make_unique<ScriptedServer>([](Connection &connection) {
        ReceivedRequest request;
        if (connection.read_request(request) && connection.send(kOk) && connection.read_request(request))
            connection.wait_for_hangup();
    });
    ASSERT_TRUE(is_published(exchange(transport_, make_request(server->url()))));
    transport_.start(2, make_request(server->url()), kLimits);
    std::vector<Reply> replies;
    transport_.poll(0, replies); // the request is out
    server.reset();
    replies = wait_for(transport_, 1);
    EXPECT_EQ(replies.at(0).failure, Failure::reset);
    EXPECT_FALSE(replies.at(0).nothing_sent);
}

TEST_F(Http, AHangEndsInATimeout) {
    ScriptedServer server(once_then_silent(""));
    const Reply reply = exchange(transport_, make_request(server.url()), {300, 300});
    EXPECT_EQ(reply.failure, Failure::timeout);
    EXPECT_FALSE(reply.nothing_sent);
    EXPECT_TRUE(reply.uploaded);
    EXPECT_FALSE(reply.header_complete);
    EXPECT_GE(reply.latency_us, 250'000);
    EXPECT_LT(reply.latency_us, 5'000'000);
}

TEST_F(Http, AHangInTheHeadersEndsInATimeout) {
    ScriptedServer server(once_then_silent("HTTP/1.1 200 OK\r\nContent-Le"));
    const Reply reply = exchange(transport_, make_request(server.url()), {300, 300});
    EXPECT_EQ(reply.failure, Failure::timeout);
    EXPECT_EQ(reply.status, 0);
    EXPECT_FALSE(is_published(reply));
}

TEST_F(Http, AHangInTheBodyAfterTheHeadersIsPublishedAndFreesItsPlace) {
    ScriptedServer server(once_then_silent("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nx"));
    const Reply reply = exchange(transport_, make_request(server.url()), {60'000, 5'000});
    EXPECT_TRUE(is_published(reply));
    EXPECT_EQ(reply.failure, Failure::none);
    EXPECT_LT(reply.latency_us, 5'000'000);
}

TEST_F(Http, AResetInTheBodyAfterTheHeadersIsPublished) {
    ScriptedServer server([](Connection &connection) {
        ReceivedRequest request;
        connection.read_request(request);
        connection.send("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nx");
    });
    EXPECT_TRUE(is_published(exchange(transport_, make_request(server.url()))));
}

// Answers that are not HTTP, or have no end.

TEST(HttpAnswers, MalformedOnesAreFailures) {
    for (const char *answer :
         {"HTTP/1.1 2x0 OK\r\n\r\n", "HTTP/1.1 2000 OK\r\n\r\n", "HTTP/1.1 099 OK\r\n\r\n", "HELLO\r\n\r\n",
          "<html>200</html>", "HTTP/7.1 200 OK\r\n\r\n"}) {
        ScriptedServer server([answer](Connection &connection) {
            ReceivedRequest request;
            connection.read_request(request);
            connection.send(answer);
            connection.send(std::string(600, '\n'));
        });
        const Reply reply = reply_to(server);
        EXPECT_EQ(reply.failure, Failure::response) << answer << ": " << reply.detail;
        EXPECT_FALSE(is_published(reply)) << answer;
        EXPECT_FALSE(reply.nothing_sent) << answer;
    }
}

TEST(HttpAnswers, ANulInAHeaderSpoilsTheBlock) {
    const std::string nul("HTTP/1.1 200 OK\r\nX-A: a\0b\r\nContent-Length: 0\r\n\r\n", 49);
    ScriptedServer server(always(nul));
    const Reply reply = reply_to(server);
    EXPECT_EQ(reply.failure, Failure::response);
    EXPECT_FALSE(is_published(reply));
}

TEST(HttpAnswers, EndlessHeadersAreCut) {
    ScriptedServer server(endless("HTTP/1.1 200 OK\r\n", "X-More: " + std::string(1000, 'h') + "\r\n"));
    const Reply reply = reply_to(server);
    EXPECT_EQ(reply.failure, Failure::response);
    EXPECT_NE(reply.detail.find("64 KiB"), std::string::npos) << reply.detail;
    EXPECT_FALSE(is_published(reply));
}

TEST(HttpAnswers, AnEndlessHeaderLineIsCut) {
    ScriptedServer server(endless("HTTP/1.1 200 OK\r\nX-Long: ", std::string(4096, 'h')));
    const Reply reply = reply_to(server);
    EXPECT_FALSE(reply.header_complete);
    EXPECT_NE(reply.failure, Failure::none);
    EXPECT_NE(reply.failure, Failure::timeout);
}

TEST(HttpAnswers, AFloodOfInterimAnswersIsCut) {
    ScriptedServer server(endless("", "HTTP/1.1 102 Processing\r\n\r\n"));
    const Reply reply = reply_to(server);
    EXPECT_EQ(reply.failure, Failure::response);
    EXPECT_NE(reply.detail.find("32 interim"), std::string::npos) << reply.detail;
}

TEST(HttpAnswers, AnEndlessBodyOfASuccessIsPublished) {
    ScriptedServer server(endless("HTTP/1.1 200 OK\r\n\r\n", std::string(65536, 'b')));
    const Reply reply = reply_to(server);
    EXPECT_TRUE(is_published(reply));
    EXPECT_EQ(reply.failure, Failure::none);
}

TEST(HttpAnswers, AnEndlessBodyOfAnErrorIsThatError) {
    ScriptedServer server(endless("HTTP/1.1 500 Oops\r\n\r\n", std::string(65536, 'b')));
    const Reply reply = reply_to(server);
    EXPECT_EQ(reply.status, 500);
    EXPECT_EQ(reply.failure, Failure::none);
    EXPECT_EQ(reply.excerpt, std::string(512, 'b'));
}

TEST(HttpAnswers, AnEndlessBodyBeforeTheUploadIsCut) {
    ScriptedServer server([](Connection &connection) {
        connection.send("HTTP/1.1 200 OK\r\n\r\n");
        while (connection.send(std::string(65536, 'b')))
            ;
    });
    CurlTransport transport({});
    const Reply reply = exchange(transport, make_request(server.url(), std::string(20 << 20, 'x')));
    EXPECT_EQ(reply.failure, Failure::response) << reply.detail;
    EXPECT_FALSE(is_published(reply));
}

TEST(HttpAnswers, TrailersAndABombInThemDoNotMatter) {
    ScriptedServer server(endless("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n",
                                  "X-Trailer: " + std::string(1000, 't') + "\r\n"));
    EXPECT_TRUE(is_published(reply_to(server)));
}

TEST(HttpAnswers, CompressedBodiesStayAsTheyAre) {
    ScriptedServer server(
        always("HTTP/1.1 500 X\r\nContent-Encoding: gzip\r\nContent-Length: 4\r\n\r\n\x1f\x8b\x08z"));
    EXPECT_EQ(reply_to(server).excerpt, "\x1f\x8b\x08z");
}

// What is never sent.

TEST_F(Http, HeaderInjectionIsBlocked) {
    ScriptedServer server(always(kOk));
    for (const std::string &line :
         {std::string("X-A: a\r\nX-B: b"), std::string("X-A: a\nb"), std::string("X-A: \0", 6)}) {
        auto request = make_request(server.url());
        request.headers.push_back(line);
        transport_.start(7, std::move(request), kLimits);
        EXPECT_EQ(transport_.in_flight(), 1u);
        const Reply reply = wait_for(transport_, 1).at(0);
        EXPECT_EQ(reply.ticket, 7u);
        EXPECT_EQ(reply.failure, Failure::blocked);
        EXPECT_TRUE(reply.nothing_sent);
    }
    EXPECT_EQ(server.connections(), 0);
}

TEST_F(Http, OtherSchemesAndCredentialsAreBlocked) {
    for (const char *url : {"file:///etc/hostname", "ftp://127.0.0.1/", "gopher://127.0.0.1/",
                            "http://u:p@127.0.0.1/", "http://", "http://127.0.0.1:99999/"}) {
        const Reply reply = exchange(transport_, make_request(url));
        EXPECT_EQ(reply.failure, Failure::blocked) << url << ": " << reply.detail;
        EXPECT_TRUE(reply.nothing_sent) << url;
        EXPECT_FALSE(is_published(reply)) << url;
    }
}

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
    ScriptedServer hanging(once_then_silent(""));
    ScriptedServer answering(once_then_silent("HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"));
    ScriptedServer failing(
        once_then_silent("HTTP/1.1 503 No\r\nRetry-After: 5\r\nContent-Length: 9\r\n\r\nbusy"));
    ScriptedServer finished(always(kOk));
    CurlTransport transport({});
    transport.start(1, make_request(hanging.url()), kLimits);
    transport.start(2, make_request(answering.url()), kLimits);
    transport.start(3, make_request(failing.url()), kLimits);
    transport.start(4, make_request(finished.url()), kLimits);
    std::vector<Reply> replies;
    while (replies.empty()) // until the whole answer is in; the others' headers came no later or come now
        transport.poll(100, replies);
    ASSERT_EQ(replies.at(0).ticket, 4u);
    for (int i = 0; i < 3; ++i)
        transport.poll(50, replies);
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
        answered.notify_all();
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

TEST(HttpMany, CancelBeforeAnythingHappenedSendsNothing) {
    ScriptedServer server(always(kOk));
    std::vector<Reply> replies;
    {
        // A host of TEST-NET-1 (RFC 5737): no connection stands before the cancel.
        CurlTransport transport({});
        transport.start(1, make_request("http://192.0.2.1:9/"), kLimits);
        transport.cancel(replies);
    }
    ASSERT_EQ(replies.size(), 1u);
    EXPECT_TRUE(replies[0].nothing_sent);
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
