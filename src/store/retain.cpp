#include "store/retain.hpp"

#include <algorithm>
#include <numeric>
#include <unordered_map>

#include "pg/guard.hpp"
#include "store/array.hpp"
#include "store/claimed_row.hpp"
#include "store/consume.hpp"

extern "C" {
#include "catalog/pg_type.h"
#include "utils/datum.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
#include "utils/uuid.h"
}

namespace outbox_relay::store {

namespace {

constexpr Oid kIdentityTypes[] = {UUIDARRAYOID, TIMESTAMPTZARRAYOID};

} // namespace

std::int64_t RetainStore::reclaim() {
    const std::int64_t reclaimed = OutboxStore::reclaim();
    if (reclaimed > 0) {
        close();
        open();
    }
    return reclaimed;
}

std::vector<core::Row> RetainStore::claim(std::size_t max_rows) {
    std::vector<core::Row> rows = OutboxStore::claim(max_rows);
    if (rows.empty())
        return rows;
    fate_.assign(claimed_.size(), Fate::claimed);
    position_.assign(claimed_.size(), 0);
    for (std::size_t i = 0; i < rows.size(); ++i)
        position_[rows[i].handle] = static_cast<std::uint32_t>(i);
    take_claimed(rows);
    keep_payloads();
    host_.at(core::PassPoint::in_claim, 0);
    close();
    in_transaction_ = false;
    return rows;
}

/// The claimed rows, which this transaction has locked, become `processing`.
void RetainStore::take_claimed(std::vector<core::Row> &rows) {
    const Oid types[] = {TIDARRAYOID, TIMESTAMPTZOID};
    prepare(plans_.take, take_sql(checked_.qualified_name), types);
    std::vector<Datum> places;
    places.reserve(claimed_.size());
    for (const Claimed &claimed : claimed_)
        places.push_back(PointerGetDatum(&claimed.version.ctid));
    const TimestampTz now = GetCurrentTimestamp();
    // Before it is true, so that it is never true and unknown.
    memory_.set_live_claim(now);
    const pg::Value values[] = {tid_array(places), pg::Value(TimestampTzGetDatum(now))};
    const pg::Result result = run(plans_.take, values, "outbox_relay: claim");
    if (result.processed != rows.size())
        raise_swallowed("updated", result.processed, rows.size());

    std::unordered_map<std::string, TimestampTz> taken;
    for (std::uint64_t i = 0; i < result.processed; ++i) {
        core::Uuid id;
        std::copy_n(DatumGetUUIDP(result.value(i, 1).datum)->data, id.bytes.size(), id.bytes.begin());
        const pg::Value at = result.value(i, 2);
        taken[id.text()] = at.null ? now : DatumGetTimestampTz(at.datum);
    }
    taken_at_.clear();
    for (const Claimed &claimed : claimed_)
        taken_at_.push_back(taken[claimed.version.id.text()]);
}

/// The claim's result goes with its transaction. What is stored in the row is copied; what is stored out
/// of line is fetched when its turn comes, so that few large payloads are in memory at a time.
void RetainStore::keep_payloads() {
    for (Claimed &claimed : claimed_) {
        const Datum payload = claimed.payload;
        claimed.payload = pg::guard([this, payload] {
            MemoryContext old = MemoryContextSwitchTo(pass_context_);
            const Datum copy = datumCopy(payload, false, -1);
            MemoryContextSwitchTo(old);
            return copy;
        });
    }
}

std::variant<std::string, core::Unsendable> RetainStore::render(const core::Row &row) {
    Claimed &claimed = claimed_[row.handle];
    fate_[row.handle] = Fate::rendered;
    if (!VARATT_IS_EXTERNAL(DatumGetPointer(claimed.payload)) ||
        payload_bytes(claimed.payload) > route_.max_payload_bytes)
        return render_payload(claimed.payload, route_.max_payload_bytes, render_context_);

    const Oid types[] = {UUIDOID, TIMESTAMPTZOID};
    open();
    prepare(plans_.payload, payload_sql(checked_.qualified_name), types);
    const pg::Value values[] = {pg::Value(PointerGetDatum(claimed.version.id.bytes.data())),
                                pg::Value(TimestampTzGetDatum(taken_at_[row.handle]))};
    const pg::Result result = run(plans_.payload, values, "outbox_relay: payload", true);
    std::variant<std::string, core::Unsendable> body =
        core::Unsendable{"the row was taken from this pass before it was sent"};
    if (result.processed > 0)
        body = render_payload(result.value(0, 1).datum, route_.max_payload_bytes, render_context_);
    close();
    return body;
}

RetainStore::Identity RetainStore::identity(std::span<const std::uint32_t> handles) const {
    std::vector<Datum> ids, taken_at;
    for (const std::uint32_t handle : handles) {
        ids.push_back(PointerGetDatum(claimed_[handle].version.id.bytes.data()));
        taken_at.push_back(TimestampTzGetDatum(taken_at_[handle]));
    }
    return {uuid_array(ids), timestamptz_array(taken_at)};
}

void RetainStore::settle(const core::Settlement &settlement) {
    if (!settlement.published.empty()) {
        std::vector<std::uint32_t> handles = settlement.published;
        std::sort(handles.begin(), handles.end(),
                  [this](std::uint32_t a, std::uint32_t b) { return position_[a] < position_[b]; });
        for (std::size_t at = 0; at < handles.size(); at += settle_chunk())
            mark_published({handles.begin() + static_cast<std::ptrdiff_t>(at),
                            handles.begin() +
                                static_cast<std::ptrdiff_t>(std::min(at + settle_chunk(), handles.size()))});
    }
    host_.at(core::PassPoint::in_settle, settlement.published.size());
    if (!settlement.retried.empty() || !settlement.parked.empty())
        mark_rest(settlement);
}

void RetainStore::mark_published(const std::vector<std::uint32_t> &handles) {
    const Oid types[] = {UUIDARRAYOID, TIMESTAMPTZARRAYOID, TIMESTAMPTZOID};
    open();
    prepare(plans_.mark_published, mark_published_sql(checked_.qualified_name), types);
    const Identity rows = identity(handles);
    const pg::Value values[] = {rows.ids, rows.taken_at,
                                pg::Value(TimestampTzGetDatum(GetCurrentTimestamp()))};
    const pg::Result result = run(plans_.mark_published, values, "outbox_relay: settle published rows", true);
    require_marked(result.processed, handles, "updated");
    close();
    note_settled(handles);
}

void RetainStore::mark_rest(const core::Settlement &settlement) {
    const Oid types[] = {UUIDARRAYOID, TIMESTAMPTZARRAYOID, TEXTARRAYOID,
                         INT4ARRAYOID, TIMESTAMPTZARRAYOID, TEXTARRAYOID};
    open();
    prepare(plans_.mark_rest, mark_rest_sql(checked_.qualified_name), types);
    const Rest rest = rest_of(settlement);
    const Identity rows = identity(rest.handles);
    const pg::Value values[] = {rows.ids,   rows.taken_at,     rest.statuses,
                                rest.added, rest.available_at, rest.errors};
    const pg::Result result =
        run(plans_.mark_rest, values, "outbox_relay: settle retries and failures", true);
    require_marked(result.processed, rest.handles, "updated");
    close();
    note_settled(rest.handles);
}

/// Fewer than wanted: others that somebody has taken meanwhile are theirs; those that are still ours were
/// swallowed.
void RetainStore::require_marked(std::uint64_t done, std::span<const std::uint32_t> handles,
                                 const char *what) {
    if (done == handles.size())
        return;
    prepare(plans_.still_ours, still_ours_sql(checked_.qualified_name), kIdentityTypes);
    const Identity rows = identity(handles);
    const pg::Value values[] = {rows.ids, rows.taken_at};
    const pg::Result left = run(plans_.still_ours, values, "outbox_relay: settle", true);
    if (DatumGetInt64(left.value(0, 1).datum) > 0)
        raise_swallowed(what, done, handles.size());
}

void RetainStore::note_settled(std::span<const std::uint32_t> handles) {
    for (const std::uint32_t handle : handles)
        fate_[handle] = Fate::settled;
}

/// Rows that the pass did not reach go back; after a failure only those that nothing was sent of.
void RetainStore::give_back(bool rendered_too) {
    std::vector<std::uint32_t> handles;
    for (std::uint32_t handle = 0; handle < fate_.size(); ++handle)
        if (fate_[handle] == Fate::claimed || (rendered_too && fate_[handle] == Fate::rendered))
            handles.push_back(handle);
    if (handles.empty())
        return;
    open();
    prepare(plans_.give_back, give_back_sql(checked_.qualified_name), kIdentityTypes);
    const Identity rows = identity(handles);
    const pg::Value values[] = {rows.ids, rows.taken_at};
    const pg::Result result = run(plans_.give_back, values, "outbox_relay: give rows back", true);
    require_marked(result.processed, handles, "updated");
    close();
    note_settled(handles);
}

void RetainStore::commit() {
    if (in_transaction_)
        close();
    else
        give_back(true);
    memory_.set_live_claim(0);
}

void RetainStore::rollback() noexcept {
    undo();
    if (!in_transaction_) {
        try {
            give_back(false);
        } catch (...) {
            // They stay `processing`, and are reclaimed like those of a pass whose process died.
            undo();
        }
    }
    memory_.set_live_claim(0);
}

std::unique_ptr<OutboxStore> make_outbox_store(const Route &route, const Effective &settings,
                                               OutboxPlans &plans, core::PassHost &host, RowMemory &memory,
                                               Frame frame, bool odd_to_retries) {
    if (route.storage == "retain" && frame == Frame::own)
        return std::make_unique<RetainStore>(route, settings, plans, host, memory, frame, odd_to_retries);
    return std::make_unique<ConsumeStore>(route, settings, plans, host, memory, frame, odd_to_retries);
}

} // namespace outbox_relay::store
