#include "core/outcome.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <cstring>
#include <ctime>

#include "core/text.hpp"

#include "core/no_postgres.hpp"

namespace outbox_relay::core {

namespace {

constexpr std::size_t kMaxError_bytes = 500;
constexpr std::int64_t kSecond_us = 1'000'000;
constexpr std::int64_t kTenYears_us = 3650LL * 24 * 3600 * kSecond_us;

/// The name of a failure in last_error and in the log.
const char *class_of(Failure failure) {
    switch (failure) {
    case Failure::none:
        break;
    case Failure::resolve:
        return "resolve";
    case Failure::connect:
        return "connect";
    case Failure::tls:
        return "tls";
    case Failure::blocked:
        return "blocked";
    case Failure::timeout:
        return "timeout";
    case Failure::reset:
        return "connection lost";
    case Failure::response:
        return "malformed response";
    case Failure::cancelled:
        return "cancelled";
    }
    return "no answer";
}

Outcome outcome_of(Verdict verdict, std::string error_class, std::string_view more) {
    Outcome outcome;
    outcome.verdict = verdict;
    std::string text = error_class;
    if (!more.empty())
        text.append(": ").append(more);
    outcome.error = clean_text(text, kMaxError_bytes);
    outcome.error_class = std::move(error_class);
    return outcome;
}

/// The outcome of an answer whose final header block arrived whole.
Outcome judge_status(const Reply &reply, const OutcomePolicy &policy) {
    if (reply.status >= 200 && reply.status < 300) {
        if (reply.uploaded)
            return Outcome{Verdict::published, {}, {}, 0};
        return outcome_of(Verdict::retried,
                          "HTTP " + std::to_string(reply.status) + " before the body was sent", {});
    }
    const std::string error_class = "HTTP " + std::to_string(reply.status);
    if (std::find(policy.fail_statuses.begin(), policy.fail_statuses.end(), reply.status) !=
        policy.fail_statuses.end())
        return outcome_of(Verdict::failed, error_class, reply.excerpt);

    const std::optional<std::int64_t> asked_us = parse_retry_after(reply.retry_after, policy.wall_us);
    const bool holds = reply.status == 429 || reply.status == 410 || (reply.status == 503 && asked_us);
    Outcome outcome = outcome_of(holds ? Verdict::held : Verdict::retried, error_class, reply.excerpt);
    if (holds)
        outcome.hold_us =
            reply.status == 410 ? policy.max_hold_us : std::min(asked_us.value_or(0), policy.max_hold_us);
    return outcome;
}

/// Digits, with an optional fraction that is rounded up.
std::optional<std::int64_t> parse_seconds(std::string_view value) {
    std::int64_t seconds = 0;
    const char *end = value.data() + value.size();
    const auto [rest, error] = std::from_chars(value.data(), end, seconds);
    if (value.empty() || value.front() < '0' || value.front() > '9')
        return std::nullopt;
    if (error == std::errc::result_out_of_range)
        return std::all_of(rest, end, [](char c) { return c >= '0' && c <= '9'; })
                   ? std::optional(kTenYears_us)
                   : std::nullopt;
    std::int64_t fraction_us = 0;
    if (rest != end) {
        if (*rest != '.' || rest + 1 == end)
            return std::nullopt;
        std::int64_t unit_us = kSecond_us / 10;
        for (const char *at = rest + 1; at != end; ++at, unit_us /= 10) {
            if (*at < '0' || *at > '9')
                return std::nullopt;
            fraction_us += (*at - '0') * unit_us;
        }
    }
    if (seconds >= kTenYears_us / kSecond_us)
        return kTenYears_us;
    return seconds * kSecond_us + fraction_us;
}

std::optional<int> month_of(const char *name) {
    static constexpr std::array<const char *, 12> kMonths = {"Jan", "Feb", "Mar", "Apr", "May", "Jun",
                                                             "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"};
    for (std::size_t i = 0; i < kMonths.size(); ++i)
        if (std::strcmp(kMonths[i], name) == 0)
            return static_cast<int>(i);
    return std::nullopt;
}

/// An HTTP date in any of its three forms, as seconds since 1970.
std::optional<std::int64_t> parse_date(const std::string &value, std::int64_t wall_us) {
    std::tm time{};
    char month[4] = "";
    int end = -1;
    const char *text = value.c_str();
    const bool fixed =
        std::sscanf(text, "%*3[A-Za-z], %2d %3[A-Za-z] %4d %2d:%2d:%2d GMT%n", &time.tm_mday, month,
                    &time.tm_year, &time.tm_hour, &time.tm_min, &time.tm_sec, &end) == 6;
    if (!fixed || end != static_cast<int>(value.size())) {
        end = -1;
        if (std::sscanf(text, "%*[A-Za-z], %2d-%3[A-Za-z]-%2d %2d:%2d:%2d GMT%n", &time.tm_mday, month,
                        &time.tm_year, &time.tm_hour, &time.tm_min, &time.tm_sec, &end) == 6) {
            // A two-digit year is the one within fifty years of now (RFC 9110, section 5.6.7).
            const int now_year = static_cast<int>(1970 + wall_us / kSecond_us / 31'556'952);
            time.tm_year += now_year - now_year % 100;
            if (time.tm_year > now_year + 50)
                time.tm_year -= 100;
        } else if (end = -1,
                   std::sscanf(text, "%*3[A-Za-z] %3[A-Za-z] %2d %2d:%2d:%2d %4d%n", month, &time.tm_mday,
                               &time.tm_hour, &time.tm_min, &time.tm_sec, &time.tm_year, &end) != 6) {
            return std::nullopt;
        }
    }
    const std::optional<int> number = month_of(month);
    if (end != static_cast<int>(value.size()) || !number || time.tm_mday < 1 || time.tm_mday > 31 ||
        time.tm_hour > 23 || time.tm_min > 59 || time.tm_sec > 60 || time.tm_hour < 0 || time.tm_min < 0 ||
        time.tm_sec < 0)
        return std::nullopt;
    time.tm_mon = *number;
    time.tm_year -= 1900;
    return static_cast<std::int64_t>(timegm(&time));
}

} // namespace

std::optional<std::int64_t> parse_retry_after(std::string_view value, std::int64_t wall_us) {
    while (!value.empty() && (value.front() == ' ' || value.front() == '\t'))
        value.remove_prefix(1);
    while (!value.empty() && (value.back() == ' ' || value.back() == '\t'))
        value.remove_suffix(1);
    if (value.empty() || value.size() > 64)
        return std::nullopt;
    if (const std::optional<std::int64_t> seconds_us = parse_seconds(value))
        return seconds_us;
    const std::optional<std::int64_t> date = parse_date(std::string(value), wall_us);
    if (!date)
        return std::nullopt;
    const std::int64_t until_us =
        std::clamp<std::int64_t>(*date - wall_us / kSecond_us, 0, kTenYears_us / kSecond_us) * kSecond_us;
    return until_us;
}

Outcome judge(const Reply &reply, const OutcomePolicy &policy) {
    if (reply.header_complete)
        return judge_status(reply, policy);
    if (reply.failure == Failure::cancelled)
        return outcome_of(Verdict::cancelled, class_of(reply.failure), {});
    if (reply.nothing_sent && reply.failure != Failure::none)
        return outcome_of(Verdict::refused, class_of(reply.failure), reply.detail);
    return outcome_of(Verdict::retried, class_of(reply.failure), reply.detail);
}

} // namespace outbox_relay::core
