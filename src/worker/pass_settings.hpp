#pragma once

#include <string>

#include "core/clock.hpp"
#include "core/pass.hpp"
#include "store/route.hpp"

namespace outbox_relay::worker {

/// What a pass of `route` goes by as far as the route and the configuration say; what its lane knows
/// (breaker, slow start, latencies) is left at "nothing". `database` is the current one's name.
core::PassSettings pass_settings(const store::Route &route, const store::Effective &settings,
                                 const std::string &database);

/// The name of the current database. Needs a transaction.
std::string database_name();

/// The two times of the server.
class ServerClock : public core::Clock {
  public:
    std::int64_t monotonic_us() override;
    std::int64_t wall_us() override;
};

} // namespace outbox_relay::worker
