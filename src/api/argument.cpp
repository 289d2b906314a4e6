#include "api/argument.hpp"

#include <cstring>
#include <string>

#include "pg/error.hpp"
#include "pg/spi.hpp"
#include "settings/settings.hpp"

extern "C" {
#include "utils/uuid.h"
}

namespace outbox_relay::api {

const store::Route &route_argument(FunctionCallInfo fcinfo) {
    if (PG_ARGISNULL(0))
        pg::raise({ERRCODE_NULL_VALUE_NOT_ALLOWED, "the route must not be NULL", "",
                   "Give the name of a route of outbox_route."});
    const std::string name = pg::text_of(PG_GETARG_DATUM(0));
    const std::optional<store::Extension> extension = store::find_extension();
    const store::Route *route = extension.has_value() ? store::find_route(*extension, name) : nullptr;
    if (route == nullptr)
        store::raise_unknown_route(name);
    return *route;
}

std::optional<core::Uuid> uuid_argument(FunctionCallInfo fcinfo, int number) {
    if (PG_ARGISNULL(number))
        return std::nullopt;
    core::Uuid uuid;
    std::memcpy(uuid.bytes.data(), DatumGetUUIDP(PG_GETARG_DATUM(number))->data, UUID_LEN);
    return uuid;
}

std::optional<core::Uuid> tenant_argument(FunctionCallInfo fcinfo, int number, const store::Route &route,
                                          bool always) {
    if (!PG_ARGISNULL(number) || (always ? !route.has_tenants() : route.relation_function.empty()))
        return uuid_argument(fcinfo, number);
    return settings::context_uuid(settings::parameters.tenant_id);
}

} // namespace outbox_relay::api
