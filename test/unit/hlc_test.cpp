#include "core/hlc.hpp"

#include <algorithm>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include <gtest/gtest.h>

#include "core/no_postgres.hpp"

namespace {

using namespace outbox_relay::core;
using Problem = HlcClock::Problem;

std::int64_t stamp(std::int64_t ms, std::int64_t logical) {
    return *hlc::pack(ms, logical);
}

TEST(Hlc, PackingInvertsAndKeepsOrder) { // HLC-01, HLC-02
    std::mt19937_64 random(1);
    std::vector<std::pair<std::int64_t, std::int64_t>> parts = {
        {0, 0}, {0, 1}, {0, hlc::kMaxLogical}, {1, 0}, {hlc::kMaxMs, hlc::kMaxLogical}};
    for (int i = 0; i < 10000; ++i)
        parts.emplace_back(random() & static_cast<std::uint64_t>(hlc::kMaxMs), random() & 0xffff);
    for (const auto &[ms, logical] : parts) {
        EXPECT_EQ(hlc::physical_ms(stamp(ms, logical)), ms);
        EXPECT_EQ(hlc::logical(stamp(ms, logical)), logical);
    }
    std::sort(parts.begin(), parts.end());
    for (std::size_t i = 1; i < parts.size(); ++i)
        EXPECT_LE(stamp(parts[i - 1].first, parts[i - 1].second), stamp(parts[i].first, parts[i].second));
}

TEST(Hlc, PartsThatDoNotFitAreRefused) { // HLC-04, HLC-05
    EXPECT_FALSE(hlc::pack(-1, 0));
    EXPECT_FALSE(hlc::pack(0, -1));
    EXPECT_FALSE(hlc::pack(0, 65536));
    EXPECT_FALSE(hlc::pack(std::int64_t{1} << 47, 0));
    EXPECT_FALSE(hlc::pack(INT64_MAX, 0));
    EXPECT_FALSE(hlc::pack(INT64_MIN, INT64_MIN));
}

TEST(Hlc, TextSortsLikeTheValue) { // HLC-03
    EXPECT_EQ(hlc::text(0), "000000000000000.00000");
    EXPECT_EQ(hlc::text(stamp(9000, 7)), "000000000009000.00007");
    EXPECT_EQ(hlc::text(INT64_MAX), "140737488355327.65535");
    std::mt19937_64 random(2);
    std::vector<std::int64_t> values;
    for (int i = 0; i < 10000; ++i)
        values.push_back(static_cast<std::int64_t>(random() >> (1 + i % 60)));
    std::sort(values.begin(), values.end());
    std::string before;
    for (const std::int64_t value : values) {
        const std::string text = hlc::text(value);
        EXPECT_EQ(text.size(), hlc::kTextSize);
        EXPECT_LE(before, text);
        EXPECT_EQ(hlc::parse(text), value);
        before = text;
    }
}

TEST(Hlc, OnlyTheExactTextIsParsed) { // HLC-04
    for (const char *bad :
         {"", "x", "123", "000000000009000.0000", "000000000009000.000007", "00000000009000.00007",
          "000000000009000:00007", "000000000009000.0000x", "-00000000009000.00007", "+00000000009000.00007",
          " 00000000009000.00007", "000000000009000.00007 ", "000000000009000.65536", "000000000009000.99999",
          "140737488355328.00000", "999999999999999.99999", "0x0000000009000.00007",
          "00000000000900\xc2\xb2.00007"})
        EXPECT_FALSE(hlc::parse(bad)) << bad;
    EXPECT_FALSE(hlc::parse(std::string_view("000000000009000.00007\0", 22)));
    EXPECT_FALSE(hlc::parse(std::string_view("0000000000090\0.00007", 21)));
}

TEST(HlcClock, FollowsTheWall) { // HLC-06 to HLC-09
    std::int64_t last = 0;
    HlcClock clock(last);
    EXPECT_EQ(clock.now(5000).value, stamp(5000, 0));
    EXPECT_EQ(clock.now(5000).value, stamp(5000, 1));
    EXPECT_EQ(clock.now(3000).value, stamp(5000, 2));
    EXPECT_EQ(clock.now(-1).value, stamp(5000, 3));
    EXPECT_EQ(clock.now(5001).value, stamp(5001, 0));
    std::int64_t before = clock.last();
    for (int i = 0; i < 1000; ++i) {
        const std::int64_t next = clock.now(5001).value;
        EXPECT_EQ(next, before + 1);
        before = next;
    }
    EXPECT_EQ(clock.last(), before);
}

TEST(HlcClock, LogicalOverflowCarries) { // HLC-10
    std::int64_t last = stamp(5000, hlc::kMaxLogical);
    HlcClock clock(last);
    EXPECT_EQ(clock.now(4000).value, stamp(5001, 0));
    EXPECT_EQ(clock.now(5000).value, stamp(5001, 1));
}

TEST(HlcClock, ManyAtOnceAreOneRange) {
    std::int64_t last = 0;
    HlcClock clock(last);
    EXPECT_EQ(clock.now(5000, 3).value, stamp(5000, 0));
    EXPECT_EQ(clock.last(), stamp(5000, 2));
    EXPECT_EQ(clock.now(5000, 100000).value, stamp(5000, 3));
    EXPECT_EQ(clock.last(), stamp(5000, 0) + 100002);
}

TEST(HlcClock, MergesWhatIsAhead) { // HLC-11 to HLC-13
    std::int64_t last = 0;
    HlcClock clock(last);
    EXPECT_EQ(clock.update(stamp(9000, 7), 1000, 300000).value, stamp(9000, 8));
    last = 0;
    EXPECT_EQ(clock.update(stamp(1000, 3), 5000, 300000).value, stamp(5000, 0));
    last = stamp(2000, 4);
    EXPECT_EQ(clock.update(stamp(2000, 9), 2000, 300000).value, stamp(2000, 10));
    EXPECT_EQ(clock.update(stamp(2000, 4), 2000, 300000).value, stamp(2000, 11));
    EXPECT_EQ(clock.update(stamp(2000, hlc::kMaxLogical), 2000, 0).value, stamp(2001, 0));
}

TEST(HlcClock, DriftIsRefusedAndChangesNothing) { // HLC-15, T-17
    std::int64_t last = stamp(1000, 0);
    HlcClock clock(last);
    EXPECT_EQ(clock.update(stamp(1000 + 300001, 0), 1000, 300000).problem, Problem::drift);
    EXPECT_EQ(clock.update(INT64_MAX, 1000, 300000).problem, Problem::drift);
    EXPECT_EQ(clock.update(-1, 1000, 300000).problem, Problem::malformed);
    EXPECT_EQ(clock.update(INT64_MIN, 1000, 300000).problem, Problem::malformed);
    EXPECT_EQ(clock.last(), stamp(1000, 0));
    EXPECT_EQ(clock.update(stamp(1000 + 300000, 0), 1000, 300000).problem, Problem::none);
}

TEST(HlcClock, ResumeLiftsTheFloor) { // HLC-18
    std::int64_t last = stamp(5000, 0);
    HlcClock clock(last);
    EXPECT_EQ(clock.resume(stamp(4000, 0)), Problem::none);
    EXPECT_EQ(clock.last(), stamp(5000, 0));
    EXPECT_EQ(clock.resume(stamp(5000, 0)), Problem::none);
    EXPECT_EQ(clock.resume(stamp(99999999999, 3)), Problem::none);
    EXPECT_EQ(clock.last(), stamp(99999999999, 3));
    EXPECT_EQ(clock.resume(-1), Problem::malformed);
    EXPECT_EQ(clock.resume(INT64_MAX), Problem::exhausted);
    EXPECT_EQ(clock.resume(INT64_MAX - HlcClock::kHeadroom + 1), Problem::exhausted);
    EXPECT_EQ(clock.last(), stamp(99999999999, 3));
}

TEST(HlcClock, TheEndIsAnErrorNotAWrap) { // HLC-05
    std::int64_t last = INT64_MAX - 1;
    HlcClock clock(last);
    EXPECT_EQ(clock.now(0, 2).problem, Problem::exhausted);
    EXPECT_EQ(clock.last(), INT64_MAX - 1);
    EXPECT_EQ(clock.now(0).value, INT64_MAX);
    EXPECT_EQ(clock.now(0).problem, Problem::exhausted);
    EXPECT_EQ(clock.now(INT64_MAX).problem, Problem::exhausted);
    EXPECT_EQ(clock.update(INT64_MAX, hlc::kMaxMs, 300000).problem, Problem::exhausted);
    EXPECT_EQ(clock.last(), INT64_MAX);
}

/// Whatever the wall does and whoever merges what: each stamp is above every stamp given and merged
/// before, and never further ahead of the highest wall seen than the drift and the steps taken.
TEST(HlcClock, AnyInterleavingIsStrictlyIncreasing) { // HLC-19
    constexpr std::int64_t kDriftMs = 300000;
    for (std::uint64_t seed = 1; seed <= 10; ++seed) {
        std::mt19937_64 random(seed);
        std::int64_t last = 0;
        HlcClock clock(last);
        std::int64_t wall = 1'796'000'000'000;
        std::int64_t highest_wall = wall;
        std::int64_t before = 0;
        for (int step = 0; step < 100000; ++step) {
            const std::int64_t jump = static_cast<std::int64_t>(random() % 3);
            if (random() % 100 == 0)
                wall += static_cast<std::int64_t>(random() % 7200000) - 3600000;
            else
                wall += jump - 1;
            highest_wall = std::max(highest_wall, wall);
            const std::int64_t remote =
                (wall + static_cast<std::int64_t>(random() % 800000) - 400000) << 16 | (random() & 0xffff);
            switch (random() % 4) {
            case 0: {
                const HlcClock::Stamp merged = clock.update(remote, wall, kDriftMs);
                if (merged.problem == Problem::drift)
                    break;
                ASSERT_EQ(merged.problem, Problem::none);
                ASSERT_GT(merged.value, before);
                ASSERT_GT(merged.value, remote);
                before = merged.value;
                break;
            }
            case 1: {
                const std::size_t count = 1 + random() % 5;
                const std::int64_t first = clock.now(wall, count).value;
                ASSERT_GT(first, before);
                before = first + static_cast<std::int64_t>(count) - 1;
                break;
            }
            case 2:
                if (hlc::physical_ms(remote) <= wall + kDriftMs) {
                    ASSERT_EQ(clock.resume(remote), Problem::none);
                    before = std::max(before, remote);
                }
                break;
            default:
                const std::int64_t next = clock.now(wall).value;
                ASSERT_GT(next, before);
                ASSERT_GE(next, wall << 16);
                before = next;
            }
            ASSERT_EQ(clock.last(), before);
            ASSERT_LE(hlc::physical_ms(before), highest_wall + kDriftMs + 10);
        }
    }
}

TEST(HlcClock, ThreadsShareOneWord) { // HLC-20 without a server
    std::int64_t last = 0;
    std::vector<std::vector<std::int64_t>> given(8);
    std::vector<std::thread> threads;
    for (std::vector<std::int64_t> &own : given)
        threads.emplace_back([&last, &own] {
            HlcClock clock(last);
            for (int i = 0; i < 20000; ++i)
                own.push_back(clock.now(1000).value);
        });
    for (std::thread &thread : threads)
        thread.join();
    std::vector<std::int64_t> all;
    for (const std::vector<std::int64_t> &own : given) {
        EXPECT_TRUE(std::is_sorted(own.begin(), own.end()));
        all.insert(all.end(), own.begin(), own.end());
    }
    std::sort(all.begin(), all.end());
    EXPECT_EQ(std::adjacent_find(all.begin(), all.end()), all.end());
    EXPECT_EQ(all.size(), 160000u);
}

} // namespace
