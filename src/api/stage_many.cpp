#include <array>
#include <cstring>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "api/staging.hpp"
#include "core/text.hpp"
#include "store/encoding.hpp"
#include "worker/hlc.hpp"
#include "worker/wake.hpp"

#include "pg/entry.hpp"
#include "pg/guard.hpp"
#include "pg/spi.hpp"

extern "C" {
#include "utils/builtins.h"
#include "utils/fmgrprotos.h"
#include "utils/jsonb.h"
#include "utils/uuid.h"

PGDLLEXPORT Datum outbox_relay_stage_many(PG_FUNCTION_ARGS);
PG_FUNCTION_INFO_V1(outbox_relay_stage_many);
}

namespace outbox_relay::api {

namespace {

using Column = store::StageColumn;

enum class Kind { text, uuid, time, json };

/// A key of an element: the argument of outbox_stage of the same name.
struct Key {
    std::string_view name;
    Column column;
    Kind kind;
};

constexpr std::array<Key, 11> kKeys = {{{"event_type", Column::event_type, Kind::text},
                                        {"payload", Column::payload, Kind::json},
                                        {"event_id", Column::event_id, Kind::uuid},
                                        {"ordering_key", Column::ordering_key, Kind::text},
                                        {"occurred_at", Column::occurred_at, Kind::time},
                                        {"tenant_id", Column::tenant_id, Kind::uuid},
                                        {"execution_id", Column::execution_id, Kind::uuid},
                                        {"correlation_id", Column::correlation_id, Kind::uuid},
                                        {"causation_id", Column::causation_id, Kind::uuid},
                                        {"traceparent", Column::traceparent, Kind::text},
                                        {"available_at", Column::available_at, Kind::time}}};

/// A caller's text as an error may quote it: of one line and not long.
std::string quotable(const std::string &text) {
    constexpr std::size_t kMax_bytes = 200;
    return store::from_utf8(core::clean_text(store::to_utf8(text).value_or("?"), kMax_bytes));
}

std::string known_keys() {
    std::string names;
    for (const Key &key : kKeys)
        names += (names.empty() ? "" : ", ") + std::string(key.name);
    return names;
}

/// One key and value of an element, pointing into the argument.
struct Pair {
    const char *key = nullptr;
    int key_size = 0;
    JsonbValue value{};
    bool found = false;
};

/// Reads the array's elements one key at a time; nothing of it is copied but texts that Postgres has
/// to parse.
class Reader {
  public:
    Reader(const store::Route &route, Jsonb *events) : route_(route), events_(events) {}

    std::vector<store::Event> read() {
        const int count = static_cast<int>(JB_ROOT_COUNT(events_));
        std::vector<store::Event> events(static_cast<std::size_t>(count));
        context_ids_.resize(events.size());
        for (int i = 0; i < count; ++i) {
            element_ = "element " + std::to_string(i + 1) + " of events: ";
            read_element(i, events[static_cast<std::size_t>(i)]);
            apply_context(route_, events[static_cast<std::size_t>(i)],
                          context_ids_[static_cast<std::size_t>(i)]);
        }
        return events;
    }

  private:
    [[noreturn]] void refuse(const std::string &problem, const std::string &hint) const {
        pg::raise({ERRCODE_INVALID_PARAMETER_VALUE, element_ + problem, "Nothing was staged.", hint});
    }

    void read_element(int index, store::Event &event) {
        JsonbContainer *events = &events_->root;
        const JsonbValue *element = pg::guard(
            [events, index] { return getIthJsonbValueFromContainer(events, static_cast<uint32>(index)); });
        if (element == nullptr || element->type != jbvBinary ||
            !JsonContainerIsObject(element->val.binary.data))
            refuse("not an object", "Give each event as an object with event_type and payload.");
        JsonbIterator *iterator =
            pg::guard([element] { return JsonbIteratorInit(element->val.binary.data); });
        while (true) {
            const Pair pair = next(&iterator);
            if (!pair.found)
                break;
            take(pair, event);
        }
        if (event[Column::event_type].null)
            refuse("event_type is missing", "Name what happened, for example \"order.created\".");
        if (event[Column::payload].null)
            refuse("payload is missing", "An event without data can have the payload {}.");
        check_payload_size(route_, event[Column::payload].datum, element_);
    }

    static Pair next(JsonbIterator **iterator) {
        return pg::guard([iterator] {
            Pair pair;
            JsonbValue key;
            JsonbIteratorToken token = JsonbIteratorNext(iterator, &key, true);
            if (token == WJB_BEGIN_OBJECT)
                token = JsonbIteratorNext(iterator, &key, true);
            if (token != WJB_KEY)
                return pair;
            (void)JsonbIteratorNext(iterator, &pair.value, true);
            pair.key = key.val.string.val;
            pair.key_size = key.val.string.len;
            pair.found = true;
            return pair;
        });
    }

    void take(const Pair &pair, store::Event &event) {
        const std::string_view name(pair.key, static_cast<std::size_t>(pair.key_size));
        for (const Key &key : kKeys) {
            if (key.name != name)
                continue;
            if (pair.value.type != jbvNull)
                event[key.column] = value_of(key, pair.value);
            return;
        }
        refuse("unknown key \"" + quotable(std::string(name)) + "\"", "Known keys are " + known_keys() + ".");
    }

    pg::Value value_of(const Key &key, const JsonbValue &value) {
        if (key.kind == Kind::json)
            return pg::guard([&value] {
                return pg::Value(JsonbPGetDatum(JsonbValueToJsonb(const_cast<JsonbValue *>(&value))));
            });
        if (value.type != jbvString)
            refuse(std::string(key.name) + " must be a string", "");
        const std::string text(value.val.string.val, static_cast<std::size_t>(value.val.string.len));
        if (key.kind == Kind::text) {
            if (key.column == Column::event_type && text.empty())
                refuse("event_type must not be empty", "Name what happened, for example \"order.created\".");
            if (key.column == Column::traceparent)
                check_traceparent(text, element_);
            return pg::Value(pg::text_datum(text));
        }
        return parsed(key, text);
    }

    pg::Value parsed(const Key &key, const std::string &text) {
        if (key.kind == Kind::uuid && !core::parse_uuid(text))
            refuse(std::string(key.name) + " is not a UUID: \"" + quotable(text) + "\"",
                   "Write it in the hyphenated form.");
        try {
            return pg::guard([&key, &text] {
                Datum input = CStringGetDatum(text.c_str());
                return pg::Value(key.kind == Kind::uuid
                                     ? DirectFunctionCall1(uuid_in, input)
                                     : DirectFunctionCall3(timestamptz_in, input,
                                                           ObjectIdGetDatum(InvalidOid), Int32GetDatum(-1)));
            });
        } catch (const pg::Error &error) {
            // Rethrown at once as another error: the transaction ends either way.
            refuse(std::string(key.name) + ": " + quotable(error.message()), "Write it in ISO 8601.");
        }
    }

    const store::Route &route_;
    Jsonb *events_;
    std::string element_;
    std::vector<std::array<core::Uuid, 4>> context_ids_;
};

/// Ascending stamps in the order of the events.
void stamp(std::vector<store::Event> &events) {
    if (events.empty())
        return;
    const std::int64_t first = worker::take_stamps(events.size());
    for (std::size_t i = 0; i < events.size(); ++i)
        events[i][Column::hlc] = pg::Value(Int64GetDatum(first + static_cast<std::int64_t>(i)));
}

} // namespace

} // namespace outbox_relay::api

using namespace outbox_relay;

Datum outbox_relay_stage_many(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo]() -> Datum {
        const store::Route route = api::staging_route(fcinfo);
        if (PG_ARGISNULL(1))
            pg::raise(
                {ERRCODE_NULL_VALUE_NOT_ALLOWED, "events must not be NULL", "", "Give an array of objects."});
        Jsonb *events = pg::guard([fcinfo] { return PG_GETARG_JSONB_P(1); });
        if (!JB_ROOT_IS_ARRAY(events) || JB_ROOT_IS_SCALAR(events))
            pg::raise({ERRCODE_INVALID_PARAMETER_VALUE, "events must be an array of objects",
                       "Nothing was staged.",
                       "Give one object for each event, with event_type and payload."});
        api::Reader reader(route, events);
        std::vector<store::Event> read = reader.read();
        if (route.hlc_ordering)
            api::stamp(read);
        const std::uint64_t staged = store::stage_many(route, read);
        if (staged > 0 && route.has_tenants())
            for (const store::Event &event : read)
                api::wake_lane_of(route, event);
        else if (staged > 0)
            worker::wake_at_commit(route.name, std::nullopt);
        PG_RETURN_INT64(static_cast<std::int64_t>(staged));
    });
}
