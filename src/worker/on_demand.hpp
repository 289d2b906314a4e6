#pragma once

#include <cstdint>
#include <optional>

#include "core/pass.hpp"
#include "core/uuid.hpp"
#include "store/route.hpp"

namespace outbox_relay::worker {

/// One pass of `route` now, as its owner, as a savepoint of the transaction that runs (spec.md section 2,
/// outbox_relay_pass). `tenant`: whose, on a route with tenants. `max_rows`: 0 stands for max_claim_rows. No
/// lane is changed, no row remembered; what the lane remembers as published is settled without being sent.
/// Throws what ended the pass; then the savepoint is undone and nothing is in flight.
core::PassResult pass_on_demand(const store::Route &route, const std::optional<core::Uuid> &tenant,
                                std::int64_t max_rows);

} // namespace outbox_relay::worker
