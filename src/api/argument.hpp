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

} // namespace outbox_relay::api
