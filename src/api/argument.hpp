#pragma once

#include <optional>

#include "core/uuid.hpp"
#include "pg/postgres.hpp"
#include "store/route.hpp"

namespace outbox_relay::api {

/// The route that argument 0 names. Raises 22004 for NULL, 42704 for an unknown one.
const store::Route &route_argument(FunctionCallInfo fcinfo);

/// Argument `number` as a UUID; nothing for NULL.
std::optional<core::Uuid> uuid_argument(FunctionCallInfo fcinfo, int number);

/// Argument `number` as the tenant of a call on `route`: where it is NULL, the session's tenant_id on a route
/// with tenants (`always`) or with tables by tenant; else nothing, which stands for all.
std::optional<core::Uuid> tenant_argument(FunctionCallInfo fcinfo, int number, const store::Route &route,
                                          bool always = false);

} // namespace outbox_relay::api
