#pragma once

#include <set>
#include <string>
#include <vector>

#include "store/route.hpp"

namespace outbox_relay::store {

/// A column of a route as it holds now, as text, and why: route, guc or default.
struct Setting {
    std::string setting;
    std::string value;
    std::string source;
};

/// Names, without the prefix, of our configuration parameters that differ from their built-in value.
/// Needs a transaction and an active snapshot.
std::set<std::string> changed_parameters();

/// Every setting of the route, in the order of outbox_route. Of headers the names only: their values
/// may hold tokens. `changed`: what changed_parameters() gave.
std::vector<Setting> effective_settings(const Route &route, const std::set<std::string> &changed);

/// A duration as configuration parameters are written: 0, 250ms, 5s, 5min, 2h, 1d.
std::string duration_text(std::int64_t ms);

/// The CloudEvents source of the route: its own, or /database/route.
std::string source_of(const Route &route);

} // namespace outbox_relay::store
