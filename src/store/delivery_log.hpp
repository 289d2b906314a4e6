#pragma once

#include <vector>

#include "store/preflight.hpp"
#include "store/relation.hpp"

namespace outbox_relay::store {

/// What is wrong with a table as a delivery log (the seed, "Delivery log"): its kind, a column, for passes
/// of `role` the owner of it or of one of its partitions, a right, and, when it is partitioned by
/// published_at, that no partition takes the rows of one of the times `from` and `to`.
std::vector<Finding> log_findings(const Relation &log, Oid role, std::int64_t from, std::int64_t to);

/// Kind and columns alone.
std::vector<Finding> log_form_findings(const Relation &log);

} // namespace outbox_relay::store
