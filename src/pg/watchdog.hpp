#pragma once

#include <cstdint>

namespace pg {

/// Arms the timer that ends this session (FATAL 25P03) unless it is armed anew or disarmed within
/// `ms`. The server's own idle-in-transaction timer: workers never reach the place where the server
/// arms it itself, and code in the database can't trap what it raises. The parameter
/// idle_in_transaction_session_timeout has to be above zero meanwhile.
void arm_watchdog(std::int64_t ms);
void disarm_watchdog();

} // namespace pg
