#include "core/timestamp.hpp"

#include <array>
#include <cstdio>
#include <ctime>

#include "core/no_postgres.hpp"

namespace outbox_relay::core {

namespace {

constexpr std::int64_t kSecond_us = 1'000'000;
constexpr std::int64_t kYear1_us = -62'135'596'800 * kSecond_us;
constexpr std::int64_t kYear10000_us = 253'402'300'800 * kSecond_us;

std::string format(std::int64_t unix_us, const char *zone) {
    std::int64_t fraction = unix_us % kSecond_us;
    std::int64_t seconds = unix_us / kSecond_us;
    if (fraction < 0) {
        fraction += kSecond_us;
        --seconds;
    }
    const auto time = static_cast<std::time_t>(seconds);
    std::tm utc{};
    (void)gmtime_r(&time, &utc);
    std::array<char, 64> text{};
    const int size = std::snprintf(text.data(), text.size(), "%04d-%02d-%02dT%02d:%02d:%02d.%06d%s",
                                   utc.tm_year + 1900, utc.tm_mon + 1, utc.tm_mday, utc.tm_hour, utc.tm_min,
                                   utc.tm_sec, static_cast<int>(fraction), zone);
    return std::string(text.data(), static_cast<std::size_t>(size));
}

} // namespace

bool fits_rfc3339(std::int64_t unix_us) {
    return unix_us >= kYear1_us && unix_us < kYear10000_us;
}

std::string rfc3339(std::int64_t unix_us) {
    return format(unix_us, "Z");
}

std::string iso8601(std::int64_t unix_us) {
    return format(unix_us, "+00:00");
}

} // namespace outbox_relay::core
