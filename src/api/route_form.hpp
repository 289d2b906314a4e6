#pragma once

#include <string>

#include "store/route.hpp"
#include "store/route_row.hpp"

namespace outbox_relay::api {

/// Everything about a written row of outbox_route that can be judged without looking at other
/// objects: required columns, words, ranges, url, headers. Raises 22023 with the column, the value
/// and what it must be; 0A000 for what a later version may support.
void check_form(const store::RouteRow &row);

/// Settings of the route that contradict each other (22023). `whole`: as they are in effect, with the
/// configuration parameters filled in, where the route sets one of the two; else only where it sets
/// both, since a restore must not depend on them.
void check_contradictions(const store::Route &route, bool whole);

} // namespace outbox_relay::api
