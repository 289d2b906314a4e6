#pragma once

#include <cstddef>

#include "core/pass.hpp"

namespace outbox_relay::worker {

/// Fault points for tests: makes the pass wait, fail or die at a named place, as the parameter
/// outbox_relay.fault_point says: `POINT[:COUNT]=ACTION`, POINT one of after_begin, after_claim,
/// after_publish, before_settle, in_settle, before_commit, after_commit; COUNT the number of published
/// rows that it waits for; ACTION wait (until the parameter changes), error, fatal, kill, or cancel
/// (which nothing has looked for yet). An empty body in a release build.
#ifdef OUTBOX_RELAY_FAULT_POINTS
void reach_fault_point(core::PassPoint point, std::size_t count);
#else
inline void reach_fault_point(core::PassPoint, std::size_t) {}
#endif

} // namespace outbox_relay::worker
