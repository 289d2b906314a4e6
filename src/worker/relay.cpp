#include "worker/relay.hpp"

#include <algorithm>
#include <cstring>
#include <functional>
#include <optional>
#include <set>

#include "settings/settings.hpp"
#include "worker/memory.hpp"
#include "worker/pass_settings.hpp"

#include "pg/clock.hpp"
#include "pg/compat.hpp"
#include "pg/guard.hpp"
#include "pg/session.hpp"
#include "pg/transaction.hpp"
#include "pg/watchdog.hpp"
#include "store/encoding.hpp"
#include "store/tenancy.hpp"

extern "C" {
#include "commands/dbcommands.h"
#include "common/hashfn.h"
#include "pgstat.h"
#include "postmaster/interrupt.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "utils/guc.h"
#include "utils/inval.h"
#include "utils/timestamp.h"
}

namespace outbox_relay::worker {

namespace {

/// The longest sleep: the database is probed and messages are read at least this often.
constexpr std::int64_t kLookEvery_us = 500'000;
/// What looks at idle lanes may take together, but for the last one's table.
constexpr std::int64_t kLookTime_us = 200'000;
/// Idle connections are given up before most endpoints and middle boxes do, so that few requests meet
/// a dying one.
constexpr std::int64_t kIdleConnections_ms = 15'000;
/// Lanes whose connections and own statements a worker keeps.
constexpr std::size_t kMostKept = 64;
/// With more lanes than this an idle one is looked at, some together, before a pass of its own is worth it:
/// it costs a tenth.
constexpr std::size_t kManyLanes = 32;
/// A lane's every so manieth turn is a pass in any case: it sees what looking does not, such as a right that
/// was revoked.
constexpr std::uint32_t kPassEvery = 600;
/// An idle lane's every so manieth look asks the route's functions again which table is its.
constexpr std::uint32_t kAskEvery = 12;

std::uint64_t seed() {
    std::uint64_t value = 0;
    if (!pg_strong_random(&value, sizeof(value)))
        value = static_cast<std::uint64_t>(pg::monotonic_us());
    return value;
}

core::LanePolicy policy_of(const store::Effective &settings) {
    return {settings.interval_ms * 1000, settings.retry_max_backoff_ms * 1000};
}

/// An answer's text stays out of the log: endpoints like to send back what they were sent.
const std::string &loggable(const core::PassResult &result) {
    return result.error_class.starts_with("HTTP ") ? result.error_class : result.error;
}

/// When a lane that nobody holds is to run.
std::int64_t due_of(const Lane &lane) {
    const auto wake_us =
        static_cast<std::int64_t>(pg_atomic_read_u64(const_cast<pg_atomic_uint64 *>(&lane.wake_us)));
    return wake_us == 0 ? lane.due_us : std::min(lane.due_us, std::max(wake_us, lane.hold_until_us));
}

/// A lane whose last pass failed, was refused, or met one failed publish after another.
bool in_trouble(const Lane &lane) {
    return lane.health.failures > 0 || lane.health.publish_failures >= 3;
}

/// Between the first turns of lanes of which there are so many: within an interval they have all had theirs.
std::int64_t spacing_us(const store::Route &route, std::size_t lanes) {
    const std::int64_t interval_us = store::effective(route).interval_ms * 1000;
    return std::min<std::int64_t>(2000,
                                  interval_us / static_cast<std::int64_t>(std::max<std::size_t>(lanes, 1)));
}

void log_line(const std::string &message) {
    pg::report_at(LOG, {ERRCODE_SUCCESSFUL_COMPLETION, message});
}

void log_aside(const LaneWork &work, const store::OutboxStore &store) {
    for (const std::string &id : store.newly_aside())
        log_line(
            work.name() + " sets row " + id + " of " + store.table() +
            " aside: it can't be settled, others can: " + store::from_utf8(lane_at(work.lane).last_error));
}

/// What a failed pass has settled all the same.
void count(Counters &counters, const store::OutboxStore::Settled &settled) {
    counters.claimed +=
        static_cast<std::uint64_t>(settled.published + settled.failed + settled.retried + settled.refused);
    counters.published += static_cast<std::uint64_t>(settled.published);
    counters.failed += static_cast<std::uint64_t>(settled.failed);
    counters.retried += static_cast<std::uint64_t>(settled.retried);
    counters.refused += static_cast<std::uint64_t>(settled.refused);
    counters.reclaimed += static_cast<std::uint64_t>(settled.reclaimed);
    counters.duplicates_avoided += static_cast<std::uint64_t>(settled.duplicates_avoided);
}

} // namespace

std::string LaneWork::name() const {
    return (tenant ? "tenant " + tenant->text() + " of route \"" : "route \"") + route().name + "\"";
}

Relay::Relay(int slot)
    : slot_index_(slot), slot_(worker_at(slot)), random_(seed()),
      idle_event_(pg::guard([] { return pg::compat::wait_event("OutboxRelayIdle"); })),
      publish_event_(pg::guard([] { return pg::compat::wait_event("OutboxRelayPublish"); })) {}

/// True when a lane of this worker is to be drained at shutdown.
bool Relay::drains() const {
    return std::any_of(routes_.begin(), routes_.end(),
                       [](const auto &entry) { return entry.second->route.drain_on_shutdown; });
}

/// Idle lanes that are looked at in one transaction: few enough that lanes keep being spread over their
/// interval, and so many that ten thousand do not cost more turns than a thousand.
std::size_t Relay::most_looks() const {
    return std::max<std::size_t>(8, work_.size() / 64);
}

double Relay::uniform() {
    return std::uniform_real_distribution<double>(0.0, 1.0)(random_);
}

void Relay::run() {
    bool goes_on = true;
    while (goes_on) {
        try {
            goes_on = turn();
        } catch (const pg::Error &error) {
            // pg_cancel_backend is for a statement. Between passes there is none worth ending for.
            if (error.sqlstate() != ERRCODE_QUERY_CANCELED || slot_.lane >= 0)
                throw;
            pg::abort_transaction();
            routes_generation_ = 0; // may not have been read to the end
        }
    }
}

/// One round of the loop; false when the process has to end.
bool Relay::turn() {
    if (!may_serve())
        return false;
    std::int64_t next_due_us = 0;
    bool look = false;
    LaneWork *work = take_due(next_due_us, look);
    if (look) {
        look_at_idle();
    } else if (work != nullptr) {
        tick(*work);
        serve_signals();
    } else {
        sleep_until(next_due_us);
    }
    return true;
}

/// True while this worker has something to do here; looks at everything that could end it.
bool Relay::may_serve() {
    if (signals.terminate)
        return false;
    const std::int64_t now_us = pg::monotonic_us();
    const bool look = now_us - checked_us_ >= kLookEvery_us;
    if (look) {
        checked_us_ = now_us;
        if (database_is_wanted(MyDatabaseId) || !settings::parameters.enabled || is_one_too_many() ||
            parameters_changed())
            return false;
        for (auto &[name, work] : work_)
            if (work.transport && work.transport->is_idle_too_long(kIdleConnections_ms))
                work.transport->drop_idle();
    }
    pg::guard([] { AcceptInvalidationMessages(); });
    if (routes_generation_ == store::routes_generation() && pokes() == pokes_) {
        if (lists_changed())
            place_lanes();
        return true;
    }
    return (refresh_routes() || !give_up_slot()) && !signals.terminate;
}

/// True when outbox_relay.workers was lowered and as many as it allows have slots before ours.
bool Relay::is_one_too_many() const {
    LockedLanes locked(LW_SHARED);
    int before = 0;
    for (int i = 0; i < slot_index_; ++i)
        if (worker_at(i).used && worker_at(i).database == MyDatabaseId)
            ++before;
    return before >= settings::parameters.workers;
}

/// True when ALTER DATABASE changed a parameter since this session began: a new session has it. Looks at the
/// extension's version too, which an update changes without a sign.
bool Relay::parameters_changed() {
    pg::start_transaction();
    const std::uint64_t now = store::configured_parameters();
    if (fits_library() != fits_library_)
        routes_generation_ = 0;
    pg::commit_transaction();
    if (!configured_parameters_)
        configured_parameters_ = now;
    return *configured_parameters_ != now;
}

/// False while the extension's SQL is of another version than this library: relaying waits, for either may
/// have tables or statements that the other does not know. In a transaction.
bool Relay::fits_library() {
    const std::string version = store::extension_version();
    return version.empty() || version == store::kLibraryVersion;
}

/// How many transactions have changed this database's outbox_route. What they changed is visible to who asks
/// first and reads then.
std::uint32_t Relay::pokes() {
    LockedLanes locked(LW_SHARED);
    const int index = find_database(MyDatabaseId, false);
    return index < 0 ? 0 : pg_atomic_read_u32(&shared()->databases[index].pokes);
}

/// Reads outbox_route anew; false when nothing here is to be relayed.
bool Relay::refresh_routes() {
    pokes_ = pokes();
    std::vector<store::Route> routes;
    std::set<std::string> existing;
    try {
        // Who is to drain waits no longer than the lock_timeout; others have nothing to finish here.
        signals.may_die = drains() ? 0 : 1;
        routes = read_routes(existing);
        signals.may_die = 0;
    } catch (const pg::Error &error) {
        signals.may_die = 0;
        if (error.sqlstate() != ERRCODE_LOCK_NOT_AVAILABLE)
            throw;
        // Somebody changes the table, or keeps it: what is known holds until it can be read.
        pg::abort_transaction();
        routes_generation_ = 0;
        return true;
    }
    adopt_routes(std::move(routes));
    leave_other_lanes(existing);
    return !work_.empty() || !fits_library_;
}

/// The routes that are to be relayed here, and the names of all that there are.
std::vector<store::Route> Relay::read_routes(std::set<std::string> &existing) {
    pg::start_transaction();
    pg::set_local("lock_timeout", std::to_string(settings::parameters.pass_statement_timeout_ms).c_str());
    // The generation is read first: a change while we read makes us read again.
    routes_generation_ = store::routes_generation();
    const std::optional<store::Extension> extension = store::find_extension();
    std::vector<store::Route> routes;
    bool listed = false;
    if (extension) {
        routes = store::all_routes(*extension);
        routes_generation_ = store::routes_generation();
        database_ = database_name();
        listed = settings::database_listed(settings::parameters.databases, database_.c_str());
    }
    const std::string binding = store::current_binding();
    const bool fits = fits_library();
    pg::commit_transaction();
    if (!fits && fits_library_)
        warn_of_version();
    fits_library_ = fits;
    std::vector<store::Route> active;
    for (store::Route &route : routes) {
        existing.insert(route.name);
        if (!route.enabled || !listed || !fits)
            continue;
        if (route.bound_to != binding)
            warn_foreign(route);
        else
            active.push_back(std::move(route));
    }
    return active;
}

/// Lanes of routes that are no more are given back, those of routes that are not relayed now, with their
/// counters, only when somebody needs the slot. Not at once: what we read may be older than a lane that
/// another worker has made.
void Relay::leave_other_lanes(const std::set<std::string> &existing) {
    LockedLanes locked(LW_EXCLUSIVE);
    for (int i = 0; i < shared()->max_lanes; ++i) {
        Lane &lane = lane_at(i);
        if (!lane.used || lane.key.database != MyDatabaseId)
            continue;
        const bool was_served = lane.served;
        if (!routes_.contains(lane.key.route))
            lane.served = false;
        if (!existing.contains(lane.key.route) && !was_served && lane.holder < 0)
            drop_lane(i);
    }
}

void Relay::warn_of_version() {
    pg::report_at(WARNING, {ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                            "extension \"outbox_relay\" in database \"" + database_ +
                                "\" is not of the loaded library's version " + store::kLibraryVersion,
                            "Its routes wait: they are shown as broken in outbox_stat_route.",
                            "Run ALTER EXTENSION outbox_relay UPDATE, or, when the extension is the newer of "
                            "the two, restart the server."});
}

/// True once in the life of the server for each route, up to kMostForeign of a database: workers come and go.
bool Relay::first_warning(const store::Route &route) {
    // 0 is none.
    const std::uint32_t hash = hash_bytes(reinterpret_cast<const unsigned char *>(route.name.data()),
                                          static_cast<int>(route.name.size())) |
                               1;
    LockedLanes locked(LW_EXCLUSIVE);
    const int index = find_database(MyDatabaseId, true);
    if (index < 0)
        return true;
    for (std::uint32_t &warned : shared()->databases[index].foreign_warned) {
        if (warned == hash)
            return false;
        if (warned != 0)
            continue;
        warned = hash;
        return true;
    }
    return false;
}

void Relay::warn_foreign(const store::Route &route) {
    if (!first_warning(route))
        return;
    pg::report_at(WARNING, {ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE,
                            "route \"" + route.name + "\" is bound to another database and is not relayed",
                            "This database looks like a copy: the route's bound_to does not match it.",
                            "If this copy is to relay, call outbox_adopt()."});
}

/// Makes work_ and the lanes follow the routes.
void Relay::adopt_routes(std::vector<store::Route> routes) {
    std::map<std::string, std::shared_ptr<RouteWork>> next;
    for (store::Route &route : routes) {
        const auto known = routes_.find(route.name);
        if (known != routes_.end() && known->second->route.version == route.version) {
            next.insert(*known);
            continue;
        }
        const auto work = std::make_shared<RouteWork>();
        work->route = std::move(route);
        next.emplace(work->route.name, work);
    }
    routes_ = std::move(next);
    place_lanes();
    LockedLanes locked(LW_EXCLUSIVE);
    const int index = find_database(MyDatabaseId, true);
    if (index < 0)
        return;
    Database &database = shared()->databases[index];
    database.failures = 0;
    // Where the versions differ somebody stays and looks.
    if ((work_.empty() && fits_library_) || database.state == DatabaseState::active)
        return;
    database.state = DatabaseState::active;
    // The launcher, who has waited for this answer, starts the other workers.
    wake_process(pg_atomic_read_u32(&shared()->launcher_proc));
}

/// True when the tenants of a route changed since place_lanes().
bool Relay::lists_changed() {
    LockedLanes locked(LW_SHARED);
    const int index = find_database(MyDatabaseId, false);
    return index >= 0 && pg_atomic_read_u32(&shared()->databases[index].lists) != lists_;
}

/// Makes work_ follow the routes and their tenants; a lane whose route is the same keeps its connections.
void Relay::place_lanes() {
    {
        LockedLanes locked(LW_EXCLUSIVE);
        const int index = find_database(MyDatabaseId, true);
        if (index >= 0)
            lists_ = pg_atomic_read_u32(&shared()->databases[index].lists);
    }
    decltype(work_) next;
    const auto add = [&](const std::shared_ptr<RouteWork> &route, const std::optional<core::Uuid> &tenant) {
        const std::pair key(route->route.name, tenant);
        const auto known = work_.find(key);
        LaneWork work;
        if (known != work_.end() && known->second.of == route)
            work = std::move(known->second);
        else // their passes in between do not all fall into one interval
            work.looks = static_cast<std::uint32_t>(uniform() * kPassEvery);
        work.of = route;
        work.tenant = tenant;
        place_lane(work);
        next.emplace(key, std::move(work));
    };
    for (const auto &[name, route] : routes_) {
        add(route, std::nullopt);
        for (const core::Uuid &tenant : tenants_of(*route))
            add(route, tenant);
    }
    work_ = std::move(next);
    spread();
}

/// Lanes that would all be due at once, after a start or a change of many routes, take their first turns one
/// after another (bugreports.md B-20).
void Relay::spread() {
    const std::int64_t now_us = pg::monotonic_us();
    std::int64_t delay_us = 0;
    LockedLanes locked(LW_EXCLUSIVE);
    for (auto &[name, work] : work_) {
        std::int64_t &due_us = work.lane < 0 ? work.due_us : lane_at(work.lane).due_us;
        if (due_us != 0)
            continue;
        due_us = now_us + delay_us;
        delay_us += spacing_us(work.route(), work_.size());
    }
}

/// The route's tenants: by this worker's own list when it is the latest, else those that have a lane.
std::vector<core::Uuid> Relay::tenants_of(RouteWork &route) const {
    std::vector<core::Uuid> tenants;
    if (!route.route.has_tenants())
        return tenants;
    tenants.reserve(static_cast<std::size_t>(shared()->max_lanes));
    LockedLanes locked(LW_SHARED);
    const int lister = find_lane(lane_key(MyDatabaseId, route.route.name, std::nullopt));
    route.places_list = lister >= 0 && route.listing != 0 && lane_at(lister).listing == route.listing;
    if (route.places_list)
        return route.tenants;
    for (int i = 0; i < shared()->max_lanes; ++i) {
        const Lane &lane = lane_at(i);
        if (!lane.used || !lane.listed || lane.key.database != MyDatabaseId ||
            route.route.name != lane.key.route)
            continue;
        if (const std::optional<core::Uuid> tenant = worker::tenant_of(lane.key))
            tenants.push_back(*tenant);
    }
    return tenants;
}

/// Under the lock: the lane has a slot; a changed route starts afresh.
void Relay::attach(LaneWork &work, int index) {
    Lane &lane = lane_at(index);
    lane.served = true;
    lane.lists_tenants = work.lists_tenants();
    lane.listed = work.tenant.has_value();
    if (lane.route_version != work.route().version) {
        lane.route_version = work.route().version;
        ++lane.generation;
        let_go(lane, nullptr);
        lane.health = core::LaneHealth();
        lane.state = LaneState::due;
        lane.due_us = 0;
        lane.hold_until_us = 0;
    }
    work.lane = index;
    work.generation = lane.generation;
}

/// Finds or makes the lane's slot; without one it takes turns (has_lane(), take_due()).
void Relay::place_lane(LaneWork &work) {
    const LaneKey key = lane_key(MyDatabaseId, work.route().name, work.tenant);
    bool overflow = false;
    {
        LockedLanes locked(LW_EXCLUSIVE);
        const int index = make_lane(key);
        overflow = index < 0;
        work.lane = -1;
        if (!overflow)
            attach(work, index);
    }
    if (overflow)
        warn_overflow(work);
}

/// Once for each database.
void Relay::warn_overflow(const LaneWork &work) {
    {
        LockedLanes locked(LW_EXCLUSIVE);
        const int index = find_database(MyDatabaseId, true);
        if (index < 0 || shared()->databases[index].overflow_warned)
            return;
        shared()->databases[index].overflow_warned = true;
    }
    pg::report_at(WARNING,
                  {ERRCODE_CONFIGURATION_LIMIT_EXCEEDED,
                   work.name() + " has no lane of its own: outbox_relay.max_lanes is used up",
                   "It and others take turns in the places of idle lanes; their commits do not wake them.",
                   "Raise outbox_relay.max_lanes and restart the server."});
}

/// Under the lock: whether the lane has the slot that it had, which another may have taken.
bool Relay::has_lane(LaneWork &work, std::int64_t now_us) {
    if (work.lane < 0)
        return false;
    if (lane_at(work.lane).used && lane_at(work.lane).generation == work.generation)
        return true;
    const int index = find_lane(lane_key(MyDatabaseId, work.route().name, work.tenant));
    if (index < 0) {
        work.lane = -1;
        work.due_us = std::max(work.due_us, now_us + store::effective(work.route()).interval_ms * 1000);
        return false;
    }
    // With another version of the route: we are about to learn of it.
    if (lane_at(index).route_version != work.route().version)
        return false;
    attach(work, index);
    return true;
}

/// Leaves the slot, unless outbox_route changed since it was read: then the launcher, who saw us running, has
/// left the look to us. Another worker may have read the change, and found routes, already. True: gone for
/// good.
bool Relay::give_up_slot() {
    LockedLanes locked(LW_EXCLUSIVE);
    const int index = find_database(MyDatabaseId, false);
    if (index >= 0) {
        Database &database = shared()->databases[index];
        if (pg_atomic_read_u32(&database.pokes) != pokes_)
            return false;
        database.state = DatabaseState::no_routes;
        database.pokes_seen = pokes_;
    }
    slot_.database = InvalidOid;
    return true;
}

/// Under the lock: whether all workers but one run lanes that are in trouble. Their endpoints may take a
/// whole deadline to fail again, and somebody has to be there for the others.
bool Relay::too_many_in_trouble() const {
    int workers = 0;
    int troubled = 0;
    for (int i = 0; i < shared()->max_workers; ++i) {
        const WorkerSlot &worker = worker_at(i);
        if (!worker.used || worker.pid == 0 || worker.database != MyDatabaseId)
            continue;
        ++workers;
        troubled += worker.lane >= 0 && in_trouble(lane_at(worker.lane)) ? 1 : 0;
    }
    return workers > 1 && troubled >= workers - 1;
}

/// Under the lock: the most overdue of the due lanes that are free; nullptr, and when the next one is due.
LaneWork *Relay::most_overdue(std::int64_t &next_due_us) {
    const std::int64_t now_us = pg::monotonic_us();
    next_due_us = now_us + kLookEvery_us;
    LaneWork *best = nullptr;
    std::int64_t best_due_us = 0;
    const bool spares_trouble = too_many_in_trouble();
    for (auto &[name, work] : work_) {
        std::int64_t due_us = work.due_us;
        if (has_lane(work, now_us)) {
            const Lane &lane = lane_at(work.lane);
            if (lane.holder >= 0 || (spares_trouble && in_trouble(lane)))
                continue;
            due_us = due_of(lane);
            // Tenants without a slot are known to whoever listed last: it goes on, if it can.
            if (work.lists_tenants() && lane.listing != work.of->listing)
                due_us += store::effective(work.route()).interval_ms * 500;
        } else if (work.lane >= 0) {
            continue;
        }
        if (due_us > now_us) {
            next_due_us = std::min(next_due_us, due_us);
        } else if (best == nullptr || due_us < best_due_us) {
            best = &work;
            best_due_us = due_us;
        }
    }
    return best;
}

/// Under the lock: a slot for a lane that has none. False when it is not its turn: all others are more
/// overdue or held, another worker has given it one, or this is no longer the lane's route.
bool Relay::seize(LaneWork &work) {
    const LaneKey key = lane_key(MyDatabaseId, work.route().name, work.tenant);
    const int known = find_lane(key);
    const int index = known >= 0 ? known : seize_lane(key, work.due_us, work.lists_tenants());
    const bool ours = index >= 0 && (known < 0 || lane_at(index).route_version == work.route().version);
    if (!ours || known >= 0)
        work.due_us = pg::monotonic_us() + kLookEvery_us;
    if (ours)
        attach(work, index);
    return ours && known < 0;
}

/// The most overdue due lane, held from now on; nullptr and the time of the next one otherwise.
/// `look`: it is enough to look at it, which others that are idle share.
LaneWork *Relay::take_due(std::int64_t &next_due_us, bool &look) {
    LockedLanes locked(LW_EXCLUSIVE);
    LaneWork *best = nullptr;
    do {
        best = most_overdue(next_due_us);
        look = best != nullptr && work_.size() > kManyLanes && may_look(*best);
        if (best == nullptr || look)
            return nullptr;
    } while (best->lane < 0 && !seize(*best));
    lane_at(best->lane).holder = slot_index_;
    slot_.lane = best->lane;
    return best;
}

/// Under the lock: a healthy idle lane that nobody woke, and that was not only looked at too often in a row.
bool Relay::may_look(const LaneWork &work) {
    if (work.lists_tenants() || work.looks >= kPassEvery)
        return false;
    // Without a slot it has no past that would need a pass.
    if (work.lane < 0)
        return true;
    const Lane &lane = lane_at(work.lane);
    return lane.state == LaneState::idle && lane.holder < 0 && lane.last_pass_at != 0 && !in_trouble(lane) &&
           lane.remembered_rows == 0 &&
           pg_atomic_read_u64(const_cast<pg_atomic_uint64 *>(&lane.wake_us)) == 0;
}

/// The first of those that are due, or will be within a tenth of their interval; with the turn after this one
/// set, as if nothing were found. Lanes of a route come together.
std::vector<Relay::Looked> Relay::take_to_look() {
    const std::int64_t now_us = pg::monotonic_us();
    const std::size_t most = most_looks();
    // A heap, the last one due on top. Were others taken than those that are due first, the most overdue one
    // would stay so until all of that tenth had been looked at, in one burst (bugreports.md B-20).
    std::vector<Looked> taken;
    taken.reserve(most);
    const auto is_earlier = [](const Looked &a, const Looked &b) { return a.due_us < b.due_us; };
    LockedLanes locked(LW_EXCLUSIVE);
    for (auto &[name, work] : work_) {
        const std::int64_t due_us = work.lane < 0 ? work.due_us : lane_at(work.lane).due_us;
        if (due_us > now_us + kLookEvery_us || (work.lane >= 0 && !has_lane(work, now_us)) || !may_look(work))
            continue;
        const std::int64_t interval_us = store::effective(work.route()).interval_ms * 1000;
        if (due_us > now_us + interval_us / 10)
            continue;
        if (taken.size() == most) {
            if (due_us >= taken.front().due_us)
                continue;
            std::pop_heap(taken.begin(), taken.end(), is_earlier);
            taken.pop_back();
        }
        taken.push_back({&work, work.lane, work.generation, false, due_us, false});
        std::push_heap(taken.begin(), taken.end(), is_earlier);
    }
    std::sort(taken.begin(), taken.end(), [](const Looked &a, const Looked &b) {
        return std::less<>()(a.work->of.get(), b.work->of.get());
    });
    for (Looked &looked : taken) {
        const std::int64_t interval_us = store::effective(looked.work->route()).interval_ms * 1000;
        looked.due_us = now_us + core::jittered_us(interval_us, uniform());
        looked.work->due_us = looked.due_us;
        if (looked.lane >= 0)
            lane_at(looked.lane).due_us = looked.due_us;
    }
    return taken;
}

/// Looks whether idle lanes have rows, in one transaction; those that do are due at once, and all of them
/// when something fails: their passes find out what. Functions of routes may take long: what there is no time
/// for, or what somebody wants the process to end before, has its turn again.
void Relay::look_at_idle() {
    std::vector<Looked> lanes = take_to_look();
    if (lanes.empty())
        return;
    show_phase(slot_, Phase::claim);
    bool failed = false;
    try {
        signals.may_die = drains() ? 0 : 1;
        pg::start_transaction();
        pg::spi_connect();
        const std::int64_t until_us = pg::monotonic_us() + kLookTime_us;
        for (std::size_t first = 0, end = 0; first < lanes.size(); first = end) {
            if (signals.terminate || pg::monotonic_us() >= until_us)
                break;
            const LaneWork &work = *lanes[first].work;
            const bool shared = store::tenant_filter(work.route()) == store::TenantFilter::column;
            for (end = first + 1; shared && end < lanes.size() && lanes[end].work->of == work.of; ++end)
                ;
            look(std::span(lanes).subspan(first, end - first));
        }
        pg::disarm_watchdog();
        pg::spi_finish();
        pg::commit_transaction();
        signals.may_die = 0;
    } catch (const pg::Error &) {
        signals.may_die = 0;
        pg::disarm_watchdog();
        pg::abort_transaction();
        failed = true;
    }
    const TimestampTz now = GetCurrentTimestamp();
    LockedLanes locked(LW_EXCLUSIVE);
    for (const Looked &looked : lanes)
        leave_looked(looked, failed, now);
}

/// Looks at lanes that have one table.
void Relay::look(std::span<Looked> lanes) {
    LaneWork &work = *lanes.front().work;
    std::vector<std::optional<core::Uuid>> tenants;
    tenants.reserve(lanes.size());
    for (const Looked &looked : lanes)
        tenants.push_back(looked.work->tenant);
    const bool own_table = store::tenant_filter(work.route()) == store::TenantFilter::table;
    store::LookPath &path = own_table ? work.look : work.of->look;
    if (work.looks % kAskEvery == 0)
        path = store::LookPath();
    const store::Effective settings = store::effective(work.route());
    // A function of the route's may trap its cancellation.
    pg::arm_watchdog(settings.pass_deadline_ms + settings.pass_statement_timeout_ms);
    const std::vector<store::Seen> seen = store::look_for_rows(work.route(), tenants, settings, path);
    for (std::size_t i = 0; i < lanes.size(); ++i) {
        Looked &looked = lanes[i];
        looked.reached = true;
        looked.waits = seen[i].waits;
        if (!seen[i].next)
            continue;
        // May be infinite.
        const std::int64_t until_next_us = *seen[i].next - GetCurrentTimestamp();
        const std::int64_t now_us = pg::monotonic_us();
        looked.waits = looked.waits || until_next_us <= 0;
        if (until_next_us < looked.due_us - now_us)
            looked.due_us = now_us + until_next_us;
    }
}

/// Under the lock: what the look found decides on the lane's next turn.
void Relay::leave_looked(const Looked &looked, bool failed, TimestampTz now) {
    LaneWork &work = *looked.work;
    const bool has_slot = work.lane >= 0;
    if (work.lane != looked.lane ||
        (has_slot && (lane_at(work.lane).generation != looked.generation || lane_at(work.lane).holder >= 0)))
        return;
    const bool found = failed || looked.waits;
    const bool again = !failed && !looked.reached;
    if (!again)
        work.looks = found ? kPassEvery : work.looks + 1;
    work.due_us = found || again ? pg::monotonic_us() : looked.due_us;
    if (!has_slot)
        return;
    Lane &lane = lane_at(work.lane);
    lane.due_us = work.due_us;
    if (found || again)
        return;
    ++lane.counters.passes;
    lane.last_pass_at = now;
    lane.last_pass_ms = 0;
}

void Relay::sleep_until(std::int64_t due_us) {
    // Announce first, look again, then sleep: a commit in between finds us waiting.
    show_phase(slot_, Phase::idle);
    (void)pg_atomic_exchange_u32(&slot_.waiting, 1);
    const bool spares_trouble = [this] {
        LockedLanes locked(LW_SHARED);
        return too_many_in_trouble();
    }();
    for (const auto &[name, work] : work_) {
        if (work.lane < 0)
            continue;
        const Lane &lane = lane_at(work.lane);
        if (lane.holder < 0 && pg_atomic_read_u64(const_cast<pg_atomic_uint64 *>(&lane.wake_us)) != 0 &&
            lane.hold_until_us <= pg::monotonic_us() && !(spares_trouble && in_trouble(lane)))
            due_us = 0;
    }
    const std::int64_t wait_us = due_us - pg::monotonic_us();
    if (wait_us > 0) {
        const long wait_ms = static_cast<long>((wait_us + 999) / 1000);
        const std::uint32_t wait_event = idle_event_;
        pg::guard([wait_ms, wait_event] {
            pgstat_report_activity(STATE_IDLE, nullptr);
            (void)WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, wait_ms, wait_event);
        });
    }
    pg_atomic_write_u32(&slot_.waiting, 0);
    ResetLatch(MyLatch);
    serve_signals();
}

void Relay::serve_signals() {
    bool reloaded = false;
    pg::guard([&reloaded] {
        CHECK_FOR_INTERRUPTS();
        if (ConfigReloadPending) {
            ConfigReloadPending = false;
            ProcessConfigFile(PGC_SIGHUP);
            reloaded = true;
        }
    });
    // Which routes are ours depends on outbox_relay.databases and .environment.
    if (reloaded)
        routes_generation_ = 0;
}

/// A lane's turn: passes in a row while they come back full. A retain pass that fails has committed its
/// claim: its rows are out of the way of the others, and the tick goes on, unless the next one fails too. Of
/// slow passes those that fit into one pass_deadline: others are waiting.
void Relay::tick(LaneWork &work) {
    core::NextTurn next;
    const std::int64_t end_us = pg::monotonic_us() + store::effective(work.route()).pass_deadline_ms * 1000;
    lane_at(work.lane).drained = false; // relaying goes on: what follows is for a later drain
    const int batches = work.lists_tenants() ? 1 : settings::parameters.max_batches_per_tick;
    for (int batch = 0; batch < batches; ++batch) {
        next = work.lists_tenants() ? list_tenants(work) : pass(work, batch == 0 || next.reclaims);
        const bool goes_on = next.state == core::NextTurn::State::due ||
                             (next.state == core::NextTurn::State::backoff &&
                              work.route().storage == "retain" && lane_at(work.lane).health.failures == 1);
        if (!goes_on || pg::monotonic_us() >= end_us || signals.terminate || ConfigReloadPending ||
            routes_generation_ != store::routes_generation())
            break;
    }
    release(work, next);
    pg::guard([] { pgstat_report_stat(false); });
}

/// A lane that is to be drained and that nobody has drained or holds, tenants in the order of their list,
/// held from now on.
LaneWork *Relay::take_to_drain() {
    LockedLanes locked(LW_EXCLUSIVE);
    LaneWork *first = nullptr;
    for (auto &[name, work] : work_) {
        if (!work.route().drain_on_shutdown || work.lists_tenants() || work.lane < 0)
            continue;
        const Lane &lane = lane_at(work.lane);
        if (lane.drained || !lane.used || lane.holder >= 0 || lane.generation != work.generation)
            continue;
        if (first == nullptr || lane.ordinal < lane_at(first->lane).ordinal)
            first = &work;
    }
    if (first == nullptr)
        return nullptr;
    lane_at(first->lane).drained = true;
    lane_at(first->lane).holder = slot_index_;
    slot_.lane = first->lane;
    return first;
}

/// Under the lock: whether this worker drains a lane that has no slot. One alone may do it: for a tenant it
/// is the one that knows the latest list, for a route the first that has come so far.
bool Relay::drains_beyond(const LaneWork &work) const {
    if (work.tenant) {
        const int lister = find_lane(lane_key(MyDatabaseId, work.route().name, std::nullopt));
        return lister >= 0 && work.of->listing != 0 && lane_at(lister).listing == work.of->listing;
    }
    const int index = find_database(MyDatabaseId, false);
    if (index < 0)
        return false;
    Database &database = shared()->databases[index];
    if (database.drains_beyond < 0)
        database.drains_beyond = slot_index_;
    return database.drains_beyond == slot_index_;
}

/// Under the lock: a slot for a lane that has none, of a lane that was drained or need not be.
bool Relay::seize_to_drain(LaneWork &work) {
    for (int i = 0; i < shared()->max_lanes; ++i) {
        const Lane &lane = lane_at(i);
        if (!lane.used || lane.holder >= 0 || lane.lists_tenants || lane.key.database != MyDatabaseId)
            continue;
        const auto route = routes_.find(lane.key.route);
        if (!lane.drained && route != routes_.end() && route->second->route.drain_on_shutdown)
            continue;
        drop_lane(i);
        const int index = make_lane(lane_key(MyDatabaseId, work.route().name, work.tenant));
        if (index >= 0)
            attach(work, index);
        return index >= 0;
    }
    return false;
}

/// A lane without a slot that is to be drained, held in another's from now on.
LaneWork *Relay::take_beyond_to_drain() {
    const std::int64_t now_us = pg::monotonic_us();
    LockedLanes locked(LW_EXCLUSIVE);
    for (auto &[name, work] : work_) {
        if (!work.route().drain_on_shutdown || work.lists_tenants() || work.drained ||
            has_lane(work, now_us) || work.lane >= 0 || !drains_beyond(work))
            continue;
        if (!seize_to_drain(work))
            return nullptr;
        work.drained = true;
        lane_at(work.lane).drained = true;
        lane_at(work.lane).holder = slot_index_;
        slot_.lane = work.lane;
        return &work;
    }
    return nullptr;
}

void Relay::drain() {
    if (work_.empty() || !settings::parameters.enabled || !server_is_stopping())
        return;
    begin_drain();
    while (drain_left_us() > 0) {
        LaneWork *work = take_to_drain();
        if (work == nullptr)
            work = take_beyond_to_drain();
        if (work == nullptr)
            return;
        drain(*work);
    }
}

/// Passes until one comes back short, reschedules a row or fails. Rows that wait for a retry are not
/// waited for.
void Relay::drain(LaneWork &work) {
    core::NextTurn next;
    const int batches = settings::parameters.max_batches_per_tick;
    for (int batch = 0; batch < batches && drain_left_us() > 0; ++batch) {
        Lane &lane = lane_at(work.lane);
        const std::uint64_t before =
            lane.counters.retried + lane.counters.refused + lane.counters.failed_passes;
        next = pass(work, false);
        if (next.state != core::NextTurn::State::due ||
            lane.counters.retried + lane.counters.refused + lane.counters.failed_passes != before)
            break;
    }
    release(work, next);
}

/// The turn of a route's lane that lists its tenants. When it fails, the last list stays.
core::NextTurn Relay::list_tenants(LaneWork &work) {
    Lane &lane = lane_at(work.lane);
    (void)pg_atomic_exchange_u64(&lane.wake_us, 0);
    const store::Effective settings = store::effective(work.route());
    lane.policy = policy_of(settings);
    const std::int64_t started_us = pg::monotonic_us();
    show_phase(slot_, Phase::claim);
    try {
        signals.may_die = drains() ? 0 : 1;
        std::vector<core::Uuid> tenants = store::list_tenants(work.route(), settings);
        signals.may_die = 0;
        follow_tenants(work, std::move(tenants));
        return committed(work, settings, core::PassResult(), started_us);
    } catch (const pg::Error &error) {
        signals.may_die = 0;
        pg::abort_transaction();
        return failed(work, settings, error, started_us);
    }
}

/// Makes lanes of the tenants that are new and takes those away that are listed no more: a lane that is held
/// or remembers rows is only not served any more. place_lanes() follows, here and in the other workers.
void Relay::follow_tenants(LaneWork &work, std::vector<core::Uuid> tenants) {
    RouteWork &route = *work.of;
    bool changed = tenants != route.tenants;
    route.tenants = std::move(tenants);
    const std::set<core::Uuid> listed(route.tenants.begin(), route.tenants.end());
    const std::int64_t now_us = pg::monotonic_us();
    LockedLanes locked(LW_EXCLUSIVE);
    for (int i = 0; i < shared()->max_lanes; ++i) {
        Lane &lane = lane_at(i);
        if (!lane.used || lane.key.database != MyDatabaseId || route.route.name != lane.key.route)
            continue;
        const std::optional<core::Uuid> tenant = tenant_of(lane.key);
        if (!tenant || listed.contains(*tenant))
            continue;
        changed = changed || lane.listed;
        lane.listed = false;
        if (lane.holder < 0 && lane.remembered_rows == 0)
            drop_lane(i);
    }
    std::uint32_t ordinal = 0;
    bool full = false;
    for (const core::Uuid &tenant : route.tenants) {
        const LaneKey key = lane_key(MyDatabaseId, route.route.name, tenant);
        const int known = find_lane(key);
        const int index = known >= 0 || full ? known : make_lane(key);
        full = full || index < 0;
        if (index >= 0) {
            Lane &lane = lane_at(index);
            changed = changed || !lane.listed;
            lane.listed = true;
            lane.ordinal = ordinal;
            // New ones have their first turn in the order of the list.
            if (known < 0) {
                lane.route_version = route.route.version;
                lane.due_us = now_us + ordinal * spacing_us(route.route, route.tenants.size());
            }
        }
        ++ordinal;
    }
    route.listing = ++lane_at(work.lane).listing;
    const int index = find_database(MyDatabaseId, true);
    if (changed && index >= 0)
        (void)pg_atomic_fetch_add_u32(&shared()->databases[index].lists, 1);
    // Tenants without a slot are served by whoever listed last: from now on that is this worker.
    if (!route.places_list)
        --lists_;
}

/// The statements of the lane's table: of the route's, or of the lane's own.
store::OutboxPlans &Relay::plans_of(LaneWork &work) {
    if (store::tenant_filter(work.route()) != store::TenantFilter::table)
        return work.of->plans;
    if (!work.plans) {
        forget_least_used();
        work.plans = std::make_unique<store::OutboxPlans>();
    }
    return *work.plans;
}

/// Makes place for one more lane with connections or statements of its own: a worker's memory does not grow
/// with the number of tenants.
void Relay::forget_least_used() {
    std::size_t kept = 0;
    LaneWork *least = nullptr;
    for (auto &[name, work] : work_) {
        if (!work.transport && !work.plans)
            continue;
        ++kept;
        if (work.lane != slot_.lane && (least == nullptr || work.used_us < least->used_us))
            least = &work;
    }
    if (kept < kMostKept || least == nullptr)
        return;
    least->transport.reset();
    least->plans.reset();
}

core::NextTurn Relay::pass(LaneWork &work, bool first_of_tick) {
    Lane &lane = lane_at(work.lane);
    // Rows that commit from here on wake the lane again; those before are seen by the claim.
    (void)pg_atomic_exchange_u64(&lane.wake_us, 0);
    const std::uint32_t turn = lane.turns++;
    work.used_us = pg::monotonic_us();
    work.looks = 0;
    store::Effective settings = store::effective(work.route());
    settings.concurrency = std::min(settings.concurrency, most_requests_in_flight());
    lane.policy = policy_of(settings);
    if (is_draining())
        keep_time_to_commit(settings);
    const std::int64_t started_us = pg::monotonic_us();
    WorkerHost host(slot_, lane, work.route().drain_on_shutdown);
    LaneMemory memory(work.lane);
    std::unique_ptr<store::OutboxStore> store;
    try {
        store = store::make_outbox_store(work.route(), work.tenant, settings, plans_of(work), host, memory,
                                         store::Frame::own, turn % 2 == 0);
        const core::PassSettings pass = pass_settings(work, settings, first_of_tick);
        // Who is to drain finishes a statement first: eviction still takes no longer than its limit.
        signals.may_die = is_draining() || drains() ? 0 : 1;
        const core::PassResult result = publish(work, settings, pass, *store, host);
        signals.may_die = 0;
        log_aside(work, *store);
        return committed(work, settings, result, started_us);
    } catch (const pg::Error &error) {
        signals.may_die = 0;
        return failed(work, settings, error, started_us, store.get());
    } catch (const std::exception &error) {
        // Of a library: no memory, no descriptors. The pass is undone; its connections are not used again.
        signals.may_die = 0;
        work.transport.reset();
        return failed(work, settings, pg::library_error(error), started_us, store.get());
    }
}

/// Runs the pass against the route's target.
core::PassResult Relay::publish(LaneWork &work, const store::Effective &settings,
                                const core::PassSettings &pass, core::Store &store, WorkerHost &host) {
    ServerClock clock;
    if (!work.route().target_function.empty())
        return core::run_local_pass(pass, store, clock, host);
    VisibleWaits transport(
        [&]() -> core::Transport & {
            make_room(work, settings.concurrency);
            return transport_of(work, settings);
        },
        publish_event_);
    host.watch(&transport);
    return core::run_pass(pass, store, transport, clock, host, random_);
}

core::PassSettings Relay::pass_settings(const LaneWork &work, const store::Effective &settings,
                                        bool first_of_tick) {
    const Lane &lane = lane_at(work.lane);
    core::PassSettings pass = worker::pass_settings(work.route(), settings, database_);
    const bool breaker_open =
        settings.breaker_threshold > 0 && lane.health.publish_failures >= settings.breaker_threshold;
    pass.max_claim_rows =
        core::claim_limit(lane.health, static_cast<std::size_t>(settings.max_claim_rows), breaker_open);
    pass.reclaim = first_of_tick && settings.reclaim_stale_after_ms > 0;
    pass.publish_failures = lane.health.publish_failures;
    pass.refused_rows = lane.health.refused_rows;
    pass.asks_for_parked = lane.health.parked;
    std::array<std::uint64_t, core::kLatencyBuckets> recent;
    for (std::size_t i = 0; i < recent.size(); ++i)
        recent[i] = static_cast<std::uint64_t>(lane.recent_latency[i]);
    pass.expected_latency_us = core::latency_quantile_us(recent, 0.95);
    return pass;
}

/// Closes other lanes' kept connections when theirs and this lane's could use up the descriptors of the
/// process.
void Relay::make_room(const LaneWork &work, std::int64_t connections) {
    std::int64_t open = connections;
    for (const auto &[name, other] : work_)
        if (&other != &work && other.transport)
            open += static_cast<std::int64_t>(other.transport->connections_open());
    if (open <= most_requests_in_flight())
        return;
    for (auto &[name, other] : work_)
        if (&other != &work && other.transport)
            other.transport->drop_idle();
}

http::CurlTransport &Relay::transport_of(LaneWork &work, const store::Effective &settings) {
    if (!work.transport || work.transport_connections != settings.concurrency) {
        if (!work.transport)
            forget_least_used();
        http::TransportSettings transport;
        transport.max_connections = static_cast<int>(settings.concurrency);
        transport.ca_file = work.route().ca_file;
        work.transport = std::make_unique<http::CurlTransport>(transport);
        work.transport_connections = settings.concurrency;
    }
    return *work.transport;
}

core::NextTurn Relay::committed(LaneWork &work, const store::Effective &settings,
                                const core::PassResult &result, std::int64_t started_us) {
    Lane &lane = lane_at(work.lane);
    ServerClock clock;
    // Where nothing could be sent, the address may be one that the name has no more.
    if (result.unsent > 0 && work.transport)
        work.transport->drop_idle();
    const double jitter = uniform();
    const TimestampTz now = GetCurrentTimestamp();
    bool recovered = false;
    bool new_trouble = false;
    core::NextTurn next;
    {
        LockedLanes locked(LW_EXCLUSIVE);
        next = core::after_commit(lane.health, policy_of(settings), result,
                                  static_cast<std::size_t>(settings.max_claim_rows), clock.wall_us(), jitter);
        lane.breaker_open =
            settings.breaker_threshold > 0 && lane.health.publish_failures >= settings.breaker_threshold;
        Counters &counters = lane.counters;
        ++counters.passes;
        counters.claimed += static_cast<std::uint64_t>(result.claimed);
        counters.published += static_cast<std::uint64_t>(result.published);
        counters.failed += static_cast<std::uint64_t>(result.failed);
        counters.retried += static_cast<std::uint64_t>(result.retried);
        counters.refused += static_cast<std::uint64_t>(result.refused);
        counters.duplicates_avoided += static_cast<std::uint64_t>(result.duplicates_avoided);
        counters.reclaimed += static_cast<std::uint64_t>(result.reclaimed);
        counters.bytes_published += static_cast<std::uint64_t>(result.bytes_published);
        for (std::size_t i = 0; i < core::kLatencyBuckets; ++i) {
            counters.latency[i] += result.latency[i];
            if (result.published > 0)
                lane.recent_latency[i] =
                    lane.recent_latency[i] * 0.9f + static_cast<float>(result.latency[i]);
        }
        lane.last_pass_at = now;
        lane.last_pass_ms = (pg::monotonic_us() - started_us) / 1000;
        if (!result.error_class.empty()) {
            new_trouble =
                std::strncmp(lane.error_class, result.error_class.c_str(), sizeof(lane.error_class) - 1) != 0;
            copy_text(lane.error_class, sizeof(lane.error_class), result.error_class);
            copy_text(lane.last_error, sizeof(lane.last_error), result.error);
            lane.last_error_at = now;
        } else if (result.published > 0 || result.claimed == 0) {
            recovered = (result.published > 0 || work.lists_tenants()) && lane.error_class[0] != '\0';
            if (recovered)
                lane.error_class[0] = '\0';
        }
    }
    if (new_trouble)
        log_line(work.name() + ": " + store::from_utf8(loggable(result)));
    if (recovered)
        log_line(work.name() + " relays again");
    return next;
}

core::NextTurn Relay::failed(LaneWork &work, const store::Effective &settings, const pg::Error &error,
                             std::int64_t started_us, const store::OutboxStore *store) {
    Lane &lane = lane_at(work.lane);
    const std::string error_class = "SQLSTATE " + error.sqlstate_text();
    const std::string message = store::to_utf8(error.message()).value_or(error_class);
    bool new_trouble = false;
    core::NextTurn next;
    {
        LockedLanes locked(LW_EXCLUSIVE);
        next = core::after_failure(lane.health, policy_of(settings));
        ++lane.counters.failed_passes;
        if (store != nullptr)
            count(lane.counters, store->settled());
        lane.last_pass_at = GetCurrentTimestamp();
        lane.last_pass_ms = (pg::monotonic_us() - started_us) / 1000;
        lane.last_error_at = lane.last_pass_at;
        new_trouble = error_class != lane.error_class;
        copy_text(lane.error_class, sizeof(lane.error_class), error_class);
        copy_text(lane.last_error, sizeof(lane.last_error), message);
        pg_atomic_write_u32(&lane.in_flight, 0);
    }
    if (new_trouble)
        pg::log_error(error, "a pass of " + work.name() + " failed");
    if (store != nullptr)
        log_aside(work, *store);
    return next;
}

/// Gives the lane back with its next time.
void Relay::release(LaneWork &work, const core::NextTurn &next) {
    static constexpr LaneState kStates[] = {LaneState::due, LaneState::idle, LaneState::backoff,
                                            LaneState::refused};
    LockedLanes locked(LW_EXCLUSIVE);
    Lane &lane = lane_at(work.lane);
    if (lane.generation == work.generation) {
        lane.state = kStates[static_cast<int>(next.state)];
        lane.due_us = pg::monotonic_us() + next.wait_us;
        lane.hold_until_us = next.holds_against_wakes ? lane.due_us : 0;
        work.due_us = lane.due_us;
    }
    lane.holder = -1;
    slot_.lane = -1;
    // Others may have been spared for it.
    if (in_trouble(lane))
        wake_worker(MyDatabaseId);
}

} // namespace outbox_relay::worker
