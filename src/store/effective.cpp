#include "store/effective.hpp"

#include "pg/guard.hpp"
#include "pg/spi.hpp"

extern "C" {
#include "commands/dbcommands.h"
}

namespace outbox_relay::store {

namespace {

/// A column whose default is part of the table: the route's, when it says something else.
Setting fixed(const char *name, std::string value, const std::string &standard) {
    const char *source = value == standard ? "default" : "route";
    return {name, std::move(value), source};
}

/// A column without a default.
Setting optional(const char *name, const std::string &value) {
    return {name, value, value.empty() ? "default" : "route"};
}

const char *word(bool value) {
    return value ? "true" : "false";
}

std::string families(const Route &route) {
    std::string list = route.cloudevents ? "cloudevents" : "";
    if (route.forze)
        list += list.empty() ? "forze" : ",forze";
    return "{" + list + "}";
}

std::string statuses(const Route &route) {
    std::string list;
    for (const int status : route.fail_statuses)
        list += (list.empty() ? "" : ",") + std::to_string(status);
    return "{" + list + "}";
}

std::string header_names(const Route &route) {
    std::string list;
    for (const auto &[name, value] : route.headers)
        list += (list.empty() ? "" : ",") + name;
    return "{" + list + "}";
}

} // namespace

std::string duration_text(std::int64_t ms) {
    struct Unit {
        std::int64_t ms;
        const char *name;
    };
    static constexpr Unit kUnits[] = {{86400000, "d"}, {3600000, "h"}, {60000, "min"}, {1000, "s"}};
    if (ms == 0)
        return "0";
    for (const Unit &unit : kUnits)
        if (ms % unit.ms == 0)
            return std::to_string(ms / unit.ms) + unit.name;
    return std::to_string(ms) + "ms";
}

std::string source_of(const Route &route) {
    if (!route.source.empty())
        return route.source;
    const char *database = pg::guard([] { return get_database_name(MyDatabaseId); });
    return std::string("/") + (database == nullptr ? "" : database) + "/" + route.name;
}

std::set<std::string> changed_parameters() {
    std::set<std::string> names;
    pg::spi_connect();
    const pg::Result result = pg::execute_text(
        "SELECT pg_catalog.split_part(name, '.', 2) FROM pg_catalog.pg_settings"
        " WHERE pg_catalog.starts_with(name, 'outbox_relay.') AND setting IS DISTINCT FROM boot_val",
        true);
    for (std::uint64_t row = 0; row < result.processed; ++row)
        names.insert(pg::text_of(result.value(row, 1).datum));
    pg::spi_finish();
    return names;
}

std::vector<Setting> effective_settings(const Route &route, const std::set<std::string> &changed) {
    const Route standard{};
    std::vector<Setting> settings{
        optional("relation", route.relation),
        optional("url", route.url),
        optional("target_function", route.target_function),
        fixed("method", route.method, "POST"),
        fixed("enabled", word(route.enabled), word(standard.enabled)),
        fixed("storage", route.storage, "consume"),
        optional("delivery_log", route.delivery_log),
        optional("tenants_function", route.tenants_function),
        optional("relation_function", route.relation_function),
        optional("delivery_log_function", route.delivery_log_function),
        fixed("tenant_isolation", route.isolates_tenants ? "namespace" : "none", "none"),
        fixed("hlc_ordering", word(route.hlc_ordering), word(standard.hlc_ordering)),
        fixed("propagate_trace", word(route.propagate_trace), word(standard.propagate_trace)),
        fixed("require_transaction", word(route.require_transaction), word(standard.require_transaction)),
        fixed("ordering", route.ordering == Ordering::none ? "none" : "key", "key"),
        fixed("envelope", families(route), families(standard)),
        {"source", source_of(route), route.source.empty() ? "default" : "route"},
        fixed("headers", header_names(route), "{}"),
        fixed("fail_statuses", statuses(route), "{}"),
        fixed("max_payload_bytes", std::to_string(route.max_payload_bytes),
              std::to_string(standard.max_payload_bytes)),
        optional("ca_file", route.ca_file),
        {"owner", route.owner, "route"},
        {"bound_to", route.bound_to, "route"},
        fixed("drain_on_shutdown", word(route.drain_on_shutdown), word(standard.drain_on_shutdown)),
    };
    const Effective values = effective(route);
    for (const TuningColumn &column : tuning_columns()) {
        const std::int64_t value = values.*column.effective;
        const char *inherited = changed.contains(column.name) ? "guc" : "default";
        settings.push_back({column.name, column.is_time ? duration_text(value) : std::to_string(value),
                            (route.*column.column).has_value() ? "route" : inherited});
    }
    return settings;
}

} // namespace outbox_relay::store
