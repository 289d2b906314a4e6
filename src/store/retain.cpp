#include "store/retain.hpp"

#include <algorithm>
#include <map>

#include "pg/clock.hpp"
#include "pg/guard.hpp"
#include "store/array.hpp"
#include "store/claimed_row.hpp"
#include "store/consume.hpp"

extern "C" {
#include "catalog/pg_type.h"
#include "utils/datum.h"
#include "utils/memutils.h"
#include "utils/timestamp.h"
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
    for (const RowVersion &version : memory_.load())
        if (version.taken_at != 0)
            late_.push_back(version);
        else if (version.why == Remembered::published)
            // Of consume storage: claimed again, and marked without being sent.
            remembered_.push_back(version);
    settle_late();
}

/// What the lane's earlier passes had sent, or had to give back, when they ended. What fails is remembered
/// on, and holds up nobody.
void RetainStore::settle_late() {
    std::vector<RowVersion> published, aside, unsent, later;
    const std::int64_t now_s = pg::monotonic_us() / 1'000'000;
    for (const RowVersion &version : late_)
        if (version.relation != checked_.relation)
            later.push_back(version);
        else if (version.why == Remembered::published)
            published.push_back(version);
        else if (version.why == Remembered::unsent)
            unsent.push_back(version);
        else
            (1000 * (now_s - version.since_s) >= settings_.retry_max_backoff_ms ? aside : later)
                .push_back(version);
    if (later.size() == late_.size())
        return;
    late_ = std::move(later);
    close();
    mark_late(published, late_error_);
    std::optional<pg::Error> known;
    mark_late(aside, known);
    give_back_late(unsent);
    open();
}

void RetainStore::mark_late(const std::vector<RowVersion> &rows, std::optional<pg::Error> &error) {
    const Marking marking =
        mark_in_chunks(rows.size(), settle_chunk(), [&](std::size_t from, std::size_t to) {
            const std::int64_t marked = mark_published(std::span(rows).subspan(from, to - from));
            settled_.published += marked;
            settled_.duplicates_avoided += marked;
        });
    for (const std::size_t place : marking.left) {
        late_.push_back(rows[place]);
        // Tried just now: not again for a while.
        if (rows[place].why == Remembered::aside)
            late_.back().since_s = 0;
    }
    for (const std::size_t place : marking.alone)
        unmarkable_.push_back(rows[place].id);
    if (!marking.left.empty())
        error = marking.error;
}

void RetainStore::give_back_late(const std::vector<RowVersion> &rows) {
    const Marking marking = mark_in_chunks(rows.size(), rows.size(), [&](std::size_t from, std::size_t to) {
        give_back(std::span(rows).subspan(from, to - from));
    });
    for (const std::size_t place : marking.left)
        late_.push_back(rows[place]);
    if (!marking.left.empty() && !late_error_)
        late_error_ = marking.error;
}

std::int64_t RetainStore::reclaim() {
    const std::int64_t reclaimed = OutboxStore::reclaim();
    if (reclaimed > 0) {
        close();
        settled_.reclaimed += reclaimed;
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
    // DROP EXTENSION waits for what is about to be sent.
    keep_extension();
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

    std::map<core::Uuid, TimestampTz> taken;
    for (std::uint64_t i = 0; i < result.processed; ++i) {
        const pg::Value at = result.value(i, 2);
        taken[uuid_of(result.value(i, 1))] = at.null ? now : DatumGetTimestampTz(at.datum);
    }
    for (Claimed &claimed : claimed_)
        claimed.version.taken_at = taken[claimed.version.id];
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
/// with the two halves. Where the transaction itself can't be had no row is at fault; a process that has to
/// leave does not look for the one that is.
template <class Mark>
void RetainStore::mark_range(Marking &marking, std::size_t from, std::size_t to, Mark &&mark) {
    if (!marking.gives_up()) {
        bool opened = false;
        try {
            open();
            opened = true;
            mark(from, to);
            close();
            marking.marked += to - from;
            marking.failures_in_a_row = 0;
            return;
        } catch (const pg::Error &error) {
            undo();
            if (!marking.error)
                marking.error = error;
            marking.failures_in_a_row =
                opened && !host_.has_to_leave() ? marking.failures_in_a_row + 1 : kGiveUpAfter;
        }
        if (to - from > 1) {
            const std::size_t middle = from + (to - from) / 2;
            mark_range(marking, from, middle, mark);
            mark_range(marking, middle, to, mark);
            return;
        }
        if (opened)
            marking.alone.push_back(from);
    }
    for (std::size_t place = from; place < to; ++place)
        marking.left.push_back(place);
}

template <class Mark>
RetainStore::Marking RetainStore::mark_in_chunks(std::size_t count, std::size_t chunk, Mark &&mark) {
    Marking marking;
    for (std::size_t at = 0; at < count; at += chunk)
        mark_range(marking, at, std::min(at + chunk, count), mark);
    return marking;
}

/// Marks claimed rows, `chunk` in a statement at most, each counted by its counter. Throws where the table is
/// at fault; why a row alone can't be marked is kept for commit(), so that it holds up no other.
template <class Mark>
void RetainStore::mark_handles(const std::vector<std::uint32_t> &handles,
                               const std::vector<Counter> &counters, std::size_t chunk, Mark &&mark) {
    const Marking marking = mark_in_chunks(handles.size(), chunk, mark);
    std::vector<std::uint8_t> is_left(handles.size(), 0);
    for (const std::size_t place : marking.left)
        is_left[place] = 1;
    for (std::size_t place = 0; place < handles.size(); ++place)
        if (is_left[place] == 0) {
            fate_[handles[place]] = Fate::settled;
            ++(settled_.*counters[place]);
        }
    if (marking.left.empty())
        return;
    for (const std::size_t place : marking.alone)
        if (fate_[handles[place]] == Fate::published)
            unmarkable_.push_back(claimed_[handles[place]].version.id);
    if (marking.table_is_at_fault())
        throw pg::Error(*marking.error);
    if (!error_)
        error_ = marking.error;
}

void RetainStore::settle(const core::Settlement &settlement) {
    std::vector<std::uint32_t> published = settlement.published;
    std::sort(published.begin(), published.end(),
              [this](std::uint32_t a, std::uint32_t b) { return position_[a] < position_[b]; });
    // Those too that an earlier pass had sent.
    for (const std::uint32_t handle : published)
        fate_[handle] = Fate::published;
    for (const core::Retry &retry : settlement.retried)
        fate_[retry.handle] = Fate::judged;
    for (const core::Park &park : settlement.parked)
        fate_[park.handle] = Fate::judged;
    const std::vector<RowVersion> versions = versions_of(published);
    const std::vector<Counter> counters(published.size(), &Settled::published);
    mark_handles(published, counters, settle_chunk(), [&](std::size_t from, std::size_t to) {
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
    std::vector<Counter> counters;
    for (const core::Retry &retry : settlement.retried) {
        handles.push_back(retry.handle);
        counters.push_back(retry.counts ? &Settled::retried : &Settled::refused);
    }
    for (const core::Park &park : settlement.parked) {
        handles.push_back(park.handle);
        counters.push_back(&Settled::failed);
    }
    const std::vector<RowVersion> versions = versions_of(handles);
    mark_handles(handles, counters, handles.size(), [&](std::size_t from, std::size_t to) {
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

/// In a transaction that is open.
void RetainStore::give_back(std::span<const RowVersion> rows) {
    prepare(plans_.give_back, give_back_sql(checked_.qualified_name), kIdentityTypes);
    const Identity who = identity(rows);
    const pg::Value values[] = {who.ids, who.taken_at};
    const pg::Result result =
        run(plans_.give_back, values, "outbox_relay: give rows back", Planning::ordered);
    require_marked(result.processed, rows, "updated");
}

/// Rows that the pass did not reach, and those whose requests came to nothing. What became of a row that was
/// judged is lost where it can't be written down: with no reclaim to come it goes back as well.
bool RetainStore::is_to_go_back(std::uint32_t handle) const {
    return fate_[handle] == Fate::claimed || fate_[handle] == Fate::rendered ||
           (fate_[handle] == Fate::judged && settings_.reclaim_stale_after_ms == 0);
}

void RetainStore::give_back_unsent() {
    gave_back_ = true;
    std::vector<std::uint32_t> handles;
    for (std::uint32_t handle = 0; handle < fate_.size(); ++handle)
        if (is_to_go_back(handle))
            handles.push_back(handle);
    const std::vector<RowVersion> rows = versions_of(handles);
    const Marking marking = mark_in_chunks(rows.size(), rows.size(), [&](std::size_t from, std::size_t to) {
        give_back(std::span(rows).subspan(from, to - from));
        for (std::size_t place = from; place < to; ++place)
            fate_[handles[place]] = Fate::settled;
    });
    if (!marking.left.empty() && !error_)
        error_ = marking.error;
}

/// Rows that alone could not be marked, where others could. They fail no further pass.
void RetainStore::set_aside(std::vector<RowVersion> &versions) {
    if (settled_.published == 0)
        return;
    auto aside = static_cast<std::size_t>(
        std::count_if(versions.begin(), versions.end(),
                      [](const RowVersion &version) { return version.why == Remembered::aside; }));
    for (RowVersion &version : versions) {
        const bool is_unmarkable =
            version.why == Remembered::published && version.taken_at != 0 &&
            std::find(unmarkable_.begin(), unmarkable_.end(), version.id) != unmarkable_.end();
        if (!is_unmarkable || aside >= kMaxAside)
            continue;
        ++aside;
        version.why = Remembered::aside;
        version.since_s = 0;
        newly_aside_.push_back(version.id.text());
    }
}

/// What the lane's next passes have to settle, and what consume storage remembered and nobody has claimed
/// yet.
void RetainStore::remember() {
    std::vector<RowVersion> rest = late_;
    for (const RowVersion &version : remembered_)
        if (std::none_of(claimed_.begin(), claimed_.end(),
                         [&version](const Claimed &claimed) { return claimed.version.id == version.id; }))
            rest.push_back(version);
    for (std::uint32_t handle = 0; handle < fate_.size(); ++handle) {
        if (fate_[handle] != Fate::published && !is_to_go_back(handle))
            continue;
        rest.push_back(claimed_[handle].version);
        rest.back().why = fate_[handle] == Fate::published ? Remembered::published : Remembered::unsent;
    }
    set_aside(rest);
    memory_.replace(rest);
}

void RetainStore::commit() {
    if (in_transaction_)
        close();
    else
        give_back_unsent();
    remember();
    ended_ = true;
    if (error_)
        throw pg::Error(*error_);
    // Where others could be settled the lane is well.
    if (late_error_ && settled_.published == 0)
        throw pg::Error(*late_error_);
    memory_.set_live_claim(0);
    let_extension_go();
}

void RetainStore::rollback() noexcept {
    undo();
    if (!in_transaction_ && !ended_) {
        try {
            if (!gave_back_)
                give_back_unsent();
        } catch (...) {
            undo();
        }
        remember();
    }
    memory_.set_live_claim(0);
    let_extension_go();
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
