#include "store/outbox.hpp"

#include <algorithm>
#include <numeric>
#include <optional>

#include "pg/clock.hpp"
#include "pg/compat.hpp"
#include "pg/wal.hpp"
#include "pg/watchdog.hpp"
#include "store/array.hpp"
#include "store/claimed_row.hpp"
#include "store/encoding.hpp"
#include "store/index.hpp"
#include "store/relation.hpp"

extern "C" {
#include "access/xact.h"
#include "catalog/dependency.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_type.h"
#include "storage/lmgr.h"
#include "storage/lock.h"
#include "utils/acl.h"
#include "utils/guc.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
}

namespace outbox_relay::store {

namespace {

bool is_suspect(const RowVersion &version) {
    return version.why == Remembered::suspect;
}

bool is_left_out(const RowVersion &version) {
    return version.why == Remembered::suspect || version.why == Remembered::aside;
}

bool is_published(const std::vector<RowVersion> &remembered, const RowVersion &version) {
    return std::any_of(remembered.begin(), remembered.end(), [&version](const RowVersion &known) {
        return known.why == Remembered::published && known.same_version(version);
    });
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
    return {tid_array(ctids), uuid_array(ids)};
}

} // namespace

OutboxStore::OutboxStore(const Route &route, const std::optional<core::Uuid> &tenant,
                         const Effective &settings, OutboxPlans &plans, core::PassHost &host,
                         RowMemory &memory, Frame frame, bool odd_to_retries)
    : route_(route), tenant_(tenant), settings_(settings), plans_(plans), host_(host), memory_(memory),
      frame_(frame), odd_to_retries_(odd_to_retries) {}

OutboxStore::~OutboxStore() {
    if (pass_context_ != nullptr)
        MemoryContextDelete(pass_context_);
}

void OutboxStore::begin() {
    pg::guard([this] {
        pass_context_ = AllocSetContextCreate(TopMemoryContext, "outbox_relay pass", ALLOCSET_DEFAULT_SIZES);
        render_context_ =
            AllocSetContextCreate(pass_context_, "outbox_relay payload", ALLOCSET_DEFAULT_SIZES);
    });
    if (frame_ == Frame::own)
        pg::start_transaction();
    else
        savepoint_.begin();
    open_ = true;
    owner_ = owner_of(route_);
    if (frame_ == Frame::own)
        limits_ = limits_for(owner_, settings_);
    set_limits();
    // Behind the limits: who drops the extension may hold its lock for as long as he likes.
    check_extension();
    const std::vector<Finding> findings = check_route(route_, tenant_, settings_, owner_, limits_, checked_);
    raise_blocking(route_, findings);
    forget_other_plans();
    find_target();
    pg::spi_connect();
}

/// A further transaction of the same pass.
void OutboxStore::open() {
    pg::start_transaction();
    open_ = true;
    set_limits();
    if (keeps_extension_)
        keep_extension();
    else
        check_extension();
    // Statements name the table, and nothing has held it since the transaction before.
    hold_checked(route_, owner_, limits_, checked_);
    // An error before this one has made them anew.
    forget_other_plans();
    pg::spi_connect();
}

/// Commits.
void OutboxStore::close() {
    if (frame_ == Frame::own)
        // COMMIT may have to wait for a synchronous standby, which is nobody's fault here.
        pg::disarm_watchdog();
    pg::spi_finish();
    if (frame_ == Frame::own)
        pg::commit_transaction();
    else
        savepoint_.release();
    open_ = false;
}

void OutboxStore::undo() noexcept {
    // Made anew: a statement that a rule turned into nothing depends on no table, so the server would
    // not notice that the rule is gone.
    plans_ = OutboxPlans();
    try {
        if (frame_ == Frame::own)
            pg::abort_transaction();
        else if (open_)
            savepoint_.rollback();
    } catch (...) {
        // A session that can't abort is of no use; the next transaction start says so and the worker ends.
    }
    // The abort of a transaction did, that of none did not.
    let_extension_go();
    open_ = false;
}

/// The extension stays locked to the end of the pass, so that DROP EXTENSION waits for it and no
/// longer.
void OutboxStore::check_extension() {
    const std::optional<Extension> extension = find_extension();
    if (!extension)
        pg::raise({ERRCODE_UNDEFINED_OBJECT, "extension \"outbox_relay\" is gone"});
    const Oid oid = extension->oid;
    pg::guard([oid] { LockDatabaseObject(ExtensionRelationId, oid, 0, AccessShareLock); });
    const std::optional<Extension> again = find_extension();
    if (!again || again->oid != oid)
        pg::raise({ERRCODE_UNDEFINED_OBJECT, "extension \"outbox_relay\" is gone"});
}

/// The same over the rest of the pass's transactions. An abort lets go of it: where the extension went in
/// between the pass goes on without it, since what it has sent is to be marked all the same.
void OutboxStore::keep_extension() {
    keeps_extension_ = true;
    const std::optional<Extension> extension = find_extension();
    if (holds_extension_ || !extension)
        return;
    const Oid oid = extension->oid;
    pg::guard([oid] {
        LOCKTAG tag;
        SET_LOCKTAG_OBJECT(tag, MyDatabaseId, ExtensionRelationId, oid, 0);
        (void)LockAcquire(&tag, AccessShareLock, true, false);
    });
    holds_extension_ = true;
}

/// At the end of a pass, however it ended. Nothing else of a worker's is locked beyond a transaction.
void OutboxStore::let_extension_go() noexcept {
    if (!holds_extension_)
        return;
    holds_extension_ = false;
    try {
        pg::guard([] { LockReleaseSession(DEFAULT_LOCKMETHOD); });
    } catch (...) {
        // Warns at most.
    }
}

void OutboxStore::set_limits() {
    if (frame_ == Frame::callers)
        return;
    pg::set_local("statement_timeout", std::to_string(limits_.statement_ms).c_str());
    pg::set_local("lock_timeout", std::to_string(limits_.lock_ms).c_str());
    pg::set_local("idle_in_transaction_session_timeout", std::to_string(limits_.idle_ms).c_str());
    const int transaction_ms = limits_.transaction_ms;
    pg::guard([transaction_ms] { pg::compat::shorten_transaction(transaction_ms); });
    // A crash must not undo passes that were committed: each would be published again.
    if (synchronous_commit == SYNCHRONOUS_COMMIT_OFF)
        pg::set_local("synchronous_commit", "local");
    watchdog_end_us_ =
        pg::monotonic_us() + 1000 * (settings_.pass_deadline_ms + 5 * settings_.pass_statement_timeout_ms);
    touch_watchdog();
}

void OutboxStore::touch_watchdog() {
    if (frame_ == Frame::callers)
        return;
    const std::int64_t left_ms = (watchdog_end_us_ - pg::monotonic_us()) / 1000;
    pg::arm_watchdog(std::min<std::int64_t>(limits_.idle_ms, left_ms));
}

pg::Context OutboxStore::context() const {
    pg::Context context;
    context.role = owner_;
    context.statement_timeout_ms = limits_.statement_ms;
    context.lock_timeout_ms = limits_.lock_ms;
    return context;
}

pg::Context OutboxStore::context(Planning planning) const {
    pg::Context under = context();
    under.ordered_plans = planning == Planning::ordered || planning == Planning::claim;
    if (planning != Planning::call)
        under.relation = checked_.relation;
    if (planning == Planning::claim)
        under.only_index = plans_.tenant_index;
    return under;
}

pg::Result OutboxStore::run(const pg::Plan &plan, std::span<const pg::Value> values, const char *name,
                            Planning planning) {
    const pg::Context under = context(planning);
    touch_watchdog();
    // What a client runs is its own business to show.
    const pg::Result result = pg::execute_as(under, plan, values, frame_ == Frame::own ? name : nullptr);
    touch_watchdog();
    return result;
}

void OutboxStore::prepare(pg::Plan &plan, const std::string &sql, std::span<const Oid> types) {
    if (plan.prepared())
        return;
    // Parse analysis looks names up with the owner's rights, like the execution.
    plan.prepare_as(context(Planning::ordered), sql, types);
}

/// Kept statements belong to one table under one owner.
/// An index that is gone later slows the claim down until it fails, and a failed pass comes by here again.
void OutboxStore::forget_other_plans() {
    const ClaimShape shape{route_.hlc_ordering, route_.propagate_trace, tenant_filter(route_)};
    if (plans_.relation == checked_.relation && plans_.owner == owner_ && plans_.shape == shape &&
        plans_.qualified_name == checked_.qualified_name && plans_.log_name == checked_.log_name)
        return;
    Oid index = InvalidOid;
    if (shape.tenant == TenantFilter::column) {
        const Relation relation = describe(checked_.qualified_name, NoLock);
        raise_blocking(route_, tenant_index_findings(relation, shape.hlc));
        index = tenant_index(relation, shape.hlc);
    }
    plans_ = OutboxPlans();
    plans_.tenant_index = index;
    plans_.relation = checked_.relation;
    plans_.owner = owner_;
    plans_.shape = shape;
    plans_.qualified_name = checked_.qualified_name;
    plans_.log_name = checked_.log_name;
}

/// The kept call belongs to one function and to its argument's type.
void OutboxStore::find_target() {
    if (route_.target_function.empty())
        return;
    Target target;
    raise_blocking(route_, check_target(route_, find_extension().value(), owner_, target));
    if (plans_.target == target)
        return;
    plans_.deliver.release();
    plans_.target = target;
}

std::int64_t OutboxStore::reclaim() {
    if (!checked_.has_processing_at)
        return 0;
    const bool filters = plans_.shape.tenant != TenantFilter::none;
    const Oid types[] = {TEXTOID, TIMESTAMPTZOID, TIMESTAMPTZOID, UUIDARRAYOID, TIMESTAMPTZARRAYOID, UUIDOID};
    prepare(plans_.reclaim, reclaim_sql(checked_.qualified_name, plans_.shape.tenant),
            std::span<const Oid>(types, filters ? 6 : 5));
    const TimestampTz before = GetCurrentTimestamp() - settings_.reclaim_stale_after_ms * 1000;
    std::vector<RowVersion> acknowledged = memory_.load();
    std::erase_if(acknowledged,
                  [](const RowVersion &version) { return !version.is_acknowledged_in_processing(); });
    const Identity left_out = identity(acknowledged);
    const pg::Value values[] = {pg::Value(pg::text_datum(route_.name)),
                                pg::Value(TimestampTzGetDatum(before)),
                                pg::Value(TimestampTzGetDatum(memory_.live_claim())),
                                left_out.ids,
                                left_out.taken_at,
                                tenant_value()};
    const pg::Result result = run(plans_.reclaim, std::span<const pg::Value>(values, filters ? 6 : 5),
                                  "outbox_relay: reclaim", Planning::claim);
    for (std::uint64_t i = 0; i < result.processed; ++i)
        reclaimed_.push_back(*reinterpret_cast<ItemPointer>(DatumGetPointer(result.value(i, 1).datum)));
    return static_cast<std::int64_t>(result.processed);
}

std::vector<core::Row> OutboxStore::claim(std::size_t max_rows) {
    std::vector<core::Row> rows;
    claim_into(max_rows, rows);
    if (rows.empty() && std::erase_if(remembered_, is_suspect) > 0)
        // Nothing but the suspect is left to find out with.
        claim_into(max_rows, rows);
    if (asks_for_parked_ && rows.size() < max_rows)
        find_parked();
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

/// Looks when the next row is ripe that this claim did not find so.
void OutboxStore::find_parked() {
    const bool filters = plans_.shape.tenant != TenantFilter::none;
    const Oid types[] = {TEXTOID, TIMESTAMPTZOID, UUIDOID};
    prepare(plans_.parked, parked_sql(checked_.qualified_name, plans_.shape),
            std::span<const Oid>(types, filters ? 3 : 2));
    const pg::Value values[] = {pg::Value(pg::text_datum(route_.name)),
                                pg::Value(TimestampTzGetDatum(GetCurrentTimestamp())), tenant_value()};
    const pg::Result result = run(plans_.parked, std::span<const pg::Value>(values, filters ? 3 : 2),
                                  "outbox_relay: claim", Planning::claim);
    next_parked_us_ = 0;
    if (result.processed == 0)
        return;
    const TimestampTz at = DatumGetTimestampTz(result.value(0, 1).datum);
    if (!TIMESTAMP_NOT_FINITE(at))
        next_parked_us_ = pg::unix_us_of(at);
}

/// Claims until there are `max_rows`; half of them for rows that were tried before, and that are ripe again.
void OutboxStore::claim_into(std::size_t max_rows, std::vector<core::Row> &rows) {
    const std::size_t share = (max_rows + (odd_to_retries_ ? 1 : 0)) / 2;
    if (share == 0) {
        const std::string sql = claim_fresh_first_sql(checked_.qualified_name, plans_.shape);
        (void)claim_by(plans_.claim_fresh_first, sql, {INT8OID, pg::Value()}, max_rows, rows);
        return;
    }
    // In a client's transaction rows of its own would use up the share of one statement for both.
    const bool apart = frame_ == Frame::callers;
    std::size_t again = apart ? claim_due(share, rows) : 0;
    const bool except = std::any_of(remembered_.begin(), remembered_.end(), is_left_out);
    const pg::Value due(Int64GetDatum(apart ? 0 : static_cast<std::int64_t>(share)));
    again +=
        claim_by(except ? plans_.claim_except : plans_.claim,
                 claim_sql(checked_.qualified_name, plans_.shape, except), {INT8OID, due}, max_rows, rows);
    if (rows.size() < max_rows && again >= share)
        (void)claim_due(max_rows, rows);
}

/// Further rows that are ripe again, until there are `max_rows`; how many.
std::size_t OutboxStore::claim_due(std::size_t max_rows, std::vector<core::Row> &rows) {
    return claim_by(plans_.claim_more, claim_more_sql(checked_.qualified_name, plans_.shape),
                    {TIDARRAYOID, claimed_ctids()}, max_rows, rows);
}

/// The lane's tenant, as a parameter.
pg::Value OutboxStore::tenant_value() const {
    return tenant_ ? pg::Value(PointerGetDatum(tenant_->bytes.data())) : pg::Value();
}

/// Runs one of the claims, whose second parameter is its limit and whose fourth is `own`, and appends rows
/// until there are `max_rows`; how many of those had been tried before. In a client's transaction the
/// statement has no limit: it would count rows of the client's own, which are passed over here, one by one,
/// however many there are.
std::size_t OutboxStore::claim_by(pg::Plan &plan, const std::string &sql, const Parameter &own,
                                  std::size_t max_rows, std::vector<core::Row> &rows) {
    const Oid types[] = {TEXTOID, INT8OID, TIMESTAMPTZOID, own.type, TIDARRAYOID, UUIDARRAYOID, UUIDOID};
    prepare(plan, sql, types);
    const LeftOut left_out = left_out_of(remembered_);
    pg::Value values[] = {pg::Value(pg::text_datum(route_.name)),
                          pg::Value(),
                          pg::Value(TimestampTzGetDatum(GetCurrentTimestamp())),
                          own.value,
                          left_out.ctids,
                          left_out.ids,
                          tenant_value()};
    if (frame_ == Frame::own) {
        values[1] = pg::Value(Int64GetDatum(static_cast<std::int64_t>(max_rows - rows.size())));
        return read_claimed(run(plan, values, "outbox_relay: claim", Planning::claim), rows);
    }
    pg::Cursor cursor(context(Planning::claim), plan, values);
    std::size_t again = 0;
    while (rows.size() < max_rows) {
        const pg::Result result = cursor.fetch(max_rows - rows.size());
        if (result.processed == 0)
            break;
        again += read_claimed(result, rows);
    }
    cursor.close();
    return again;
}

/// True for a version that the client's own transaction wrote: its rollback would undo what the event tells
/// of. Not for those that this pass has reclaimed, whose events were committed before.
bool OutboxStore::is_callers_own(const RowVersion &version) const {
    if (frame_ == Frame::own || !TransactionIdIsCurrentTransactionId(version.xmin))
        return false;
    return std::none_of(reclaimed_.begin(), reclaimed_.end(), [&version](const ItemPointerData &place) {
        return ItemPointerEquals(const_cast<ItemPointer>(&place), const_cast<ItemPointer>(&version.ctid));
    });
}

/// An event whose own transaction a crash could still undo (asynchronous commit) must not go out.
void OutboxStore::flush_before_publishing() const {
    std::vector<TransactionId> xids;
    xids.reserve(claimed_.size());
    for (const Claimed &claimed : claimed_)
        xids.push_back(claimed.version.xmin);
    pg::flush_commits(xids);
}

/// Appends the rows of a claim; how many of them had been tried before.
std::size_t OutboxStore::read_claimed(const pg::Result &result, std::vector<core::Row> &rows) {
    std::size_t again = 0;
    rows.reserve(rows.size() + result.processed);
    for (std::uint64_t i = 0; i < result.processed; ++i) {
        ClaimedRow claimed = read_claimed_row(result, i, static_cast<std::uint32_t>(claimed_.size()));
        if (claimed.version.relation != checked_.relation)
            pg::raise({ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, "relation " + checked_.qualified_name +
                                                                     " was replaced while route \"" +
                                                                     route_.name + "\" claimed from it"});
        if (is_callers_own(claimed.version))
            continue;
        claimed.row.acknowledged = is_published(remembered_, claimed.version);
        claimed_.push_back({claimed.version, result, i, claimed.payload, claimed.created_at});
        rows.push_back(std::move(claimed.row));
        again += claimed.tried_before ? 1 : 0;
    }
    return again;
}

std::variant<std::string, core::Unsendable> OutboxStore::render(const core::Row &row) {
    return render_payload(claimed_[row.handle].payload, route_.max_payload_bytes, render_context_);
}

pg::Value OutboxStore::claimed_ctids() const {
    std::vector<Datum> elements;
    elements.reserve(claimed_.size());
    for (const Claimed &claimed : claimed_)
        elements.push_back(PointerGetDatum(&claimed.version.ctid));
    return tid_array(elements);
}

void OutboxStore::raise_swallowed(const char *what, std::uint64_t done, std::size_t wanted) const {
    pg::raise({ERRCODE_TRIGGERED_ACTION_EXCEPTION,
               "only " + std::to_string(done) + " of " + std::to_string(wanted) + " rows of " +
                   checked_.qualified_name + " were " + what + " for route \"" + route_.name + "\"",
               "A trigger, rule or policy of the table swallowed the others; the pass is undone.",
               "Let the route's owner " + std::string(what[0] == 'd' ? "delete" : "update") +
                   " rows of this table, or disable the trigger, rule or policy."});
}

OutboxStore::Identity OutboxStore::identity(std::span<const RowVersion> rows) {
    std::vector<Datum> ids, taken_at;
    for (const RowVersion &row : rows) {
        ids.push_back(PointerGetDatum(row.id.bytes.data()));
        taken_at.push_back(TimestampTzGetDatum(row.taken_at));
    }
    return {uuid_array(ids), timestamptz_array(taken_at)};
}

OutboxStore::Rest OutboxStore::rest_of(const core::Settlement &settlement) {
    Rest rest;
    std::vector<Datum> statuses, added, available_at, errors;
    std::vector<std::uint8_t> not_rescheduled;
    const Datum pending = pg::text_datum("pending");
    const Datum failed = pg::text_datum("failed");
    for (const core::Retry &retry : settlement.retried) {
        rest.handles.push_back(retry.handle);
        statuses.push_back(pending);
        added.push_back(Int32GetDatum(retry.counts ? 1 : 0));
        available_at.push_back(TimestampTzGetDatum(pg::timestamp_of(retry.available_at_us)));
        not_rescheduled.push_back(0);
        errors.push_back(pg::text_datum(from_utf8(retry.error)));
    }
    for (const core::Park &park : settlement.parked) {
        rest.handles.push_back(park.handle);
        statuses.push_back(failed);
        added.push_back(Int32GetDatum(0));
        available_at.push_back(TimestampTzGetDatum(0));
        not_rescheduled.push_back(1);
        errors.push_back(pg::text_datum(from_utf8(park.error)));
    }
    rest.statuses = text_array(statuses);
    rest.added = int4_array(added);
    rest.available_at = timestamptz_array(available_at, std::move(not_rescheduled));
    rest.errors = text_array(errors);
    return rest;
}

} // namespace outbox_relay::store
