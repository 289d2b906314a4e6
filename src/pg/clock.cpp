#include "pg/clock.hpp"

#include <ctime>

namespace pg {

std::int64_t monotonic_us() {
    timespec now;
    (void)clock_gettime(CLOCK_MONOTONIC, &now);
    return static_cast<std::int64_t>(now.tv_sec) * 1000000 + now.tv_nsec / 1000;
}

} // namespace pg
