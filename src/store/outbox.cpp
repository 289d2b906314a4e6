#include "store/outbox.hpp"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <optional>

#include "core/text.hpp"

#include "pg/clock.hpp"
#include "pg/transaction.hpp"
#include "pg/wal.hpp"
#include "pg/watchdog.hpp"
#include "store/encoding.hpp"
#include "store/outbox_sql.hpp"

extern "C" {
#include "access/detoast.h"
#include "access/xact.h"
#include "catalog/dependency.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_type.h"
#include "storage/lmgr.h"
#include "utils/acl.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/guc.h"
#include "utils/jsonb.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"
}

namespace outbox_relay::store {

namespace {

/// Texts of a row that become headers are refused beyond this, before they are detoasted.
constexpr std::size_t kMaxTextBytes = 8192;

/// Columns of claim_columns() in outbox_sql.cpp.
enum Column {
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
    row.attempts = static_cast<std::int32_t>(std::clamp<std::int64_t>(
        raw.null[kAttempts] ? 0 : DatumGetInt64(raw.value[kAttempts]), 0, INT32_MAX));
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

bool is_suspect(const RowVersion &version) {
    return version.why == Remembered::suspect;
}

bool is_left_out(const RowVersion &version) {
    return version.why != Remembered::published;
}

bool is_published(const std::vector<RowVersion> &remembered, const RowVersion &version) {
    return std::any_of(remembered.begin(), remembered.end(), [&version](const RowVersion &known) {
        return known.why == Remembered::published && known.same_version(version);
    });
}

Oid owner_of(const Route &route) {
    const Oid owner = pg::guard([&route] { return get_role_oid(route.owner.c_str(), true); });
    if (!OidIsValid(owner))
        pg::raise({ERRCODE_UNDEFINED_OBJECT,
                   "owner \"" + route.owner + "\" of route \"" + route.name + "\" does not exist",
                   "Every pass of a route runs as its owner.",
                   "Create the role, or set the owner column of outbox_route to an existing one."});
    return owner;
}

/// An array of `count` elements in the current context. C regime.
Datum array_of(Datum *elements, bool *nulls, int count, Oid type, int length, bool by_value, char align) {
    int dimensions[1] = {count};
    int bounds[1] = {1};
    if (count == 0)
        return PointerGetDatum(construct_empty_array(type));
    return PointerGetDatum(
        construct_md_array(elements, nulls, 1, dimensions, bounds, type, length, by_value, align));
}

/// The rows that a claim leaves out, as its parameters.
struct LeftOut {
    pg::Value ctids;
    pg::Value ids;
};

LeftOut left_out_of(const std::vector<RowVersion> &remembered) {
    std::vector<Datum> ctids, ids;
    for (const RowVersion &version : remembered)
        if (is_left_out(version)) {
            ctids.push_back(PointerGetDatum(&version.ctid));
            ids.push_back(PointerGetDatum(version.id.bytes.data()));
        }
    const int count = static_cast<int>(ctids.size());
    const LeftOut left_out = pg::guard([&] {
        LeftOut arrays;
        arrays.ctids = pg::Value(
            array_of(ctids.data(), nullptr, count, TIDOID, sizeof(ItemPointerData), false, TYPALIGN_SHORT));
        arrays.ids = pg::Value(array_of(ids.data(), nullptr, count, UUIDOID, UUID_LEN, false, TYPALIGN_CHAR));
        return arrays;
    });
    return left_out;
}

} // namespace

ConsumeStore::ConsumeStore(const Route &route, const Effective &settings, OutboxPlans &plans,
                           core::PassHost &host, RowMemory &memory, bool odd_to_retries)
    : route_(route), settings_(settings), plans_(plans), host_(host), memory_(memory),
      odd_to_retries_(odd_to_retries) {}

void ConsumeStore::begin() {
    pg::start_transaction();
    check_extension();
    owner_ = owner_of(route_);
    limits_ = limits_for(owner_, settings_);
    set_limits();
    const std::vector<Finding> findings = check_route(route_, settings_, owner_, limits_, checked_);
    raise_blocking(route_, findings);
    forget_other_plans();
    remembered_ = memory_.load();
    // Two suspects: each failed alone, so the fault is not a row's but the lane's.
    if (std::count_if(remembered_.begin(), remembered_.end(), is_suspect) > 1)
        std::erase_if(remembered_, is_suspect);
    pg::spi_connect();
    render_context_ = pg::guard([] {
        return AllocSetContextCreate(TopTransactionContext, "outbox_relay payload", ALLOCSET_DEFAULT_SIZES);
    });
}

/// The extension stays locked to the end of the pass, so that DROP EXTENSION waits for it and no
/// longer.
void ConsumeStore::check_extension() {
    const std::optional<Extension> extension = find_extension();
    if (!extension)
        pg::raise({ERRCODE_UNDEFINED_OBJECT, "extension \"outbox_relay\" is gone"});
    const Oid oid = extension->oid;
    pg::guard([oid] { LockDatabaseObject(ExtensionRelationId, oid, 0, AccessShareLock); });
    const std::optional<Extension> again = find_extension();
    if (!again || again->oid != oid)
        pg::raise({ERRCODE_UNDEFINED_OBJECT, "extension \"outbox_relay\" is gone"});
}

void ConsumeStore::set_limits() {
    pg::set_local("statement_timeout", std::to_string(limits_.statement_ms).c_str());
    pg::set_local("lock_timeout", std::to_string(limits_.lock_ms).c_str());
    pg::set_local("idle_in_transaction_session_timeout", std::to_string(limits_.idle_ms).c_str());
    // A crash must not undo passes that were committed: each would be published again.
    if (synchronous_commit == SYNCHRONOUS_COMMIT_OFF)
        pg::set_local("synchronous_commit", "local");
    watchdog_end_us_ =
        pg::monotonic_us() + 1000 * (settings_.pass_deadline_ms + 5 * settings_.pass_statement_timeout_ms);
    touch_watchdog();
}

void ConsumeStore::touch_watchdog() {
    const std::int64_t left_ms = (watchdog_end_us_ - pg::monotonic_us()) / 1000;
    pg::arm_watchdog(std::min<std::int64_t>(limits_.idle_ms, left_ms));
}

pg::Result ConsumeStore::run(const pg::Plan &plan, std::span<const pg::Value> values, const char *name,
                             bool ordered_plans) {
    pg::Context context;
    context.role = owner_;
    context.statement_timeout_ms = limits_.statement_ms;
    context.lock_timeout_ms = limits_.lock_ms;
    context.ordered_plans = ordered_plans;
    touch_watchdog();
    const pg::Result result = pg::execute_as(context, plan, values, name);
    touch_watchdog();
    return result;
}

void ConsumeStore::prepare(pg::Plan &plan, const std::string &sql, std::span<const Oid> types) {
    if (plan.prepared())
        return;
    // Parse analysis looks names up with the owner's rights, like the execution.
    pg::Context context;
    context.role = owner_;
    context.ordered_plans = true;
    context.statement_timeout_ms = limits_.statement_ms;
    context.lock_timeout_ms = limits_.lock_ms;
    plan.prepare_as(context, sql, types);
}

/// Kept statements belong to one table under one owner.
void ConsumeStore::forget_other_plans() {
    const ClaimShape shape{route_.hlc_ordering, route_.propagate_trace};
    if (plans_.relation == checked_.relation && plans_.owner == owner_ && plans_.shape == shape &&
        plans_.qualified_name == checked_.qualified_name)
        return;
    plans_ = OutboxPlans();
    plans_.relation = checked_.relation;
    plans_.owner = owner_;
    plans_.shape = shape;
    plans_.qualified_name = checked_.qualified_name;
}

std::int64_t ConsumeStore::reclaim() {
    if (!checked_.has_processing_at)
        return 0;
    const Oid types[] = {TEXTOID, TIMESTAMPTZOID};
    prepare(plans_.reclaim, reclaim_sql(checked_.qualified_name), types);
    const TimestampTz before = GetCurrentTimestamp() - settings_.reclaim_stale_after_ms * 1000;
    const pg::Value values[] = {pg::Value(pg::text_datum(route_.name)),
                                pg::Value(TimestampTzGetDatum(before))};
    return static_cast<std::int64_t>(run(plans_.reclaim, values, "outbox_relay: reclaim", true).processed);
}

std::vector<core::Row> ConsumeStore::claim(std::size_t max_rows) {
    std::vector<core::Row> rows;
    claim_into(max_rows, rows);
    if (rows.empty() && std::erase_if(remembered_, is_suspect) > 0)
        // Nothing but the suspect is left to find out with.
        claim_into(max_rows, rows);
    flush_before_publishing();

    // A row without a stamp comes after all that have one; without hlc_ordering none has.
    const auto before = [&](std::size_t a, std::size_t b) {
        const std::int64_t hlc_a = rows[a].hlc.value_or(INT64_MAX);
        const std::int64_t hlc_b = rows[b].hlc.value_or(INT64_MAX);
        if (hlc_a != hlc_b)
            return hlc_a < hlc_b;
        const std::int64_t at_a = claimed_[rows[a].handle].created_at;
        const std::int64_t at_b = claimed_[rows[b].handle].created_at;
        return at_a != at_b ? at_a < at_b : rows[a].id < rows[b].id;
    };
    std::vector<std::size_t> order(rows.size());
    std::iota(order.begin(), order.end(), std::size_t{0});
    std::sort(order.begin(), order.end(), before);
    std::vector<core::Row> sorted;
    sorted.reserve(rows.size());
    for (const std::size_t index : order)
        sorted.push_back(std::move(rows[index]));
    return sorted;
}

void ConsumeStore::claim_into(std::size_t max_rows, std::vector<core::Row> &rows) {
    const Oid types[] = {TEXTOID, INT8OID, TIMESTAMPTZOID, INT8OID, TIDARRAYOID, UUIDARRAYOID};
    const Oid more_types[] = {TEXTOID, INT8OID, TIMESTAMPTZOID, TIDARRAYOID, TIDARRAYOID, UUIDARRAYOID};
    const bool except = std::any_of(remembered_.begin(), remembered_.end(), is_left_out);
    pg::Plan &plan = except ? plans_.claim_except : plans_.claim;
    prepare(plan, claim_sql(checked_.qualified_name, plans_.shape, except),
            std::span<const Oid>(types, except ? 6 : 4));

    const std::size_t share = (max_rows + (odd_to_retries_ ? 1 : 0)) / 2;
    const pg::Value route(pg::text_datum(route_.name));
    const pg::Value now(TimestampTzGetDatum(GetCurrentTimestamp()));
    const LeftOut left_out = left_out_of(remembered_);
    const pg::Value values[] = {route,
                                pg::Value(Int64GetDatum(static_cast<std::int64_t>(max_rows))),
                                now,
                                pg::Value(Int64GetDatum(static_cast<std::int64_t>(share))),
                                left_out.ctids,
                                left_out.ids};
    const std::size_t again = read_claimed(
        run(plan, std::span<const pg::Value>(values, except ? 6 : 4), "outbox_relay: claim", true), rows);
    if (rows.size() >= max_rows || again < share)
        return;

    prepare(plans_.claim_more, claim_more_sql(checked_.qualified_name, plans_.shape), more_types);
    const pg::Value more[] = {route,
                              pg::Value(Int64GetDatum(static_cast<std::int64_t>(max_rows - rows.size()))),
                              now,
                              pg::Value(claimed_ctids()),
                              left_out.ctids,
                              left_out.ids};
    (void)read_claimed(run(plans_.claim_more, more, "outbox_relay: claim", true), rows);
}

/// An event whose own transaction a crash could still undo (asynchronous commit) must not go out.
void ConsumeStore::flush_before_publishing() const {
    std::vector<TransactionId> xids;
    xids.reserve(claimed_.size());
    for (const Claimed &claimed : claimed_)
        xids.push_back(claimed.version.xmin);
    pg::flush_commits(xids);
}

/// Appends the rows of a claim; how many of them had been tried before.
std::size_t ConsumeStore::read_claimed(const pg::Result &result, std::vector<core::Row> &rows) {
    std::size_t again = 0;
    rows.reserve(rows.size() + result.processed);
    for (std::uint64_t i = 0; i < result.processed; ++i) {
        RawRow raw;
        fetch(result, i, &raw);
        if (DatumGetObjectId(raw.value[kTableoid]) != checked_.relation)
            pg::raise({ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, "relation " + checked_.qualified_name +
                                                                     " was replaced while route \"" +
                                                                     route_.name + "\" claimed from it"});
        const auto handle = static_cast<std::uint32_t>(claimed_.size());
        claimed_.push_back(
            {version_of(raw), raw.value[kPayload], DatumGetTimestampTz(raw.value[kCreatedAt])});
        rows.push_back(row_of(raw, handle));
        rows.back().acknowledged = is_published(remembered_, claimed_.back().version);
        again += raw.null[kAvailableAt] ? 0 : 1;
    }
    return again;
}

std::variant<std::string, core::Unsendable> ConsumeStore::render(const core::Row &row) {
    const Datum payload = claimed_[row.handle].payload;
    const std::int64_t size =
        pg::guard([payload] { return static_cast<std::int64_t>(toast_raw_datum_size(payload)); }) - VARHDRSZ;
    if (size > route_.max_payload_bytes)
        return core::Unsendable{"payload of " + std::to_string(size) +
                                " bytes is larger than max_payload_bytes (" +
                                std::to_string(route_.max_payload_bytes) + ")"};
    MemoryContext context = render_context_;
    struct Rendered {
        const char *bytes;
        std::size_t size;
    };
    const Rendered rendered = pg::guard([payload, context] {
        MemoryContext old = MemoryContextSwitchTo(context);
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
    pg::guard([context] { MemoryContextReset(context); });
    if (!body)
        return core::Unsendable{"payload is not valid text or cannot be converted to UTF-8"};
    return std::move(*body);
}

Datum ConsumeStore::ctid_array(std::span<const std::uint32_t> handles) const {
    std::vector<Datum> elements;
    elements.reserve(handles.size());
    for (const std::uint32_t handle : handles)
        elements.push_back(PointerGetDatum(&claimed_[handle].version.ctid));
    return pg::guard([&elements] {
        return array_of(elements.data(), nullptr, static_cast<int>(elements.size()), TIDOID,
                        sizeof(ItemPointerData), false, TYPALIGN_SHORT);
    });
}

Datum ConsumeStore::claimed_ctids() const {
    std::vector<std::uint32_t> all(claimed_.size());
    std::iota(all.begin(), all.end(), 0u);
    return ctid_array(all);
}

void ConsumeStore::note_published(const core::Row &row) noexcept {
    memory_.add(claimed_[row.handle].version);
}

/// A pass of one row that fails from here on fails because of that row, or of the lane: the next pass
/// takes another row and finds out which. Written down first, since a watchdog may end the process.
void ConsumeStore::suspect_single_row() noexcept {
    if (claimed_.size() != 1)
        return;
    RowVersion version = claimed_.front().version;
    version.why = Remembered::suspect;
    memory_.add(version);
}

/// After a commit: what this pass settled is forgotten; a suspect is set aside when another row
/// settled alone.
void ConsumeStore::remember_rest() {
    std::vector<RowVersion> rest;
    std::size_t aside = static_cast<std::size_t>(
        std::count_if(remembered_.begin(), remembered_.end(),
                      [](const RowVersion &version) { return version.why == Remembered::aside; }));
    for (RowVersion version : remembered_) {
        const bool seen = std::any_of(claimed_.begin(), claimed_.end(), [&version](const Claimed &claimed) {
            return claimed.version.id == version.id && claimed.version.relation == version.relation;
        });
        if (seen)
            continue;
        if (is_suspect(version) && claimed_.size() == 1) {
            if (++aside > kMaxAside)
                continue;
            version.why = Remembered::aside;
            newly_aside_.push_back(version.id.text());
        }
        rest.push_back(version);
    }
    memory_.replace(rest);
}

void ConsumeStore::settle(const core::Settlement &settlement) {
    suspect_single_row();
    if (!settlement.published.empty())
        remove_published(settlement.published);
    host_.at(core::PassPoint::in_settle, settlement.published.size());
    if (!settlement.retried.empty() || !settlement.parked.empty())
        update_rest(settlement);
}

namespace {

[[noreturn]] void raise_count_mismatch(const Route &route, const Checked &checked, const char *what,
                                       std::uint64_t done, std::size_t wanted) {
    pg::raise({ERRCODE_TRIGGERED_ACTION_EXCEPTION,
               "only " + std::to_string(done) + " of " + std::to_string(wanted) + " rows of " +
                   checked.qualified_name + " were " + what + " for route \"" + route.name + "\"",
               "A trigger, rule or policy of the table swallowed the others; the pass is undone.",
               "Let the route's owner " + std::string(what[0] == 'd' ? "delete" : "update") +
                   " rows of this table, or disable the trigger, rule or policy."});
}

} // namespace

void ConsumeStore::remove_published(const std::vector<std::uint32_t> &handles) {
    const Oid types[] = {TIDARRAYOID};
    prepare(plans_.remove, remove_sql(checked_.qualified_name), types);
    const pg::Value values[] = {pg::Value(ctid_array(handles))};
    const pg::Result result = run(plans_.remove, values, "outbox_relay: settle published rows");
    if (result.processed != handles.size())
        raise_count_mismatch(route_, checked_, "deleted", result.processed, handles.size());
}

void ConsumeStore::update_rest(const core::Settlement &settlement) {
    const Oid types[] = {TIDARRAYOID, TEXTARRAYOID, INT4ARRAYOID, TIMESTAMPTZARRAYOID, TEXTARRAYOID};
    prepare(plans_.update, update_sql(checked_.qualified_name), types);

    const std::size_t count = settlement.retried.size() + settlement.parked.size();
    std::vector<std::uint32_t> handles;
    std::vector<Datum> statuses, added, available_at, errors;
    std::vector<std::uint8_t> not_rescheduled;
    handles.reserve(count);
    const Datum pending = pg::text_datum("pending");
    const Datum failed = pg::text_datum("failed");
    for (const core::Retry &retry : settlement.retried) {
        handles.push_back(retry.handle);
        statuses.push_back(pending);
        added.push_back(Int32GetDatum(retry.counts ? 1 : 0));
        available_at.push_back(TimestampTzGetDatum(pg::timestamp_of(retry.available_at_us)));
        not_rescheduled.push_back(0);
        errors.push_back(pg::text_datum(from_utf8(retry.error)));
    }
    for (const core::Park &park : settlement.parked) {
        handles.push_back(park.handle);
        statuses.push_back(failed);
        added.push_back(Int32GetDatum(0));
        available_at.push_back(TimestampTzGetDatum(0));
        not_rescheduled.push_back(1);
        errors.push_back(pg::text_datum(from_utf8(park.error)));
    }
    const int n = static_cast<int>(count);
    const pg::Value rows(ctid_array(handles));
    struct Arrays {
        Datum statuses, added, available_at, errors;
    };
    const Arrays arrays = pg::guard([&] {
        return Arrays{array_of(statuses.data(), nullptr, n, TEXTOID, -1, false, TYPALIGN_INT),
                      array_of(added.data(), nullptr, n, INT4OID, 4, true, TYPALIGN_INT),
                      array_of(available_at.data(), reinterpret_cast<bool *>(not_rescheduled.data()), n,
                               TIMESTAMPTZOID, 8, FLOAT8PASSBYVAL, TYPALIGN_DOUBLE),
                      array_of(errors.data(), nullptr, n, TEXTOID, -1, false, TYPALIGN_INT)};
    });
    const pg::Value values[] = {rows, pg::Value(arrays.statuses), pg::Value(arrays.added),
                                pg::Value(arrays.available_at), pg::Value(arrays.errors)};
    const pg::Result result = run(plans_.update, values, "outbox_relay: settle retries and failures");
    if (result.processed != count)
        raise_count_mismatch(route_, checked_, "updated", result.processed, count);
}

void ConsumeStore::commit() {
    // COMMIT may have to wait for a synchronous standby, which is nobody's fault here.
    pg::disarm_watchdog();
    pg::spi_finish();
    pg::commit_transaction();
    remember_rest();
}

void ConsumeStore::rollback() noexcept {
    // Made anew: a statement that a rule turned into nothing depends on no table, so the server would
    // not notice that the rule is gone.
    plans_ = OutboxPlans();
    try {
        pg::abort_transaction();
    } catch (...) {
        // A session that can't abort is of no use; the next transaction start says so and the worker ends.
    }
}

} // namespace outbox_relay::store
