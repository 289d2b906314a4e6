#include "http_harness.hpp"

#include <gtest/gtest.h>

#include <csignal>
#include <dlfcn.h>
#include <netdb.h>
#include <pthread.h>

#include <chrono>
#include <condition_variable>
#include <cstring>
#include <mutex>

namespace outbox_relay::test {
namespace {

/// What the resolver below is told and has seen.
struct Resolver {
    std::mutex mutex;
    std::condition_variable changed;
    bool released = false;
    int hanging = 0;
    bool in_own_thread = false;
    bool signals_blocked = false;

    int hang(pthread_t caller) {
        sigset_t mask;
        pthread_sigmask(SIG_SETMASK, nullptr, &mask);
        std::unique_lock lock(mutex);
        in_own_thread = pthread_equal(pthread_self(), caller) == 0;
        signals_blocked = sigismember(&mask, SIGUSR1) == 1 && sigismember(&mask, SIGTERM) == 1 &&
                          sigismember(&mask, SIGURG) == 1 && sigismember(&mask, SIGALRM) == 1;
        ++hanging;
        changed.notify_all();
        // Bounded, so that whoever waits for this thread fails the test and does not hang it.
        changed.wait_for(lock, std::chrono::seconds(8), [this] { return released; });
        --hanging;
        changed.notify_all();
        return EAI_AGAIN;
    }

    void wait_until_hanging() {
        std::unique_lock lock(mutex);
        changed.wait(lock, [this] { return hanging > 0; });
    }

    void release() {
        std::unique_lock lock(mutex);
        released = true;
        changed.notify_all();
        changed.wait(lock, [this] { return hanging == 0; });
        released = false;
    }
};

Resolver resolver;
pthread_t main_thread;

class HttpResolver : public testing::Test {
  protected:
    void SetUp() override { main_thread = pthread_self(); }
    http::CurlTransport transport_{http::TransportSettings{}};
};

constexpr std::int64_t kAtOnceUs = 1'000'000;

TEST_F(HttpResolver, AnUnknownNameSendsNothing) {
    const core::Reply reply = exchange(transport_, make_request("http://nowhere.test/"));
    EXPECT_EQ(reply.failure, core::Failure::resolve);
    EXPECT_TRUE(reply.nothing_sent);
}

TEST_F(HttpResolver, AHangingResolverEndsWithTheConnectTimeout) {
    const core::Reply reply = exchange(transport_, make_request("http://hang.test/"), {5'000, 300});
    EXPECT_EQ(reply.failure, core::Failure::resolve);
    EXPECT_TRUE(reply.nothing_sent);
    EXPECT_GE(reply.latency_us, 250'000);
    EXPECT_LT(reply.latency_us, 250'000 + kAtOnceUs);
    resolver.release();
}

TEST_F(HttpResolver, AHangingResolverDoesNotHoldACancel) {
    transport_.start(1, make_request("http://hang.test/"), {5'000, 5'000});
    std::vector<core::Reply> replies;
    transport_.poll(0, replies);
    resolver.wait_until_hanging();
    const auto before = http::steady_us();
    transport_.cancel(replies);
    EXPECT_LT(http::steady_us() - before, kAtOnceUs);
    ASSERT_EQ(replies.size(), 1u);
    EXPECT_EQ(replies[0].failure, core::Failure::cancelled);
    EXPECT_TRUE(replies[0].nothing_sent);
    resolver.release();
}

TEST_F(HttpResolver, AHangingResolverDoesNotHoldTheEndOfATransport) {
    const auto before = http::steady_us();
    {
        http::CurlTransport transport({});
        transport.start(1, make_request("http://hang.test/"), {5'000, 5'000});
        std::vector<core::Reply> replies;
        transport.poll(0, replies);
        resolver.wait_until_hanging();
    }
    EXPECT_LT(http::steady_us() - before, kAtOnceUs);
    resolver.release();
}

/// The server's signal handlers must never run in libcurl's thread.
TEST_F(HttpResolver, ItsThreadHasAllSignalsBlockedAndOursKeepsItsMask) {
    sigset_t before;
    pthread_sigmask(SIG_SETMASK, nullptr, &before);
    transport_.start(1, make_request("http://hang.test/"), {5'000, 5'000});
    std::vector<core::Reply> replies;
    transport_.poll(0, replies);
    resolver.wait_until_hanging();
    EXPECT_TRUE(resolver.in_own_thread);
    EXPECT_TRUE(resolver.signals_blocked);
    sigset_t after;
    pthread_sigmask(SIG_SETMASK, nullptr, &after);
    for (int number = 1; number < NSIG; ++number)
        EXPECT_EQ(sigismember(&before, number), sigismember(&after, number)) << number;
    transport_.cancel(replies);
    resolver.release();
}

} // namespace
} // namespace outbox_relay::test

/// Stands in front of the C library's for the whole test program: libcurl calls this one. Names of
/// .test are answered here (RFC 6761), all others by the library.
extern "C" int
getaddrinfo(const char *host, const char *service, const addrinfo *hints,
            addrinfo **result) noexcept(noexcept(::getaddrinfo(host, service, hints, result))) {
    using Function = int (*)(const char *, const char *, const addrinfo *, addrinfo **);
    if (host != nullptr && std::strcmp(host, "nowhere.test") == 0)
        return EAI_NONAME;
    if (host != nullptr && std::strcmp(host, "hang.test") == 0)
        return outbox_relay::test::resolver.hang(outbox_relay::test::main_thread);
    static const auto real = reinterpret_cast<Function>(dlsym(RTLD_NEXT, "getaddrinfo"));
    return real(host, service, hints, result);
}
