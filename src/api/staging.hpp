#pragma once

#include <string>

#include "store/route.hpp"
#include "store/staging.hpp"

#include "pg/postgres.hpp"

namespace outbox_relay::api {

/// The route that a staging function was given as argument 0. Raises 22004 for NULL, 42704 for an
/// unknown one, and 25P01 where the route requires a transaction and a client calls outside of one.
const store::Route &staging_route(FunctionCallInfo fcinfo);

/// Raises 54000 when a payload (a jsonb datum, not detoasted for this) is larger than the route takes.
/// `element`: what to call it in the message.
void check_payload_size(const store::Route &route, Datum payload, const std::string &element);

/// Fills what the event leaves open from the session's context parameters.
void apply_context(const store::Route &route, store::Event &event, std::array<core::Uuid, 4> &ids);

/// Lets the lane of a staged event wake at commit. The event has a tenant where the route has tenants.
void wake_lane_of(const store::Route &route, const store::Event &event);

/// Raises 22023 when a text is no W3C traceparent.
void check_traceparent(const std::string &value, const std::string &element);

} // namespace outbox_relay::api
