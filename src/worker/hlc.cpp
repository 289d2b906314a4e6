#include "worker/hlc.hpp"

#include <algorithm>
#include <memory>
#include <string>
#include <vector>

#include "settings/settings.hpp"
#include "store/checkpoint.hpp"
#include "worker/lanes.hpp"

#include "pg/clock.hpp"
#include "pg/entry.hpp"
#include "pg/guard.hpp"
#include "pg/transaction.hpp"

extern "C" {
#include "access/xact.h"
#include "access/xlog.h"
#include "utils/inval.h"
#include "utils/timestamp.h"
}

namespace outbox_relay::worker {

namespace {

using core::HlcClock;
namespace hlc = core::hlc;

/// A mark further ahead of the wall clock than this is worth a word.
constexpr std::int64_t kFarAhead_ms = 60 * 60 * 1000;

/// The checkpoint as this session last found it: checked, and the clock lifted to its marks.
struct Followed {
    bool valid = false;
    std::string name; ///< outbox_relay.hlc_checkpoint of that time
    store::Checkpoint checkpoint;
};

/// The largest stamp of a level of subtransactions that is still open.
struct LevelMark {
    int level;
    std::int64_t max;
};

Followed *followed = nullptr;
std::vector<LevelMark> *marks = nullptr; ///< ascending levels; grows only where raising is allowed
bool advancing = false;

std::int64_t wall_ms() {
    return pg::unix_us_of(GetCurrentTimestamp()) / 1000;
}

HlcClock clock_of_server() {
    return HlcClock(shared()->hlc_last);
}

[[noreturn]] void raise_exhausted() {
    pg::raise({ERRCODE_DATETIME_FIELD_OVERFLOW, "the hybrid logical clock has no stamp left",
               "Its last stamp is " + hlc::text(clock_of_server().last()) + ".",
               "Restart the server after the marks of outbox_relay.hlc_checkpoint were set to the present."});
}

void require_preload() {
    if (shared() == nullptr)
        pg::raise({ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                   "the hybrid logical clock needs outbox_relay to be preloaded", "",
                   "Add outbox_relay to shared_preload_libraries and restart the server."});
}

// ---------------------------------------------------------------------------------------------
// Resume before the first stamp
// ---------------------------------------------------------------------------------------------

/// The committed marks of all keys become the clock's floor.
void resume_from(const store::Checkpoint &checkpoint) {
    const std::optional<std::int64_t> mark = store::committed_mark(checkpoint);
    if (!mark)
        return;
    if (clock_of_server().resume(*mark) != HlcClock::Problem::none)
        pg::raise({ERRCODE_DATETIME_FIELD_OVERFLOW,
                   "the mark " + std::to_string(*mark) + " of checkpoint " + checkpoint.qualified_name +
                       " cannot be followed",
                   "A mark is a stamp that the clock has given; this one is negative or at the end of the "
                   "range.",
                   "Correct the row: the mark must not be below any stamp that was committed."});
    const std::int64_t ahead_ms = hlc::physical_ms(*mark) - wall_ms();
    if (ahead_ms > kFarAhead_ms)
        pg::report_at(WARNING, {ERRCODE_WARNING,
                                "the mark of checkpoint " + checkpoint.qualified_name + " is " +
                                    std::to_string(ahead_ms / 60000) + " minutes ahead of the wall clock",
                                "Stamps go on from there until the wall clock has caught up.",
                                "Look at the clocks of the servers that write marks."});
}

extern "C" {
static void outbox_relay_checkpoint_changed(Datum, Oid relation) {
    if (followed != nullptr && (relation == InvalidOid || relation == followed->checkpoint.relation))
        followed->valid = false;
}
static void outbox_relay_stamps_at_transaction_end(XactEvent event, void *);
static void outbox_relay_stamps_at_subtransaction_end(SubXactEvent event, SubTransactionId, SubTransactionId,
                                                      void *);
}

void listen() {
    if (followed != nullptr)
        return;
    if (marks == nullptr)
        marks = new std::vector<LevelMark>();
    auto state = std::make_unique<Followed>();
    pg::guard([] {
        CacheRegisterRelcacheCallback(outbox_relay_checkpoint_changed, Datum{0});
        RegisterXactCallback(outbox_relay_stamps_at_transaction_end, nullptr);
        RegisterSubXactCallback(outbox_relay_stamps_at_subtransaction_end, nullptr);
    });
    followed = state.release();
}

/// The checkpoint that this session's stamps go by, the clock lifted to its marks; nullptr when none is
/// set. A session that began in recovery comes here first after the promotion, so that counts as any.
const store::Checkpoint *follow_checkpoint() {
    const char *name = settings::parameters.hlc_checkpoint;
    if (name == nullptr || *name == '\0') {
        followed->valid = false;
        return nullptr;
    }
    if (followed->valid && followed->name == name)
        return &followed->checkpoint;
    const store::Checkpoint found = store::find_checkpoint(name);
    resume_from(found);
    followed->checkpoint = found;
    followed->name = name;
    followed->valid = true;
    return &followed->checkpoint;
}

/// Everything that has to hold before a stamp is given.
void prepare_to_stamp() {
    require_preload();
    if (RecoveryInProgress())
        pg::raise({ERRCODE_READ_ONLY_SQL_TRANSACTION, "cannot issue a clock stamp during recovery", "",
                   "Stamps are given by the primary; hlc_last() and the conversions work here."});
    listen();
    (void)follow_checkpoint();
    // Here, not in note(): what follows the stamp must not fail, or it would be given but not covered.
    marks->reserve(marks->size() + 1);
}

// ---------------------------------------------------------------------------------------------
// The transaction's own mark
// ---------------------------------------------------------------------------------------------

void note(std::int64_t stamp) noexcept {
    if (XactReadOnly)
        return;
    const int level = GetCurrentTransactionNestLevel();
    if (marks->empty() || marks->back().level < level)
        marks->push_back({level, stamp});
    else
        marks->back().max = std::max(marks->back().max, stamp);
}

std::int64_t transaction_max() {
    std::int64_t max = 0;
    for (const LevelMark &mark : *marks)
        max = std::max(max, mark.max);
    return max;
}

/// The recipe of mechanisms.md section 10, but for the look at the mark before queueing: it costs a scan of
/// the table and finds the mark covered only where somebody had queued. Who had to wait writes the clock's
/// last instead of its own stamp, which covers all who wait behind it; they find that and write nothing.
void advance(const store::Checkpoint &checkpoint, const std::string &node_key, std::int64_t stamped) {
    const bool waited = store::lock_mark(checkpoint, node_key);
    if (waited) {
        const std::optional<std::int64_t> mark = store::committed_mark(checkpoint, node_key);
        if (mark && *mark >= stamped) {
            store::unlock_mark(checkpoint, node_key);
            return;
        }
    }
    pg::fire_triggers_at_once();
    store::advance_as_owner(checkpoint, node_key, waited ? clock_of_server().last() : stamped);
}

/// Before commit or PREPARE: all that user code had to do is done. A transaction that was made read-only
/// after it had stamped has rows to cover nevertheless.
void advance_before_commit() {
    if (marks == nullptr || marks->empty() || advancing)
        return;
    const store::Checkpoint *checkpoint = follow_checkpoint();
    if (checkpoint == nullptr)
        return;
    const bool read_only = XactReadOnly;
    XactReadOnly = false;
    advancing = true;
    const store::Checkpoint table = *checkpoint;
    const std::string node_key = settings::parameters.node_key;
    // A trigger of the checkpoint's may stamp as well.
    for (std::int64_t done = 0; done < transaction_max();) {
        done = transaction_max();
        advance(table, node_key, done);
    }
    advancing = false;
    XactReadOnly = read_only;
}

void forget() noexcept {
    advancing = false;
    if (marks != nullptr)
        marks->clear();
}

extern "C" {

static void outbox_relay_stamps_at_transaction_end(XactEvent event, void *) {
    switch (event) {
    case XACT_EVENT_PRE_COMMIT:
    case XACT_EVENT_PRE_PREPARE:
        pg::entry([] { advance_before_commit(); });
        break;
    case XACT_EVENT_COMMIT:
    case XACT_EVENT_ABORT:
    case XACT_EVENT_PREPARE:
        forget();
        break;
    default:
        break;
    }
}

/// What a subtransaction stamped becomes its parent's, or is forgotten with it.
static void outbox_relay_stamps_at_subtransaction_end(SubXactEvent event, SubTransactionId, SubTransactionId,
                                                      void *) {
    if ((event != SUBXACT_EVENT_COMMIT_SUB && event != SUBXACT_EVENT_ABORT_SUB) || marks->empty())
        return;
    const int level = GetCurrentTransactionNestLevel();
    if (marks->back().level < level)
        return;
    const std::int64_t max = marks->back().max;
    if (event == SUBXACT_EVENT_ABORT_SUB)
        marks->pop_back();
    else if (marks->size() > 1 && (*marks)[marks->size() - 2].level == level - 1) {
        marks->pop_back();
        marks->back().max = std::max(marks->back().max, max);
    } else
        marks->back().level = level - 1;
}
}

} // namespace

std::int64_t take_stamps(std::size_t count) {
    prepare_to_stamp();
    const HlcClock::Stamp stamp = clock_of_server().now(wall_ms(), count);
    if (stamp.problem != HlcClock::Problem::none)
        raise_exhausted();
    note(stamp.value + static_cast<std::int64_t>(std::max<std::size_t>(count, 1)) - 1);
    return stamp.value;
}

HlcClock::Stamp merge_stamp(std::int64_t remote) {
    prepare_to_stamp();
    const HlcClock::Stamp stamp =
        clock_of_server().update(remote, wall_ms(), settings::parameters.hlc_max_drift_ms);
    if (stamp.problem == HlcClock::Problem::exhausted)
        raise_exhausted();
    if (stamp.problem == HlcClock::Problem::none)
        note(stamp.value);
    return stamp;
}

std::int64_t last_stamp() {
    require_preload();
    return clock_of_server().last();
}

} // namespace outbox_relay::worker
