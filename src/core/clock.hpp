#pragma once

#include <cstdint>

namespace outbox_relay::core {

/// The two times a pass needs, in microseconds.
class Clock {
  public:
    virtual ~Clock() = default;
    virtual std::int64_t monotonic_us() = 0; ///< never goes back; for deadlines
    virtual std::int64_t wall_us() = 0;      ///< since 1970; for what is written to rows
};

} // namespace outbox_relay::core
