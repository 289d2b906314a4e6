// First: the server's headers make snprintf a macro.
#include <nlohmann/json.hpp>

#include "store/route_row.hpp"

#include "pg/guard.hpp"
#include "pg/spi.hpp"

extern "C" {
#include "access/htup_details.h"
#include "catalog/pg_type.h"
#include "mb/pg_wchar.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/timestamp.h"
}

namespace outbox_relay::store {

namespace {

constexpr std::int64_t kUsecsPerMs = 1000;
constexpr std::int64_t kMsPerDay = 24LL * 60 * 60 * 1000;

/// Elements of an array datum; freed with the memory context.
struct Elements {
    Datum *datums;
    bool *nulls;
    int count;
};

Elements elements_of(Datum array, Oid type, int length, bool by_value, char align) {
    return pg::guard([&] {
        Elements elements;
        deconstruct_array(DatumGetArrayTypeP(array), type, length, by_value, align, &elements.datums,
                          &elements.nulls, &elements.count);
        return elements;
    });
}

/// Changes with the row's version: an UPDATE, no-op or not, writes another (xmin, ctid).
std::uint64_t version_of(HeapTuple tuple) {
    const std::uint64_t xmin = HeapTupleHeaderGetRawXmin(tuple->t_data);
    const std::uint64_t block = ItemPointerGetBlockNumberNoCheck(&tuple->t_self);
    const std::uint64_t offset = ItemPointerGetOffsetNumberNoCheck(&tuple->t_self);
    return (xmin << 32) ^ (block << 11) ^ offset;
}

} // namespace

RouteRow::RouteRow(HeapTuple tuple, TupleDesc descriptor) : tuple_(tuple), descriptor_(descriptor) {
    values_.resize(static_cast<std::size_t>(descriptor->natts));
    pg::guard([this] {
        for (int i = 0; i < descriptor_->natts; ++i)
            values_[static_cast<std::size_t>(i)].datum =
                heap_getattr(tuple_, i + 1, descriptor_, &values_[static_cast<std::size_t>(i)].null);
    });
}

int RouteRow::number(const char *column) const {
    const int number = SPI_fnumber(descriptor_, column);
    if (number <= 0)
        pg::raise({ERRCODE_UNDEFINED_COLUMN, std::string("outbox_route has no column \"") + column + "\"",
                   "The library and the extension's objects are of different versions.",
                   "Run ALTER EXTENSION outbox_relay UPDATE, or install the library of that version."});
    return number;
}

std::string RouteRow::text(const char *column) const {
    const Cell &value = cell(column);
    return value.null ? std::string() : pg::text_of(value.datum);
}

std::string RouteRow::name(const char *column) const {
    const Cell &value = cell(column);
    return value.null ? std::string() : std::string(NameStr(*DatumGetName(value.datum)));
}

bool RouteRow::boolean(const char *column) const {
    const Cell &value = cell(column);
    return !value.null && DatumGetBool(value.datum);
}

std::optional<std::int64_t> RouteRow::integer(const char *column) const {
    const Cell &value = cell(column);
    if (value.null)
        return std::nullopt;
    return DatumGetInt32(value.datum);
}

std::optional<Interval> RouteRow::interval(const char *column) const {
    const Cell &value = cell(column);
    if (value.null)
        return std::nullopt;
    return *DatumGetIntervalP(value.datum);
}

std::vector<std::optional<std::string>> RouteRow::texts(const char *column) const {
    std::vector<std::optional<std::string>> texts;
    const Cell &value = cell(column);
    if (value.null)
        return texts;
    const Elements elements = elements_of(value.datum, TEXTOID, -1, false, TYPALIGN_INT);
    for (int i = 0; i < elements.count; ++i) {
        if (elements.nulls[i])
            texts.emplace_back();
        else
            texts.emplace_back(pg::text_of(elements.datums[i]));
    }
    return texts;
}

std::vector<std::optional<int>> RouteRow::integers(const char *column) const {
    std::vector<std::optional<int>> integers;
    const Cell &value = cell(column);
    if (value.null)
        return integers;
    const Elements elements = elements_of(value.datum, INT4OID, sizeof(std::int32_t), true, TYPALIGN_INT);
    for (int i = 0; i < elements.count; ++i) {
        if (elements.nulls[i])
            integers.emplace_back();
        else
            integers.emplace_back(DatumGetInt32(elements.datums[i]));
    }
    return integers;
}

std::string RouteRow::json(const char *column) const {
    const Cell &value = cell(column);
    if (value.null)
        return {};
    const char *utf8 = pg::guard([&value]() -> const char * {
        Jsonb *json = DatumGetJsonbP(value.datum);
        char *text = JsonbToCString(nullptr, &json->root, VARSIZE(json));
        return pg_server_to_any(text, static_cast<int>(strlen(text)), PG_UTF8);
    });
    return utf8;
}

std::int64_t interval_ms(const Interval &interval) {
    const std::int64_t days = static_cast<std::int64_t>(interval.month) * 30 + interval.day;
    const std::int64_t whole = interval.time / kUsecsPerMs;
    const std::int64_t part = interval.time % kUsecsPerMs;
    const std::int64_t rest = part > 0 ? 1 : part < 0 ? -1 : 0;
    std::int64_t sum = 0;
    // 17 has infinite intervals, which fill every field.
    if (__builtin_add_overflow(days * kMsPerDay, whole + rest, &sum))
        return days < 0 ? INT64_MIN : INT64_MAX;
    return sum;
}

std::optional<std::vector<std::pair<std::string, std::string>>> parse_headers(const std::string &json) {
    const nlohmann::ordered_json parsed = nlohmann::ordered_json::parse(json, nullptr, false);
    if (!parsed.is_object())
        return std::nullopt;
    std::vector<std::pair<std::string, std::string>> headers;
    for (const auto &[name, value] : parsed.items()) {
        if (!value.is_string())
            return std::nullopt;
        headers.emplace_back(name, value.get<std::string>());
    }
    return headers;
}

Route parse_route(const RouteRow &row) {
    Route route;
    route.name = row.text("name");
    route.relation = row.text("relation");
    route.url = row.text("url");
    route.target_function = row.text("target_function");
    route.method = row.text("method");
    route.enabled = row.boolean("enabled");
    route.storage = row.text("storage");
    route.delivery_log = row.text("delivery_log");
    route.tenants_function = row.text("tenants_function");
    route.relation_function = row.text("relation_function");
    route.delivery_log_function = row.text("delivery_log_function");
    route.isolates_tenants = row.text("tenant_isolation") == "namespace";
    route.hlc_ordering = row.boolean("hlc_ordering");
    route.drain_on_shutdown = row.boolean("drain_on_shutdown");
    route.propagate_trace = row.boolean("propagate_trace");
    route.require_transaction = row.boolean("require_transaction");
    route.ordering = row.text("ordering") == "none" ? Ordering::none : Ordering::key;
    route.cloudevents = false;
    route.forze = false;
    for (const std::optional<std::string> &family : row.texts("envelope")) {
        route.cloudevents = route.cloudevents || family == "cloudevents";
        route.forze = route.forze || family == "forze";
    }
    route.source = row.text("source");
    route.headers = parse_headers(row.json("headers")).value_or(decltype(route.headers)());
    for (const std::optional<int> &status : row.integers("fail_statuses"))
        if (status.has_value())
            route.fail_statuses.push_back(*status);
    route.max_payload_bytes = row.integer("max_payload_bytes").value_or(route.max_payload_bytes);
    route.ca_file = row.text("ca_file");
    route.owner = row.name("owner");
    route.bound_to = row.text("bound_to");
    for (const TuningColumn &column : tuning_columns()) {
        if (!column.is_time)
            route.*column.column = row.integer(column.name);
        else if (const std::optional<Interval> interval = row.interval(column.name))
            route.*column.column = interval_ms(*interval);
    }
    route.version = version_of(row.tuple());
    return route;
}

} // namespace outbox_relay::store
