#include "store/claimed_row.hpp"

#include <algorithm>
#include <cstring>
#include <optional>
#include <string_view>

#include "pg/clock.hpp"
#include "pg/guard.hpp"
#include "store/encoding.hpp"

extern "C" {
#include "access/detoast.h"
#include "access/htup_details.h"
#include "utils/builtins.h"
#include "utils/jsonb.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/typcache.h"
#include "utils/uuid.h"
}

namespace outbox_relay::store {

namespace {

/// Texts of a row that become headers are refused beyond this, before they are detoasted.
constexpr std::size_t kMaxTextBytes = 8192;

/// Columns of claim_columns() in outbox_sql.cpp.
enum Column {
    kRoute = 0, ///< not read: it is the claim's own
    kCtid = 1,
    kTableoid,
    kXmin,
    kId,
    kEventId,
    kEventType,
    kTenantId,
    kExecutionId,
    kCorrelationId,
    kCausationId,
    kOccurredAt,
    kPayload,
    kOrderingKey,
    kAttempts,
    kCreatedAt,
    kAvailableAt,
    kTraceparent,
    kHlc,
    kColumns
};

/// A text value of the server, not copied; `size` alone when it is too long to be looked at.
struct RawText {
    const char *bytes = nullptr;
    std::size_t size = 0;
};

/// A claimed row as plain data, pointing into the statement's result.
struct RawRow {
    Datum value[kColumns];
    bool null[kColumns];
    RawText event_type;
    RawText ordering_key;
    RawText traceparent;
};

/// C regime.
RawText raw_text(const RawRow &row, Column column) {
    RawText text;
    if (row.null[column])
        return text;
    text.size = toast_raw_datum_size(row.value[column]) - VARHDRSZ;
    if (text.size > kMaxTextBytes)
        return text;
    const struct varlena *value = PG_DETOAST_DATUM_PACKED(row.value[column]);
    text.bytes = VARDATA_ANY(value);
    text.size = VARSIZE_ANY_EXHDR(value);
    return text;
}

void fetch(const pg::Result &result, std::uint64_t index, RawRow *row) {
    pg::guard([&result, index, row] {
        row->value[kRoute] = 0;
        row->null[kRoute] = true;
        for (int column = kCtid; column < kColumns; ++column)
            row->value[column] =
                SPI_getbinval(result.table->vals[index], result.table->tupdesc, column, &row->null[column]);
        row->event_type = raw_text(*row, kEventType);
        row->ordering_key = raw_text(*row, kOrderingKey);
        row->traceparent = raw_text(*row, kTraceparent);
    });
}

std::optional<core::Uuid> uuid_of(const RawRow &row, Column column) {
    if (row.null[column])
        return std::nullopt;
    core::Uuid uuid;
    std::memcpy(uuid.bytes.data(), DatumGetUUIDP(row.value[column])->data, uuid.bytes.size());
    return uuid;
}

/// The text as UTF-8; what is wrong with it goes into `problem`.
std::string utf8_of(const RawText &text, const char *column, std::string &problem) {
    if (text.bytes == nullptr) {
        if (text.size > kMaxTextBytes && problem.empty())
            problem = std::string(column) + " is longer than " + std::to_string(kMaxTextBytes) + " bytes";
        return {};
    }
    std::optional<std::string> converted = to_utf8(std::string_view(text.bytes, text.size));
    if (!converted && problem.empty())
        problem = std::string(column) + " is not valid text or cannot be converted to UTF-8";
    return converted.value_or(std::string());
}

std::optional<std::int64_t> unix_us(const RawRow &row, Column column) {
    const TimestampTz at = DatumGetTimestampTz(row.value[column]);
    if (row.null[column] || TIMESTAMP_NOT_FINITE(at))
        return std::nullopt;
    return pg::unix_us_of(at);
}

std::int32_t attempts_of(const RawRow &row) {
    return static_cast<std::int32_t>(std::clamp<std::int64_t>(
        row.null[kAttempts] ? 0 : DatumGetInt64(row.value[kAttempts]), 0, INT32_MAX));
}

core::Row row_of(const RawRow &raw, std::uint32_t handle) {
    core::Row row;
    row.handle = handle;
    row.id = uuid_of(raw, kId).value_or(core::Uuid{});
    row.event_id = uuid_of(raw, kEventId).value_or(core::Uuid{});
    row.event_type = utf8_of(raw.event_type, "event_type", row.problem);
    if (!raw.null[kOrderingKey])
        row.ordering_key = utf8_of(raw.ordering_key, "ordering_key", row.problem);
    if (!raw.null[kTraceparent] && raw.traceparent.bytes != nullptr)
        row.traceparent = std::string(raw.traceparent.bytes, raw.traceparent.size);
    row.tenant_id = uuid_of(raw, kTenantId);
    row.execution_id = uuid_of(raw, kExecutionId);
    row.correlation_id = uuid_of(raw, kCorrelationId);
    row.causation_id = uuid_of(raw, kCausationId);
    row.occurred_at_us = unix_us(raw, kOccurredAt);
    if (!raw.null[kHlc])
        row.hlc = DatumGetInt64(raw.value[kHlc]);
    row.attempts = attempts_of(raw);
    return row;
}

RowVersion version_of(const RawRow &raw) {
    RowVersion version;
    version.id = uuid_of(raw, kId).value_or(core::Uuid{});
    version.relation = DatumGetObjectId(raw.value[kTableoid]);
    version.xmin = DatumGetTransactionId(raw.value[kXmin]);
    version.ctid = *reinterpret_cast<ItemPointer>(DatumGetPointer(raw.value[kCtid]));
    return version;
}

/// The attributes of outbox_message, in the order of the type.
constexpr Column kMessage[] = {kId,          kRoute,         kEventId,     kEventType,  kTenantId,
                               kExecutionId, kCorrelationId, kCausationId, kOccurredAt, kPayload,
                               kOrderingKey, kAttempts,      kHlc,         kTraceparent};
constexpr int kMessageColumns = lengthof(kMessage);

/// C regime.
Datum form_message(const RawRow &row, Datum route, Oid type) {
    Datum values[kMessageColumns];
    bool nulls[kMessageColumns];
    for (int i = 0; i < kMessageColumns; ++i) {
        values[i] = row.value[kMessage[i]];
        nulls[i] = row.null[kMessage[i]];
        if (kMessage[i] == kRoute || kMessage[i] == kAttempts) {
            values[i] = kMessage[i] == kRoute ? route : Int32GetDatum(attempts_of(row));
            nulls[i] = false;
        }
    }
    TupleDesc descriptor = lookup_rowtype_tupdesc(type, -1);
    if (descriptor->natts != kMessageColumns)
        elog(ERROR, "type outbox_message has %d attributes, not %d", descriptor->natts, kMessageColumns);
    HeapTuple tuple = heap_form_tuple(descriptor, values, nulls);
    const Datum message = heap_copy_tuple_as_datum(tuple, descriptor);
    ReleaseTupleDesc(descriptor);
    return message;
}

} // namespace

core::Uuid uuid_of(const pg::Value &value) {
    core::Uuid uuid;
    std::memcpy(uuid.bytes.data(), DatumGetUUIDP(value.datum)->data, uuid.bytes.size());
    return uuid;
}

ClaimedRow read_claimed_row(const pg::Result &result, std::uint64_t index, std::uint32_t handle) {
    RawRow raw;
    fetch(result, index, &raw);
    ClaimedRow claimed;
    claimed.row = row_of(raw, handle);
    claimed.version = version_of(raw);
    claimed.payload = raw.value[kPayload];
    claimed.created_at = DatumGetTimestampTz(raw.value[kCreatedAt]);
    claimed.tried_before = !raw.null[kAvailableAt];
    return claimed;
}

Datum message_of(const pg::Result &result, std::uint64_t index, Datum route, Oid type,
                 MemoryContext context) {
    RawRow raw;
    fetch(result, index, &raw);
    return pg::guard([&raw, route, type, context] {
        MemoryContext old = MemoryContextSwitchTo(context);
        // What is stored out of line is fetched now.
        PushActiveSnapshot(GetTransactionSnapshot());
        const Datum message = form_message(raw, route, type);
        PopActiveSnapshot();
        MemoryContextSwitchTo(old);
        return message;
    });
}

std::int64_t payload_bytes(Datum payload) {
    return pg::guard([payload] { return static_cast<std::int64_t>(toast_raw_datum_size(payload)); }) -
           VARHDRSZ;
}

std::optional<core::Unsendable> oversize(Datum payload, std::int64_t max_bytes) {
    const std::int64_t size = payload_bytes(payload);
    if (size <= max_bytes)
        return std::nullopt;
    return core::Unsendable{"payload of " + std::to_string(size) +
                            " bytes is larger than max_payload_bytes (" + std::to_string(max_bytes) + ")"};
}

std::variant<std::string, core::Unsendable> render_payload(Datum payload, std::int64_t max_bytes,
                                                           MemoryContext scratch) {
    if (std::optional<core::Unsendable> unsendable = oversize(payload, max_bytes))
        return std::move(*unsendable);
    struct Rendered {
        const char *bytes;
        std::size_t size;
    };
    const Rendered rendered = pg::guard([payload, scratch] {
        MemoryContext old = MemoryContextSwitchTo(scratch);
        const bool external = VARATT_IS_EXTERNAL(DatumGetPointer(payload));
        if (external)
            PushActiveSnapshot(GetTransactionSnapshot());
        Jsonb *json = DatumGetJsonbP(payload);
        if (external)
            PopActiveSnapshot();
        StringInfoData text;
        initStringInfo(&text);
        (void)JsonbToCString(&text, &json->root, VARSIZE(json));
        MemoryContextSwitchTo(old);
        return Rendered{text.data, static_cast<std::size_t>(text.len)};
    });
    std::optional<std::string> body = to_utf8(std::string_view(rendered.bytes, rendered.size));
    pg::guard([scratch] { MemoryContextReset(scratch); });
    if (!body)
        return core::Unsendable{"payload is not valid text or cannot be converted to UTF-8"};
    return std::move(*body);
}

} // namespace outbox_relay::store
