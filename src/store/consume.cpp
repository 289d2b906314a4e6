#include "store/consume.hpp"

#include <algorithm>
#include <map>

#include "store/array.hpp"
#include "store/claimed_row.hpp"
#include "store/outbox_sql.hpp"

#include "pg/guard.hpp"

extern "C" {
#include "access/xact.h"
#include "catalog/pg_type.h"
#include "utils/timestamp.h"
}

namespace outbox_relay::store {

namespace {

bool is_suspect(const RowVersion &version) {
    return version.why == Remembered::suspect;
}

} // namespace

void ConsumeStore::begin() {
    OutboxStore::begin();
    remembered_ = memory_.load();
    // Two suspects: each failed alone, so the fault is not a row's but the lane's.
    if (std::count_if(remembered_.begin(), remembered_.end(), is_suspect) > 1)
        std::erase_if(remembered_, is_suspect);
    // Not by a client, who may roll back, and whose route may be one of retain storage.
    if (frame_ == Frame::own)
        take_back_processing();
}

/// Rows that the lane's passes on retain storage left `processing`, before the route changed its storage:
/// they are pending again, and those that the endpoint has are settled by the claim that comes by them, not
/// sent.
void ConsumeStore::take_back_processing() {
    std::vector<RowVersion> taken;
    for (const RowVersion &version : remembered_)
        if (version.taken_at != 0 && version.relation == checked_.relation)
            taken.push_back(version);
    if (taken.empty() || !checked_.has_processing_at)
        return;
    std::erase_if(remembered_, [this](const RowVersion &version) {
        return version.taken_at != 0 && version.relation == checked_.relation;
    });
    const Oid types[] = {UUIDARRAYOID, TIMESTAMPTZARRAYOID};
    prepare(plans_.give_back, give_back_sql(checked_.qualified_name), types);
    const Identity who = identity(taken);
    const pg::Value values[] = {who.ids, who.taken_at};
    const pg::Result result = run(plans_.give_back, values, "outbox_relay: reclaim", Planning::ordered);
    std::map<core::Uuid, ItemPointerData> places;
    for (std::uint64_t i = 0; i < result.processed; ++i)
        places[uuid_of(result.value(i, 1))] =
            *reinterpret_cast<ItemPointer>(DatumGetPointer(result.value(i, 2).datum));
    const TransactionId xmin = pg::guard([] { return GetCurrentTransactionIdIfAny(); });
    for (RowVersion &version : taken) {
        const auto place = places.find(version.id);
        if (place == places.end() || !version.is_acknowledged_in_processing())
            continue;
        version.why = Remembered::published;
        version.taken_at = 0;
        version.since_s = 0;
        version.xmin = xmin;
        version.ctid = place->second;
        remembered_.push_back(version);
    }
}

pg::Value ConsumeStore::ctids(std::span<const std::uint32_t> handles) const {
    std::vector<Datum> elements;
    elements.reserve(handles.size());
    for (const std::uint32_t handle : handles)
        elements.push_back(PointerGetDatum(&claimed_[handle].version.ctid));
    return tid_array(elements);
}

/// One call of the target function, bounded as a statement is. What fails in it fails the pass.
std::optional<core::Unsendable> ConsumeStore::deliver(const core::Row &row) {
    const Claimed &claimed = claimed_[row.handle];
    if (std::optional<core::Unsendable> unsendable = oversize(claimed.payload, route_.max_payload_bytes))
        return unsendable;
    suspect_single_row();
    const Oid types[] = {plans_.target.message};
    prepare(plans_.deliver, "SELECT " + plans_.target.qualified_name + "($1)", types);
    const pg::Value values[] = {pg::Value(message_of(
        claimed.result, claimed.index, pg::text_datum(route_.name), plans_.target.message, render_context_))};
    const pg::Result result =
        run(plans_.deliver, values, "outbox_relay: deliver to the target function", Planning::call);
    pg::guard([this, &result] {
        SPI_freetuptable(result.table);
        MemoryContextReset(render_context_);
    });
    return std::nullopt;
}

/// In a client's transaction the rollback is meant to return the rows: nothing is remembered there.
void ConsumeStore::note_published(const core::Row &row) noexcept {
    if (frame_ == Frame::own)
        memory_.add(claimed_[row.handle].version);
}

/// A pass of one row that fails from here on fails because of that row, or of the lane: the next pass
/// takes another row and finds out which. Written down first, since a watchdog may end the process.
void ConsumeStore::suspect_single_row() noexcept {
    if (frame_ == Frame::callers || claimed_.size() != 1 || suspected_)
        return;
    suspected_ = true;
    RowVersion version = claimed_.front().version;
    version.why = Remembered::suspect;
    memory_.add(version);
}

/// After a commit: what this pass settled is forgotten; a suspect is set aside when another row settled
/// alone, for the second time: the first may have been the end of a fault of the whole lane.
void ConsumeStore::remember_rest() {
    if (frame_ == Frame::callers)
        return;
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
        if (is_suspect(version) && claimed_.size() == 1 && !was_warned(version)) {
            version.why = Remembered::warned;
        } else if (is_suspect(version) && claimed_.size() == 1) {
            if (++aside > kMaxAside)
                continue;
            version.why = Remembered::aside;
            newly_aside_.push_back(version.id.text());
        }
        rest.push_back(version);
    }
    memory_.replace(rest);
}

bool ConsumeStore::was_warned(const RowVersion &suspect) const {
    return std::any_of(remembered_.begin(), remembered_.end(), [&suspect](const RowVersion &version) {
        return version.why == Remembered::warned && version.same_version(suspect);
    });
}

void ConsumeStore::settle(const core::Settlement &settlement) {
    suspect_single_row();
    if (!settlement.published.empty())
        settle_published(settlement.published);
    host_.at(core::PassPoint::in_settle, settlement.published.size());
    if (!settlement.retried.empty() || !settlement.parked.empty())
        update_rest(settlement);
}

/// Deleted, or deleted and logged, or marked: what was told to happen must have happened to each row.
void ConsumeStore::settle_published(const std::vector<std::uint32_t> &handles) {
    const Oid types[] = {TIDARRAYOID, TIMESTAMPTZOID};
    const bool deletes = route_.storage != "retain";
    const bool logs = !checked_.log_name.empty();
    const std::string &table = checked_.qualified_name;
    prepare(plans_.remove,
            !deletes ? publish_sql(table)
            : logs   ? remove_and_log_sql(table, checked_.log_name)
                     : remove_sql(table),
            std::span<const Oid>(types, deletes && !logs ? 1 : 2));
    // One published_at a pass, from the server, near the close.
    const pg::Value values[] = {ctids(handles), pg::Value(TimestampTzGetDatum(GetCurrentTimestamp()))};
    const pg::Result result = run(plans_.remove, std::span<const pg::Value>(values, deletes && !logs ? 1 : 2),
                                  "outbox_relay: settle published rows");
    const std::uint64_t done =
        logs ? static_cast<std::uint64_t>(DatumGetInt64(result.value(0, 1).datum)) : result.processed;
    if (done != handles.size())
        raise_swallowed(deletes ? "deleted" : "updated", done, handles.size());
    if (logs)
        require_logged(static_cast<std::uint64_t>(DatumGetInt64(result.value(0, 2).datum)), handles.size());
}

void ConsumeStore::require_logged(std::uint64_t done, std::size_t wanted) const {
    if (done == wanted)
        return;
    pg::raise({ERRCODE_TRIGGERED_ACTION_EXCEPTION,
               "only " + std::to_string(done) + " of " + std::to_string(wanted) +
                   " deleted rows were logged in " + checked_.log_name + " for route \"" + route_.name + "\"",
               "A trigger, rule or policy of the delivery log swallowed the others; the pass is undone.",
               "Let the route's owner insert rows into this table, or disable the trigger, rule or policy."});
}

void ConsumeStore::update_rest(const core::Settlement &settlement) {
    const Oid types[] = {TIDARRAYOID, TEXTARRAYOID, INT4ARRAYOID, TIMESTAMPTZARRAYOID, TEXTARRAYOID};
    prepare(plans_.update, update_sql(checked_.qualified_name), types);
    const Rest rest = rest_of(settlement);
    const pg::Value values[] = {ctids(rest.handles), rest.statuses, rest.added, rest.available_at,
                                rest.errors};
    const pg::Result result = run(plans_.update, values, "outbox_relay: settle retries and failures");
    if (result.processed != rest.handles.size())
        raise_swallowed("updated", result.processed, rest.handles.size());
}

void ConsumeStore::commit() {
    close();
    remember_rest();
}

void ConsumeStore::rollback() noexcept {
    undo();
}

} // namespace outbox_relay::store
