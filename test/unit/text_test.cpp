#include "core/header.hpp"
#include "core/latency.hpp"
#include "core/text.hpp"
#include "core/timestamp.hpp"
#include "core/uuid.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <random>

using namespace outbox_relay::core;

TEST(Text, cleans_any_bytes) {
    std::mt19937_64 random(11);
    for (int i = 0; i < 20'000; ++i) {
        std::string bytes;
        for (std::size_t n = random() % 60; n > 0; --n)
            bytes.push_back(static_cast<char>(random() % 4 == 0 ? 0x80 + random() % 128 : random() % 128));
        const std::size_t max = random() % 50;
        const std::string clean = clean_text(bytes, max);
        ASSERT_LE(clean.size(), max);
        ASSERT_TRUE(is_utf8(clean));
        ASSERT_EQ(clean_text(clean, max), clean) << "idempotent";
        ASSERT_TRUE(std::none_of(clean.begin(), clean.end(),
                                 [](char c) { return static_cast<unsigned char>(c) < 0x20 || c == 0x7f; }));
    }
}

TEST(Text, folds_replaces_and_cuts) {
    EXPECT_EQ(clean_text("  a\r\n\tb\x1b[31m \xc2\x85 c ", 100), "a b [31m c");
    EXPECT_EQ(clean_text("caf\xc3", 100), "caf?");
    EXPECT_EQ(clean_text("\xed\xa0\x80", 100), "???");
    EXPECT_EQ(clean_text("caf\xc3\xa9 au lait", 8), "caf\xc3\xa9...");
    EXPECT_EQ(clean_text("caf\xc3\xa9 au lait", 7), "caf...");
    EXPECT_EQ(clean_text("abc", 3), "abc");
    EXPECT_EQ(clean_text("abcd", 3), "...");
    EXPECT_EQ(clean_text("abcd", 2), "");
}

TEST(Text, knows_utf8) {
    EXPECT_TRUE(is_utf8("\xf0\x9f\x98\x80"));
    for (const char *bad :
         {"\x80", "\xc0\xaf", "\xe0\x80\xaf", "\xf4\x90\x80\x80", "\xed\xbf\xbf", "\xe2\x82"})
        EXPECT_FALSE(is_utf8(bad)) << bad;
}

TEST(Header, encodes_as_cloudevents_says) {
    EXPECT_EQ(encode_header_value("Euro \xe2\x82\xac \xf0\x9f\x98\x80"), "Euro%20%E2%82%AC%20%F0%9F%98%80");
    EXPECT_EQ(encode_header_value("a\r\nb\"c%\x7f"), "a%0D%0Ab%22c%25%7F");
    EXPECT_EQ(encode_header_value("plain-!~"), "plain-!~");
}

TEST(Header, encoding_can_be_undone_and_is_always_a_value) {
    std::mt19937_64 random(13);
    for (int i = 0; i < 5000; ++i) {
        std::string bytes;
        for (std::size_t n = random() % 40; n > 0; --n)
            bytes.push_back(static_cast<char>(random() % 256));
        const std::string encoded = encode_header_value(bytes);
        ASSERT_TRUE(is_header_value(encoded));
        std::string decoded;
        for (std::size_t at = 0; at < encoded.size(); ++at) {
            if (encoded[at] != '%') {
                decoded.push_back(encoded[at]);
                continue;
            }
            decoded.push_back(static_cast<char>(std::stoi(encoded.substr(at + 1, 2), nullptr, 16)));
            at += 2;
        }
        ASSERT_EQ(decoded, bytes);
    }
}

TEST(Header, judges_names_values_and_traceparents) {
    EXPECT_TRUE(is_header_name("X-Api_Key.1"));
    for (const char *bad : {"", "a b", "a:b", "\xc3\xa9", "a\n"})
        EXPECT_FALSE(is_header_name(bad)) << bad;
    EXPECT_TRUE(is_header_value("Bearer abc\tdef"));
    EXPECT_TRUE(is_header_value(""));
    for (const char *bad : {" a", "a ", "a\r\nb", "a\x01", "\xc3\xa9"})
        EXPECT_FALSE(is_header_value(bad)) << bad;
    EXPECT_TRUE(is_traceparent("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"));
    for (const char *bad : {"", "00-4BF92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
                            "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
                            "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
                            "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
                            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01-x",
                            "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-0g"})
        EXPECT_FALSE(is_traceparent(bad)) << bad;
}

TEST(Uuid, reads_and_writes) {
    const std::string text = "0190a5f2-1c3e-7abc-8def-0123456789ab";
    const auto uuid = parse_uuid(text);
    ASSERT_TRUE(uuid.has_value());
    EXPECT_EQ(uuid->text(), text);
    EXPECT_EQ(parse_uuid("0190A5F2-1C3E-7ABC-8DEF-0123456789AB"), uuid);
    for (const char *bad : {"", "0190a5f2-1c3e-7abc-8def-0123456789a", "0190a5f21c3e-7abc-8def-0123456789ab-",
                            "0190a5f2-1c3e-7abc-8def-0123456789ag"})
        EXPECT_FALSE(parse_uuid(bad).has_value()) << bad;
}

TEST(Uuid, version_7_ascends_with_the_clock) {
    std::mt19937_64 random(17);
    Uuid last{};
    for (std::int64_t us = 1'764'547'200'000'000; us < 1'764'547'200'000'000 + 5000; ++us) {
        const Uuid uuid = uuid_v7(us, random());
        ASSERT_EQ(uuid.bytes[6] >> 4, 7);
        ASSERT_EQ(uuid.bytes[8] >> 6, 2);
        ASSERT_LT(last, uuid);
        last = uuid;
    }
    EXPECT_EQ(uuid_v7(1'764'547'200'123'456, 0).text().substr(0, 13), "019ad735-847b");
}

TEST(Timestamp, formats_and_knows_its_range) {
    EXPECT_EQ(rfc3339(1'796'102'400'123'456), "2026-12-01T05:20:00.123456Z");
    EXPECT_EQ(iso8601(1'796'102'400'123'456), "2026-12-01T05:20:00.123456+00:00");
    EXPECT_EQ(rfc3339(-1), "1969-12-31T23:59:59.999999Z");
    EXPECT_EQ(rfc3339(-62'135'596'800'000'000), "0001-01-01T00:00:00.000000Z");
    EXPECT_EQ(rfc3339(253'402'300'799'999'999), "9999-12-31T23:59:59.999999Z");
    EXPECT_TRUE(fits_rfc3339(253'402'300'799'999'999));
    EXPECT_FALSE(fits_rfc3339(253'402'300'800'000'000));
    EXPECT_FALSE(fits_rfc3339(-62'135'596'800'000'001));
}

TEST(Latency, quantiles_are_near_those_of_the_samples) {
    std::mt19937_64 random(19);
    std::lognormal_distribution<double> shape(8, 1.2);
    std::array<std::uint64_t, kLatencyBuckets> counts{};
    std::vector<std::int64_t> samples;
    for (int i = 0; i < 20'000; ++i) {
        samples.push_back(static_cast<std::int64_t>(shape(random)));
        ++counts[latency_bucket(samples.back())];
    }
    std::sort(samples.begin(), samples.end());
    for (const double quantile : {0.5, 0.95, 0.99}) {
        const auto exact = static_cast<double>(samples[static_cast<std::size_t>(quantile * 20'000)]);
        const auto told = static_cast<double>(latency_quantile_us(counts, quantile));
        EXPECT_LT(told / exact, 1.45);
        EXPECT_GT(told / exact, 0.69);
    }
    EXPECT_EQ(latency_quantile_us({}, 0.5), 0);
    EXPECT_EQ(latency_bucket(0), 0u);
    EXPECT_EQ(latency_bucket(INT64_MAX), kLatencyBuckets - 1);
    for (std::size_t i = 0; i + 1 < kLatencyBuckets; ++i) {
        EXPECT_EQ(latency_bucket(latency_bound_us(i)), i);
        EXPECT_EQ(latency_bucket(latency_bound_us(i) + 1), i + 1);
    }
}
