#include "core/hlc.hpp"

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdio>

#include "core/no_postgres.hpp"

namespace outbox_relay::core {

namespace {

constexpr std::size_t kMsDigits = 15;
constexpr std::size_t kLogicalDigits = 5;
static_assert(hlc::kTextSize == kMsDigits + 1 + kLogicalDigits);
static_assert(std::atomic_ref<std::int64_t>::is_always_lock_free, "processes share the word");

/// The value of a field of nothing but digits.
std::optional<std::int64_t> digits(std::string_view field) {
    std::int64_t value = 0;
    for (const char c : field) {
        if (c < '0' || c > '9')
            return std::nullopt;
        value = value * 10 + (c - '0');
    }
    return value;
}

std::int64_t packed_wall(std::int64_t wall_ms) {
    return std::clamp<std::int64_t>(wall_ms, 0, hlc::kMaxMs) << hlc::kLogicalBits;
}

} // namespace

namespace hlc {

std::optional<std::int64_t> pack(std::int64_t ms, std::int64_t logical) {
    if (ms < 0 || ms > kMaxMs || logical < 0 || logical > kMaxLogical)
        return std::nullopt;
    return (ms << kLogicalBits) | logical;
}

std::string text(std::int64_t stamp) {
    std::array<char, 32> buffer{};
    const int size =
        std::snprintf(buffer.data(), buffer.size(), "%015lld.%05lld",
                      static_cast<long long>(physical_ms(stamp)), static_cast<long long>(logical(stamp)));
    return std::string(buffer.data(), static_cast<std::size_t>(size));
}

std::optional<std::int64_t> parse(std::string_view text) {
    if (text.size() != kTextSize || text[kMsDigits] != '.')
        return std::nullopt;
    const std::optional<std::int64_t> ms = digits(text.substr(0, kMsDigits));
    const std::optional<std::int64_t> logical = digits(text.substr(kMsDigits + 1));
    if (!ms || !logical)
        return std::nullopt;
    return pack(*ms, *logical);
}

} // namespace hlc

HlcClock::Stamp HlcClock::issue(std::int64_t floor, std::size_t count) {
    const auto more = static_cast<std::int64_t>(count) - 1;
    const std::atomic_ref<std::int64_t> word(last_);
    std::int64_t last = word.load(std::memory_order_relaxed);
    while (true) {
        if (last == INT64_MAX)
            return {0, Problem::exhausted};
        const std::int64_t first = std::max(floor, last + 1);
        if (first > INT64_MAX - more)
            return {0, Problem::exhausted};
        if (word.compare_exchange_weak(last, first + more, std::memory_order_acq_rel,
                                       std::memory_order_relaxed))
            return {first, Problem::none};
    }
}

HlcClock::Stamp HlcClock::now(std::int64_t wall_ms, std::size_t count) {
    return issue(packed_wall(wall_ms), std::max<std::size_t>(count, 1));
}

HlcClock::Stamp HlcClock::update(std::int64_t remote, std::int64_t wall_ms, std::int64_t max_drift_ms) {
    if (remote < 0)
        return {0, Problem::malformed};
    if (hlc::physical_ms(remote) - std::max<std::int64_t>(wall_ms, 0) > max_drift_ms)
        return {0, Problem::drift};
    if (remote == INT64_MAX)
        return {0, Problem::exhausted};
    return issue(std::max(packed_wall(wall_ms), remote + 1), 1);
}

HlcClock::Problem HlcClock::resume(std::int64_t mark) {
    if (mark < 0)
        return Problem::malformed;
    if (mark > INT64_MAX - kHeadroom)
        return Problem::exhausted;
    const std::atomic_ref<std::int64_t> word(last_);
    std::int64_t last = word.load(std::memory_order_relaxed);
    while (last < mark &&
           !word.compare_exchange_weak(last, mark, std::memory_order_acq_rel, std::memory_order_relaxed)) {
    }
    return Problem::none;
}

std::int64_t HlcClock::last() const {
    return std::atomic_ref<std::int64_t>(last_).load(std::memory_order_acquire);
}

} // namespace outbox_relay::core
