#include "pg/watchdog.hpp"

#include <algorithm>
#include <climits>

#include "pg/guard.hpp"

extern "C" {
#include "utils/timeout.h"
}

namespace pg {

void arm_watchdog(std::int64_t ms) {
    const int delay_ms = static_cast<int>(std::clamp<std::int64_t>(ms, 1, INT_MAX));
    guard([delay_ms] { enable_timeout_after(IDLE_IN_TRANSACTION_SESSION_TIMEOUT, delay_ms); });
}

void disarm_watchdog() {
    guard([] { disable_timeout(IDLE_IN_TRANSACTION_SESSION_TIMEOUT, false); });
}

} // namespace pg
