#include "store/staging.hpp"

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <unordered_map>

#include "pg/clock.hpp"
#include "pg/guard.hpp"
#include "store/relation.hpp"
#include "store/tenancy.hpp"

extern "C" {
#include "catalog/pg_type.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"
}

namespace outbox_relay::store {

namespace {

/// A bound column: its name in the table, and how a value of it is passed alone and in an array.
struct Column {
    const char *name;
    Oid type;
    Oid array_type;
    int length; ///< typlen
    bool by_value;
    char align; ///< typalign
};

constexpr Column uuid_column(const char *name) {
    return {name, UUIDOID, UUIDARRAYOID, UUID_LEN, false, TYPALIGN_CHAR};
}
constexpr Column text_column(const char *name) {
    return {name, TEXTOID, TEXTARRAYOID, -1, false, TYPALIGN_INT};
}
constexpr Column time_column(const char *name) {
    return {name, TIMESTAMPTZOID, TIMESTAMPTZARRAYOID, sizeof(TimestampTz), FLOAT8PASSBYVAL, TYPALIGN_DOUBLE};
}

/// In the order of StageColumn.
constexpr std::array<Column, kStageColumns> kColumns = {
    uuid_column("id"),           text_column("outbox_route"),
    time_column("created_at"),   uuid_column("event_id"),
    text_column("event_type"),   Column{"payload", JSONBOID, JSONBARRAYOID, -1, false, TYPALIGN_INT},
    time_column("occurred_at"),  text_column("ordering_key"),
    time_column("available_at"), uuid_column("tenant_id"),
    uuid_column("execution_id"), uuid_column("correlation_id"),
    uuid_column("causation_id"), Column{"hlc", INT8OID, INT8ARRAYOID, 8, FLOAT8PASSBYVAL, TYPALIGN_DOUBLE},
    text_column("traceparent"),
};

/// Columns that every event of a call shares: passed as one value, not as an array.
constexpr bool shared_by_call(std::size_t column) {
    return column == static_cast<std::size_t>(StageColumn::route) ||
           column == static_cast<std::size_t>(StageColumn::created_at);
}

/// True when the route's table is asked for this column.
bool is_bound(const Route &route, std::size_t column) {
    switch (static_cast<StageColumn>(column)) {
    case StageColumn::hlc:
        return route.hlc_ordering;
    case StageColumn::traceparent:
        return route.propagate_trace;
    default:
        return true;
    }
}

/// `count` instants of this backend's clock, the first returned: never earlier than the wall clock,
/// always later than those given before, also when the wall clock is set back.
TimestampTz take_instants(std::size_t count) {
    static TimestampTz last = 0;
    const TimestampTz first = std::max(GetCurrentTimestamp(), last + 1);
    last = first + static_cast<TimestampTz>(count) - 1;
    return first;
}

/// 64 bits of strong randomness, drawn from a buffer: a system call for each id costs more than the
/// rest of staging. Filled at the first use, so never before the fork of a backend.
std::uint64_t random_bits() {
    static std::array<std::uint64_t, 512> buffer;
    static std::size_t used = buffer.size();
    if (used == buffer.size()) {
        if (!pg_strong_random(buffer.data(), sizeof(buffer)))
            pg::raise({ERRCODE_INTERNAL_ERROR, "could not generate random values for a UUID"});
        used = 0;
    }
    return buffer[used++];
}

core::Uuid new_uuid(TimestampTz at) {
    return core::uuid_v7(pg::unix_us_of(at), random_bits());
}

pg::Value borrowed(const core::Uuid &uuid) {
    return pg::Value(PointerGetDatum(uuid.bytes.data()));
}

/// Sets what staging itself decides. `ids` has the two places that new ids need.
void complete(Event &event, TimestampTz created_at, TimestampTz instant, std::span<core::Uuid, 2> ids) {
    ids[0] = new_uuid(instant);
    event[StageColumn::id] = borrowed(ids[0]);
    event[StageColumn::created_at] = pg::Value(TimestampTzGetDatum(created_at));
    if (event[StageColumn::event_id].null) {
        ids[1] = new_uuid(instant);
        event[StageColumn::event_id] = borrowed(ids[1]);
    }
    if (event[StageColumn::occurred_at].null)
        event[StageColumn::occurred_at] = event[StageColumn::created_at];
}

// ---------------------------------------------------------------------------------------------
// Statements
// ---------------------------------------------------------------------------------------------

enum class Shape : std::size_t { one, many };

/// "id, outbox_route, …" and what is inserted into them: parameters, or for many the columns of e.
struct Lists {
    std::string names;
    std::string values;
    std::string arrays;        ///< "$1, $4, …"
    std::string array_columns; ///< "id, event_id, …"
};

void append(std::string &list, const std::string &item) {
    if (!list.empty())
        list += ", ";
    list += item;
}

Lists lists_of(const Route &route, Shape shape) {
    Lists lists;
    int parameters = 0;
    for (std::size_t i = 0; i < kStageColumns; ++i) {
        if (!is_bound(route, i))
            continue;
        const std::string name = kColumns[i].name;
        const std::string parameter = "$" + std::to_string(++parameters);
        const bool in_array = shape == Shape::many && !shared_by_call(i);
        append(lists.names, name);
        append(lists.values, in_array ? "e." + name : parameter);
        if (in_array) {
            append(lists.arrays, parameter);
            append(lists.array_columns, name);
        }
    }
    return lists;
}

/// The relation of a route as SQL, quoted anew whatever the route's text looks like.
std::string quoted_relation(const std::string &relation) {
    const auto [schema, table] = split_name(relation);
    return pg::guard([&] { return quote_qualified_identifier(schema.c_str(), table.c_str()); });
}

/// ON CONFLICT has no target: whatever unique key the table has is the one that counts
/// (mechanisms.md section 7). No operator and no unqualified function: the caller's search_path
/// has no say. (unnest of several arguments is the server's own, by its grammar.)
std::string statement(const Route &route, const std::string &relation, Shape shape) {
    const Lists lists = lists_of(route, shape);
    const std::string into =
        "INSERT INTO " + quoted_relation(relation) + " (" + lists.names + ", status, attempts)";
    const std::string conflict = " ON CONFLICT DO NOTHING";
    if (shape == Shape::one)
        return into + " VALUES (" + lists.values + ", 'pending', 0)" + conflict;
    return into + " SELECT " + lists.values + ", 'pending', 0 FROM unnest(" + lists.arrays + ") AS e(" +
           lists.array_columns + ")" + conflict;
}

/// Plans of a session for each form of the statement: tenants may have tables of their own.
constexpr std::size_t kMostPlans = 256;

/// Calls of staging that are under way: a trigger of the table may stage elsewhere while one runs.
int staging_depth = 0;
struct Staging {
    Staging() { ++staging_depth; }
    ~Staging() { --staging_depth; }
    Staging(const Staging &) = delete;
    Staging &operator=(const Staging &) = delete;
};

/// The kept plan of a relation and column set. Needs spi_connect(). Plans are freed only where none of them
/// runs.
const pg::Plan &plan_for(const Route &route, const std::string &relation, Shape shape) {
    using Plans = std::unordered_map<std::string, pg::Plan>;
    static auto *const kept = new std::array<std::array<std::array<Plans, 2>, 2>, 2>;
    Plans &plans = (*kept)[static_cast<std::size_t>(shape)][route.hlc_ordering][route.propagate_trace];
    if (plans.size() >= kMostPlans && staging_depth == 1 && !plans.contains(relation))
        plans.clear();
    pg::Plan &plan = plans[relation];
    if (plan.prepared())
        return plan;

    std::vector<Oid> types;
    for (std::size_t i = 0; i < kStageColumns; ++i)
        if (is_bound(route, i))
            types.push_back(shape == Shape::many && !shared_by_call(i) ? kColumns[i].array_type
                                                                       : kColumns[i].type);
    plan.prepare(statement(route, relation, shape), types, true);
    return plan;
}

/// Values of one column as an array, in the current memory context.
pg::Value array_of(const std::vector<Event> &events, std::size_t column) {
    const int count = static_cast<int>(events.size());
    return pg::Value(pg::guard([&] {
        auto *datums = static_cast<Datum *>(palloc(events.size() * sizeof(Datum)));
        auto *nulls = static_cast<bool *>(palloc(events.size() * sizeof(bool)));
        for (std::size_t i = 0; i < events.size(); ++i) {
            datums[i] = events[i].values()[column].datum;
            nulls[i] = events[i].values()[column].null;
        }
        int dimensions[] = {count};
        int lower_bounds[] = {1};
        const Column &like = kColumns[column];
        ArrayType *array = construct_md_array(datums, nulls, 1, dimensions, lower_bounds, like.type,
                                              like.length, like.by_value, like.align);
        pfree(datums);
        pfree(nulls);
        return PointerGetDatum(array);
    }));
}

std::optional<core::Uuid> tenant_of(const Event &event) {
    const pg::Value &value = event[StageColumn::tenant_id];
    if (value.null)
        return std::nullopt;
    core::Uuid tenant;
    std::memcpy(tenant.bytes.data(), DatumGetPointer(value.datum), UUID_LEN);
    return tenant;
}

/// One INSERT of events that are complete, into one table; how many rows were new.
std::uint64_t insert_many(const Route &route, const std::string &relation, const std::vector<Event> &events) {
    pg::spi_connect();
    std::vector<pg::Value> values;
    for (std::size_t i = 0; i < kStageColumns; ++i)
        if (is_bound(route, i))
            values.push_back(shared_by_call(i) ? events.front().values()[i] : array_of(events, i));
    values[static_cast<std::size_t>(StageColumn::route)] = pg::Value(pg::text_datum(route.name));
    const Staging staging;
    const pg::Result result = pg::execute(plan_for(route, relation, Shape::many), values, false);
    pg::spi_finish();
    return result.processed;
}

} // namespace

std::optional<core::Uuid> stage(const Route &route, Event event) {
    const std::optional<core::Uuid> tenant = tenant_of(event);
    require_tenant(route, tenant);
    const std::string relation = tables_of(route, tenant).relation;
    std::array<core::Uuid, 2> ids;
    const TimestampTz now = take_instants(1);
    complete(event, now, now, ids);

    pg::spi_connect();
    event[StageColumn::route] = pg::Value(pg::text_datum(route.name));
    std::array<pg::Value, kStageColumns> values;
    std::size_t bound = 0;
    for (std::size_t i = 0; i < kStageColumns; ++i)
        if (is_bound(route, i))
            values[bound++] = event.values()[i];
    const Staging staging;
    const pg::Result result =
        pg::execute(plan_for(route, relation, Shape::one), std::span(values).first(bound), false);
    pg::spi_finish();
    if (result.processed == 0)
        return std::nullopt;

    core::Uuid event_id;
    std::memcpy(event_id.bytes.data(), DatumGetPointer(event[StageColumn::event_id].datum), UUID_LEN);
    return event_id;
}

std::uint64_t stage_many(const Route &route, std::vector<Event> events) {
    if (events.empty())
        return 0;
    for (const Event &event : events)
        require_tenant(route, tenant_of(event));
    std::vector<core::Uuid> ids(2 * events.size());
    const TimestampTz now = take_instants(events.size());
    for (std::size_t i = 0; i < events.size(); ++i)
        complete(events[i], now, now + static_cast<TimestampTz>(i), std::span<core::Uuid, 2>(&ids[2 * i], 2));

    if (route.relation_function.empty())
        return insert_many(route, route.relation, events);
    std::vector<std::pair<core::Uuid, std::vector<Event>>> by_tenant;
    for (const Event &event : events) {
        const core::Uuid tenant = tenant_of(event).value();
        auto group = std::find_if(by_tenant.begin(), by_tenant.end(),
                                  [&tenant](const auto &known) { return known.first == tenant; });
        if (group == by_tenant.end())
            group = by_tenant.insert(group, {tenant, {}});
        group->second.push_back(event);
    }
    std::uint64_t staged = 0;
    for (const auto &[tenant, group] : by_tenant)
        staged += insert_many(route, tables_of(route, tenant).relation, group);
    return staged;
}

} // namespace outbox_relay::store
