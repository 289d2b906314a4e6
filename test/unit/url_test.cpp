#include "http/url.hpp"

#include <gtest/gtest.h>

namespace outbox_relay::test {
namespace {

using http::url_origin;
using http::url_problem;

TEST(Url, Accepts) {
    for (const char *url :
         {"http://example.com", "https://example.com/", "HTTPS://Example.com/a/b?c=d&e=%2F",
          "http://localhost:8080/in", "http://127.0.0.1:1/", "http://[::1]:65535/x",
          "https://example.com/{route}/{event_type}?k={ordering_key}",
          "https://example.com/a,b;c=(d)'e'!*$@:+~", "https://example.com?x=1", "https://x.example/@user"})
        EXPECT_EQ(url_problem(url), std::nullopt) << url;
}

struct Refused {
    std::string url;
    const char *reason; ///< a part of it
};

TEST(Url, RefusesAndSaysWhy) {
    const Refused cases[] = {
        {"", "begin with"},
        {"example.com/x", "begin with"},
        {"/path", "begin with"},
        {"//example.com/", "begin with"},
        {"http:example.com", "begin with"},
        {"http:/example.com", "begin with"},
        {"ftp://example.com/", "begin with"},
        {"file:///etc/passwd", "no host"},
        {"file://localhost/etc/passwd", "begin with"},
        {"javascript:alert(1)", "begin with"},
        {"http://", "no host"},
        {"http:///example.com", "no host"},
        {"http://:80/", "no host"},
        {"http://?x", "no host"},
        {"http://user@example.com/", "user name"},
        {"http://user:secret@example.com/", "user name"},
        {"http://@example.com/", "user name"},
        {"http://{tenant_id}.example.com/", "placeholder in"},
        {"http://example.com:{route}/", "placeholder in"},
        {"{route}://example.com/", "placeholder in"},
        {"http://example.com{route}/", "placeholder in"},
        {"http://example.com/{route", "brace"},
        {"http://example.com/route}", "brace"},
        {"http://example.com/{{route}}", "brace"},
        {"http://example.com/{}", "brace"},
        {"http://example.com/#top", "fragment"},
        {"http://example.com/a b", "space"},
        {" http://example.com/", "space"},
        {"http://example.com/\n", "space or control"},
        {"http://example.com/\r\nX-Evil: 1", "space or control"},
        {"http://example.com/\x7f", "space or control"},
        {std::string("http://example.com/\0", 20), "space or control"},
        {"http://ex\xc3\xa4mple.com/", "percent-encoded"},
        {"http://example.com\\@evil.example/", "percent-encoded"},
        {"http://example.com/<x>", "percent-encoded"},
        {"http://example.com/%", "hexadecimal"},
        {"http://example.com/%2", "hexadecimal"},
        {"http://example.com/%zz", "hexadecimal"},
        {"http://example.com:/", "colon"},
        {"http://example.com:0/", "port"},
        {"http://example.com:65536/", "parsed"},
        {"http://example.com:8a/", "parsed"},
        {"http://example.com:-1/", "parsed"},
        {"http://[::1/", "parsed"},
        {"http://exa%2fmple.com/", "parsed"},
    };
    for (const auto &[url, reason] : cases) {
        const auto problem = url_problem(url);
        ASSERT_TRUE(problem) << url;
        EXPECT_NE(problem->find(reason), std::string::npos) << url << ": " << *problem;
        EXPECT_EQ(problem->find("secret"), std::string::npos) << *problem;
        EXPECT_EQ(url_origin(url), "") << url;
    }
}

TEST(Url, OriginLeavesPathAndQueryOut) {
    EXPECT_EQ(url_origin("https://example.com/a/{route}?token=secret"), "https://example.com");
    EXPECT_EQ(url_origin("http://127.0.0.1:8080?x"), "http://127.0.0.1:8080");
    EXPECT_EQ(url_origin("HTTP://[::1]:81/"), "http://[::1]:81");
}

} // namespace
} // namespace outbox_relay::test
