#include "http_harness.hpp"

#include <gtest/gtest.h>

namespace outbox_relay::test {
namespace {

using core::Failure;
using core::Reply;
using http::CurlTransport;

Reply reply_to(const ScriptedServer &server, const core::RequestLimits &limits = kLimits) {
    CurlTransport transport({});
    return exchange(transport, make_request(server.url()), limits);
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

} // namespace
} // namespace outbox_relay::test
