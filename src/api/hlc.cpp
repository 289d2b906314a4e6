#include <optional>
#include <string>

#include "core/hlc.hpp"
#include "settings/settings.hpp"
#include "store/checkpoint.hpp"
#include "worker/hlc.hpp"

#include "pg/clock.hpp"
#include "pg/entry.hpp"
#include "pg/guard.hpp"
#include "pg/spi.hpp"

extern "C" {
#include "fmgr.h"
#include "mb/pg_wchar.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"

PGDLLEXPORT Datum outbox_relay_hlc_now(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_hlc_update(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_hlc_observe(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_hlc_last(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_hlc_pack(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_hlc_physical_ms(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_hlc_logical(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_hlc_timestamp(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_hlc_encode(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_hlc_parse(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_hlc_checkpoint_advance(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_hlc_checkpoint_load(PG_FUNCTION_ARGS);
PG_FUNCTION_INFO_V1(outbox_relay_hlc_now);
PG_FUNCTION_INFO_V1(outbox_relay_hlc_update);
PG_FUNCTION_INFO_V1(outbox_relay_hlc_observe);
PG_FUNCTION_INFO_V1(outbox_relay_hlc_last);
PG_FUNCTION_INFO_V1(outbox_relay_hlc_pack);
PG_FUNCTION_INFO_V1(outbox_relay_hlc_physical_ms);
PG_FUNCTION_INFO_V1(outbox_relay_hlc_logical);
PG_FUNCTION_INFO_V1(outbox_relay_hlc_timestamp);
PG_FUNCTION_INFO_V1(outbox_relay_hlc_encode);
PG_FUNCTION_INFO_V1(outbox_relay_hlc_parse);
PG_FUNCTION_INFO_V1(outbox_relay_hlc_checkpoint_advance);
PG_FUNCTION_INFO_V1(outbox_relay_hlc_checkpoint_load);
}

namespace outbox_relay::api {

namespace {

using core::HlcClock;
namespace hlc = core::hlc;

[[noreturn]] void raise_malformed(const std::string &what) {
    pg::raise({ERRCODE_INVALID_TEXT_REPRESENTATION, "malformed clock stamp: " + what,
               "A stamp is a bigint that is not negative; as text 15 digits of milliseconds, a dot and 5 "
               "digits up to 65535."});
}

/// A stamp that an argument brings. Raises 22P02 when it is negative.
std::int64_t stamp_argument(FunctionCallInfo fcinfo) {
    const std::int64_t stamp = PG_GETARG_INT64(0);
    if (stamp < 0)
        raise_malformed(std::to_string(stamp));
    return stamp;
}

[[noreturn]] void raise_drift(std::int64_t remote) {
    pg::raise({ERRCODE_DATETIME_FIELD_OVERFLOW,
               "clock stamp " + hlc::text(remote) + " is too far ahead of the wall clock",
               "At most outbox_relay.hlc_max_drift (" +
                   std::to_string(settings::parameters.hlc_max_drift_ms) + " ms) is accepted.",
               "Look at the clock of the server that it came from."});
}

/// The checkpoint that outbox_relay.hlc_checkpoint names; nothing when it is empty.
std::optional<store::Checkpoint> checkpoint() {
    const char *name = settings::parameters.hlc_checkpoint;
    if (name == nullptr || *name == '\0')
        return std::nullopt;
    return store::find_checkpoint(name);
}

std::int64_t mark_argument(FunctionCallInfo fcinfo) {
    if (PG_ARGISNULL(0))
        pg::raise({ERRCODE_NULL_VALUE_NOT_ALLOWED, "mark must not be NULL", "",
                   "Give a stamp, for example hlc_last()."});
    return stamp_argument(fcinfo);
}

std::string node_key_argument(FunctionCallInfo fcinfo) {
    if (PG_ARGISNULL(1))
        return settings::parameters.node_key;
    std::string key = pg::text_of(PG_GETARG_DATUM(1));
    if (key.empty())
        pg::raise({ERRCODE_INVALID_PARAMETER_VALUE, "node_key must not be empty", "",
                   "Leave it out for outbox_relay.node_key."});
    return key;
}

} // namespace

} // namespace outbox_relay::api

using namespace outbox_relay;

/// hlc_now(): a new stamp.
Datum outbox_relay_hlc_now(PG_FUNCTION_ARGS) {
    (void)fcinfo;
    return pg::entry([]() -> Datum { PG_RETURN_INT64(worker::take_stamps(1)); });
}

/// hlc_update(remote): merges a stamp of another clock and gives a new one above it.
Datum outbox_relay_hlc_update(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo]() -> Datum {
        const std::int64_t remote = api::stamp_argument(fcinfo);
        const core::HlcClock::Stamp stamp = worker::merge_stamp(remote);
        if (stamp.problem != core::HlcClock::Problem::none)
            api::raise_drift(remote);
        PG_RETURN_INT64(stamp.value);
    });
}

/// hlc_observe(header): the same from a forze_hlc header, which a stranger may have written: what is
/// malformed or beyond the drift changes nothing and gives NULL.
Datum outbox_relay_hlc_observe(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo]() -> Datum {
        const std::optional<std::int64_t> remote = core::hlc::parse(pg::text_of(PG_GETARG_DATUM(0)));
        if (!remote)
            PG_RETURN_NULL();
        const core::HlcClock::Stamp stamp = worker::merge_stamp(*remote);
        if (stamp.problem != core::HlcClock::Problem::none)
            PG_RETURN_NULL();
        PG_RETURN_INT64(stamp.value);
    });
}

/// hlc_last(): the clock's largest stamp so far, without giving one.
Datum outbox_relay_hlc_last(PG_FUNCTION_ARGS) {
    (void)fcinfo;
    return pg::entry([]() -> Datum { PG_RETURN_INT64(worker::last_stamp()); });
}

Datum outbox_relay_hlc_pack(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo]() -> Datum {
        const std::int64_t ms = PG_GETARG_INT64(0);
        const std::int32_t logical = PG_GETARG_INT32(1);
        if (ms < 0 || logical < 0 || logical > core::hlc::kMaxLogical)
            api::raise_malformed("(" + std::to_string(ms) + ", " + std::to_string(logical) + ")");
        const std::optional<std::int64_t> stamp = core::hlc::pack(ms, logical);
        if (!stamp)
            pg::raise({ERRCODE_DATETIME_FIELD_OVERFLOW,
                       "clock stamp of " + std::to_string(ms) + " milliseconds does not fit",
                       "The largest has " + std::to_string(core::hlc::kMaxMs) + "."});
        PG_RETURN_INT64(*stamp);
    });
}

Datum outbox_relay_hlc_physical_ms(PG_FUNCTION_ARGS) {
    return pg::entry(
        [fcinfo]() -> Datum { PG_RETURN_INT64(core::hlc::physical_ms(api::stamp_argument(fcinfo))); });
}

Datum outbox_relay_hlc_logical(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo]() -> Datum {
        PG_RETURN_INT32(static_cast<std::int32_t>(core::hlc::logical(api::stamp_argument(fcinfo))));
    });
}

Datum outbox_relay_hlc_timestamp(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo]() -> Datum {
        const std::int64_t ms = core::hlc::physical_ms(api::stamp_argument(fcinfo));
        PG_RETURN_TIMESTAMPTZ(pg::timestamp_of(ms * 1000));
    });
}

Datum outbox_relay_hlc_encode(PG_FUNCTION_ARGS) {
    return pg::entry(
        [fcinfo]() -> Datum { return pg::text_datum(core::hlc::text(api::stamp_argument(fcinfo))); });
}

Datum outbox_relay_hlc_parse(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo]() -> Datum {
        const std::string text = pg::text_of(PG_GETARG_DATUM(0));
        const std::optional<std::int64_t> stamp = core::hlc::parse(text);
        if (!stamp) {
            const int cut =
                pg::guard([&text] { return pg_mbcliplen(text.data(), static_cast<int>(text.size()), 64); });
            api::raise_malformed("\"" + text.substr(0, static_cast<std::size_t>(cut)) + "\"");
        }
        PG_RETURN_INT64(*stamp);
    });
}

/// hlc_checkpoint_advance(mark, node_key): GREATEST upsert as the caller, in its transaction.
Datum outbox_relay_hlc_checkpoint_advance(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo]() -> Datum {
        const std::int64_t mark = api::mark_argument(fcinfo);
        const std::string node_key = api::node_key_argument(fcinfo);
        const std::optional<store::Checkpoint> checkpoint = api::checkpoint();
        if (!checkpoint)
            pg::raise({ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, "no checkpoint is set",
                       "outbox_relay.hlc_checkpoint is empty.",
                       "Set it to the checkpoint table, for example ALTER DATABASE app SET "
                       "outbox_relay.hlc_checkpoint = 'app.hlc_checkpoint'."});
        store::advance_as_caller(*checkpoint, node_key, mark);
        PG_RETURN_VOID();
    });
}

/// hlc_checkpoint_load(): the largest mark over all keys, NULL when there is none or no checkpoint.
Datum outbox_relay_hlc_checkpoint_load(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo]() -> Datum {
        const std::optional<store::Checkpoint> checkpoint = api::checkpoint();
        const std::optional<std::int64_t> mark =
            checkpoint ? store::load_as_caller(*checkpoint) : std::nullopt;
        if (!mark)
            PG_RETURN_NULL();
        PG_RETURN_INT64(*mark);
    });
}
