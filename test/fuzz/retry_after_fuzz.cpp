/// Whatever an endpoint says of when to come back: never negative, never beyond ten years, never a crash.

#include "core/outcome.hpp"
#include "property.hpp"

#include <cstdint>
#include <cstring>

using namespace outbox_relay::core;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    constexpr std::int64_t kTenYears_us = 3650LL * 24 * 3600 * 1'000'000;
    const std::string_view value(reinterpret_cast<const char *>(data), size);
    for (const std::int64_t now_us : {std::int64_t{0}, std::int64_t{1'796'102'400'000'000}}) {
        const auto wait_us = parse_retry_after(value, now_us);
        EXPECT_PROPERTY(!wait_us || (*wait_us >= 0 && *wait_us <= kTenYears_us));
    }
    Reply reply;
    reply.header_complete = true;
    reply.status = 503;
    reply.retry_after = value;
    reply.excerpt = value;
    OutcomePolicy policy;
    policy.max_hold_us = 1000;
    const Outcome outcome = judge(reply, policy);
    EXPECT_PROPERTY(outcome.hold_us >= 0 && outcome.hold_us <= 1000);
    EXPECT_PROPERTY(outcome.error.size() <= 500);
    return 0;
}
