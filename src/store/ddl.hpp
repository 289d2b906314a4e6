#pragma once

#include <string>
#include <vector>

namespace outbox_relay::store {

/// The statements, without semicolons, that create the outbox table `relation` and its indexes as
/// seed-outbox-schema.md has them; with `hlc` the column and index of causal order, with `trace` the
/// traceparent column. Raises 22023 for a malformed name.
std::vector<std::string> outbox_ddl(const std::string &relation, bool hlc, bool trace);

/// The same for a delivery log: the table, partitioned by day, its index and the default partition.
std::vector<std::string> delivery_log_ddl(const std::string &relation);

} // namespace outbox_relay::store
