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

/// Halving a chunk of 32 down to a row that can't be marked takes six failures in a row; with more the table
/// itself is at fault.
constexpr int kGiveUpAfter = 7;

} // namespace

bool RetainStore::Marking::gives_up() const {
    return failures_in_a_row >= kGiveUpAfter;
}

bool RetainStore::Marking::table_is_at_fault() const {
    return gives_up() || (marked == 0 && left.size() > 1);
}

void RetainStore::begin() {
    OutboxStore::begin();
    remembered_ = memory_.load();
    mark_remembered();
}

/// What the lane's last pass had sent when it ended. A row that can't be marked although others can is left
/// to the reclaim; where none can, all are tried again by the next pass, until they are stale. Versions that
/// consume storage remembered are claimed again and marked without being sent.
void RetainStore::mark_remembered() {
    std::vector<RowVersion> late;
    for (const RowVersion &version : remembered_)
        if (version.taken_at != 0 && version.relation == checked_.relation)
            late.push_back(version);
    std::erase_if(remembered_, [](const RowVersion &version) {
        return version.taken_at != 0 || version.why != Remembered::published;
    });
    if (late.empty())
        return;

    close();
    Marking marking;
    for (std::size_t at = 0; at < late.size(); at += settle_chunk())
        mark_range(marking, at, std::min(at + settle_chunk(), late.size()),
                   [&](std::size_t from, std::size_t to) {
                       marked_late_ += mark_published(std::span(late).subspan(from, to - from));
                   });
    std::vector<RowVersion> rest = remembered_;
    const std::int64_t stale_us = settings_.reclaim_stale_after_ms * 1000;
    if (marking.table_is_at_fault())
        for (const std::size_t place : marking.left)
            if (stale_us == 0 || GetCurrentTimestamp() - late[place].taken_at < stale_us)
                rest.push_back(late[place]);
    memory_.replace(rest);
    if (!marking.left.empty())
        throw pg::Error(*marking.error);
    open();
}

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
    for (Claimed &claimed : claimed_)
        claimed.version.taken_at = taken[claimed.version.id.text()];
    // As the column has it, which may be coarser.
    memory_.set_live_claim(claimed_.front().version.taken_at);
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
                                pg::Value(TimestampTzGetDatum(claimed.version.taken_at))};
    const pg::Result result = run(plans_.payload, values, "outbox_relay: payload", Planning::ordered);
    std::variant<std::string, core::Unsendable> body =
        core::Unsendable{"the row was taken from this pass before it was sent"};
    if (result.processed > 0)
        body = render_payload(result.value(0, 1).datum, route_.max_payload_bytes, render_context_);
    close();
    return body;
}

RetainStore::Identity RetainStore::identity(std::span<const RowVersion> rows) {
    std::vector<Datum> ids, taken_at;
    for (const RowVersion &row : rows) {
        ids.push_back(PointerGetDatum(row.id.bytes.data()));
        taken_at.push_back(TimestampTzGetDatum(row.taken_at));
    }
    return {uuid_array(ids), timestamptz_array(taken_at)};
}

std::vector<RowVersion> RetainStore::versions_of(std::span<const std::uint32_t> handles) const {
    std::vector<RowVersion> versions;
    versions.reserve(handles.size());
    for (const std::uint32_t handle : handles)
        versions.push_back(claimed_[handle].version);
    return versions;
}

void RetainStore::note_published(const core::Row &row) noexcept {
    fate_[row.handle] = Fate::published;
    memory_.add(claimed_[row.handle].version);
}

/// Calls `mark` with the places [from, to), which it marks in a transaction of its own, and where that fails
/// with the two halves.
template <class Mark>
void RetainStore::mark_range(Marking &marking, std::size_t from, std::size_t to, Mark &&mark) {
    if (!marking.gives_up()) {
        try {
            open();
            mark(from, to);
            close();
            marking.marked += to - from;
            marking.failures_in_a_row = 0;
            return;
        } catch (const pg::Error &error) {
            undo();
            forget_other_plans();
            if (!marking.error)
                marking.error = error;
            ++marking.failures_in_a_row;
        }
        if (to - from > 1) {
            const std::size_t middle = from + (to - from) / 2;
            mark_range(marking, from, middle, mark);
            mark_range(marking, middle, to, mark);
            return;
        }
    }
    for (std::size_t place = from; place < to; ++place)
        marking.left.push_back(place);
}

/// Marks claimed rows, `chunk` in a statement at most. Throws where the table is at fault; a row that alone
/// can't be marked is kept for commit(), so that it holds up no other.
template <class Mark>
void RetainStore::mark_handles(const std::vector<std::uint32_t> &handles, std::size_t chunk, Mark &&mark) {
    Marking marking;
    for (std::size_t at = 0; at < handles.size(); at += chunk)
        mark_range(marking, at, std::min(at + chunk, handles.size()), mark);
    std::vector<std::uint8_t> is_left(handles.size(), 0);
    for (const std::size_t place : marking.left)
        is_left[place] = 1;
    for (std::size_t place = 0; place < handles.size(); ++place)
        if (is_left[place] == 0)
            fate_[handles[place]] = Fate::settled;
    if (marking.left.empty())
        return;
    if (marking.table_is_at_fault())
        throw pg::Error(*marking.error);
    for (const std::size_t place : marking.left)
        fate_[handles[place]] = Fate::unmarkable;
    if (!unmarkable_)
        unmarkable_ = marking.error;
}

void RetainStore::settle(const core::Settlement &settlement) {
    std::vector<std::uint32_t> published = settlement.published;
    std::sort(published.begin(), published.end(),
              [this](std::uint32_t a, std::uint32_t b) { return position_[a] < position_[b]; });
    // Those too that an earlier pass had sent.
    for (const std::uint32_t handle : published)
        fate_[handle] = Fate::published;
    const std::vector<RowVersion> versions = versions_of(published);
    mark_handles(published, settle_chunk(), [&](std::size_t from, std::size_t to) {
        (void)mark_published(std::span(versions).subspan(from, to - from));
    });
    host_.at(core::PassPoint::in_settle, settlement.published.size());
    if (!settlement.retried.empty() || !settlement.parked.empty())
        mark_rest(settlement);
}

/// In a transaction that is open; how many rows were still ours to mark.
std::int64_t RetainStore::mark_published(std::span<const RowVersion> rows) {
    const Oid types[] = {UUIDARRAYOID, TIMESTAMPTZARRAYOID, TIMESTAMPTZOID};
    prepare(plans_.mark_published, mark_published_sql(checked_.qualified_name), types);
    const Identity who = identity(rows);
    const pg::Value values[] = {who.ids, who.taken_at, pg::Value(TimestampTzGetDatum(GetCurrentTimestamp()))};
    const pg::Result result =
        run(plans_.mark_published, values, "outbox_relay: settle published rows", Planning::ordered);
    require_marked(result.processed, rows, "updated");
    return static_cast<std::int64_t>(result.processed);
}

void RetainStore::mark_rest(const core::Settlement &settlement) {
    const Oid types[] = {UUIDARRAYOID, TIMESTAMPTZARRAYOID, TEXTARRAYOID,
                         INT4ARRAYOID, TIMESTAMPTZARRAYOID, TEXTARRAYOID};
    const std::size_t retried = settlement.retried.size();
    std::vector<std::uint32_t> handles;
    for (const core::Retry &retry : settlement.retried)
        handles.push_back(retry.handle);
    for (const core::Park &park : settlement.parked)
        handles.push_back(park.handle);
    const std::vector<RowVersion> versions = versions_of(handles);
    mark_handles(handles, handles.size(), [&](std::size_t from, std::size_t to) {
        core::Settlement part;
        for (std::size_t place = from; place < to; ++place) {
            if (place < retried)
                part.retried.push_back(settlement.retried[place]);
            else
                part.parked.push_back(settlement.parked[place - retried]);
        }
        prepare(plans_.mark_rest, mark_rest_sql(checked_.qualified_name), types);
        const Rest rest = rest_of(part);
        const std::span<const RowVersion> rows = std::span(versions).subspan(from, to - from);
        const Identity who = identity(rows);
        const pg::Value values[] = {who.ids,    who.taken_at,      rest.statuses,
                                    rest.added, rest.available_at, rest.errors};
        const pg::Result result =
            run(plans_.mark_rest, values, "outbox_relay: settle retries and failures", Planning::ordered);
        require_marked(result.processed, rows, "updated");
    });
}

/// Fewer than wanted: others that somebody has taken meanwhile are theirs; those that are still ours were
/// swallowed.
void RetainStore::require_marked(std::uint64_t done, std::span<const RowVersion> rows, const char *what) {
    if (done == rows.size())
        return;
    prepare(plans_.still_ours, still_ours_sql(checked_.qualified_name), kIdentityTypes);
    const Identity who = identity(rows);
    const pg::Value values[] = {who.ids, who.taken_at};
    const pg::Result left = run(plans_.still_ours, values, "outbox_relay: settle", Planning::ordered);
    if (DatumGetInt64(left.value(0, 1).datum) > 0)
        raise_swallowed(what, done, rows.size());
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
    const std::vector<RowVersion> rows = versions_of(handles);
    const Identity who = identity(rows);
    const pg::Value values[] = {who.ids, who.taken_at};
    const pg::Result result =
        run(plans_.give_back, values, "outbox_relay: give rows back", Planning::ordered);
    require_marked(result.processed, rows, "updated");
    close();
    for (const std::uint32_t handle : handles)
        fate_[handle] = Fate::settled;
}

/// What the lane's next pass has to mark, and what consume storage remembered and nobody has claimed yet.
void RetainStore::remember_unmarked() {
    std::vector<RowVersion> unmarked;
    for (const RowVersion &version : remembered_)
        if (std::none_of(claimed_.begin(), claimed_.end(),
                         [&version](const Claimed &claimed) { return claimed.version.id == version.id; }))
            unmarked.push_back(version);
    for (std::size_t handle = 0; handle < fate_.size(); ++handle)
        if (fate_[handle] == Fate::published)
            unmarked.push_back(claimed_[handle].version);
    memory_.replace(unmarked);
}

void RetainStore::commit() {
    if (in_transaction_)
        close();
    else
        give_back(true);
    if (unmarkable_)
        throw pg::Error(*unmarkable_);
    remember_unmarked();
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
        remember_unmarked();
    }
    memory_.set_live_claim(0);
}

std::unique_ptr<OutboxStore> make_outbox_store(const Route &route, const std::optional<core::Uuid> &tenant,
                                               const Effective &settings, OutboxPlans &plans,
                                               core::PassHost &host, RowMemory &memory, Frame frame,
                                               bool odd_to_retries) {
    if (route.storage == "retain" && frame == Frame::own && route.target_function.empty())
        return std::make_unique<RetainStore>(route, tenant, settings, plans, host, memory, frame,
                                             odd_to_retries);
    return std::make_unique<ConsumeStore>(route, tenant, settings, plans, host, memory, frame,
                                          odd_to_retries);
}

} // namespace outbox_relay::store
