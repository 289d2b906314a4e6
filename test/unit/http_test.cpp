#include "http_harness.hpp"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <cstdlib>
#include <memory>
#include <set>
#include <thread>

namespace outbox_relay::test {
namespace {

using core::Failure;
using core::Reply;
using http::CurlTransport;

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

std::multiset<std::string> lines_of(const std::string &head) {
    std::multiset<std::string> lines;
    for (std::size_t at = 0, end; (end = head.find("\r\n", at)) != std::string::npos; at = end + 2)
        lines.insert(head.substr(at, end - at));
    return lines;
}

TEST(HttpRequests, AreSentExactlyAsTheySay) {
    ReceivedRequest seen;
    std::string host;
    {
        ScriptedServer server([&seen](Connection &connection) {
            if (connection.read_request(seen))
                connection.send(kOk);
        });
        host = "Host: 127.0.0.1:" + std::to_string(server.port());
        auto request = make_request(server.url("/in?x=1"), "{\"a\":1}", "PATCH");
        request.headers.push_back("X-Empty: ");
        CurlTransport transport({});
        ASSERT_TRUE(is_published(exchange(transport, std::move(request))));
    }
    const std::multiset<std::string> expected{"PATCH /in?x=1 HTTP/1.1",
                                              host,
                                              "Content-Length: 7",
                                              "Content-Type: application/json",
                                              "ce-id: 1",
                                              "X-Empty:",
                                              ""};
    EXPECT_EQ(lines_of(seen.head), expected);
    EXPECT_EQ(seen.body, "{\"a\":1}");
}

TEST(HttpRequests, MethodAndBodyFollowTheRequestOnAKeptHandle) {
    std::vector<ReceivedRequest> seen;
    {
        ScriptedServer server([&seen](Connection &connection) {
            ReceivedRequest request;
            while (connection.read_request(request)) {
                seen.push_back(request);
                connection.send(kOk);
            }
        });
        CurlTransport transport({});
        for (const char *method : {"POST", "PUT", "PATCH", "POST"})
            ASSERT_TRUE(is_published(exchange(transport, make_request(server.url(), method, method))));
        ASSERT_TRUE(is_published(exchange(transport, make_request(server.url(), "", "PUT"))));
        EXPECT_EQ(server.connections(), 1);
    }
    ASSERT_EQ(seen.size(), 5u);
    for (std::size_t i = 0; i < 4; ++i)
        EXPECT_TRUE(seen[i].head.starts_with(seen[i].body + " / HTTP/1.1\r\n")) << seen[i].head;
    EXPECT_EQ(lines_of(seen[4].head).count("Content-Length: 0"), 1u) << seen[4].head;
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
    EXPECT_FALSE(is_published(exchange(transport_, make_request(server.url()))));
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

TEST_F(Http, TimeInWhichNobodyListensCountsAgainstNoRequest) {
    std::atomic<int> answered = 0;
    ScriptedServer server([&answered](Connection &connection) {
        ReceivedRequest request;
        while (connection.read_request(request) && connection.send(kOk))
            ++answered;
    });
    transport_.start(1, make_request(server.url()), {300, 300});
    std::vector<Reply> replies;
    while (answered == 0 && replies.empty())
        transport_.poll(0, replies);
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
    if (replies.empty())
        replies = wait_for(transport_, 1);
    EXPECT_TRUE(is_published(replies.at(0))) << replies.at(0).detail;

    // And once somebody listens again time runs as before.
    ScriptedServer silent(once_then_silent(""));
    transport_.start(2, make_request(silent.url()), {300, 300});
    std::this_thread::sleep_for(std::chrono::milliseconds(400));
    const Reply reply = wait_for(transport_, 1).at(0);
    EXPECT_EQ(reply.failure, Failure::timeout);
    EXPECT_GE(reply.latency_us, 650'000);
    EXPECT_LT(reply.latency_us, 2'000'000);
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

} // namespace
} // namespace outbox_relay::test
