#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "http/curl_transport.hpp"
#include "store/look.hpp"
#include "store/outbox.hpp"
#include "store/route.hpp"
#include "worker/host.hpp"
#include "worker/lanes.hpp"

namespace outbox_relay::worker {

/// What a worker keeps of a route between its passes, for all its lanes.
struct RouteWork {
    store::Route route;
    store::OutboxPlans plans; ///< statements, where all lanes have one table
    store::LookPath look;
    std::vector<core::Uuid> tenants; ///< as this worker listed them
    std::uint32_t listing = 0; ///< the list's number; when another worker made a later one, its lanes count
    bool places_list = false;  ///< work is placed by `tenants`: those without a slot are known to this worker
};

/// What a worker keeps of a lane: connections, and statements on a table of the lane's own. The lane without
/// a tenant of a route with tenants lists these instead of relaying.
struct LaneWork {
    std::shared_ptr<RouteWork> of;
    std::optional<core::Uuid> tenant;
    int lane = -1; ///< -1: has no slot now, and takes its turn in another's
    std::uint32_t generation = 0;
    std::int64_t due_us = 0; ///< without a slot
    std::int64_t used_us = 0;
    std::unique_ptr<http::CurlTransport> transport;
    std::int64_t transport_connections = 0;
    std::unique_ptr<store::OutboxPlans> plans;
    store::LookPath look;
    std::uint32_t looks = 0; ///< since its last pass
    bool drained = false;    ///< at shutdown, in another's slot

    const store::Route &route() const { return of->route; }
    bool lists_tenants() const { return route().has_tenants() && !tenant; }
    /// As messages call it.
    std::string name() const;
};

/// A relay worker of one database: takes the most overdue due lane, runs its tick, sleeps when none
/// is due. worker/README.md has its states.
class Relay {
  public:
    explicit Relay(int slot);

    /// Runs until the process has to end; does not return otherwise. The caller exits with 1.
    void run();

    /// At the shutdown of the server: what is claimable on routes with drain_on_shutdown still goes out,
    /// one attempt a row, within outbox_relay.shutdown_drain_timeout (the seed, "A shutdown drain keeps
    /// time to commit"). Does nothing when the process is merely evicted. At most once per start of the
    /// server and lane.
    void drain();

  private:
    bool turn();
    bool may_serve();
    bool drains() const;
    std::size_t most_looks() const;
    bool is_one_too_many() const;
    bool parameters_changed();
    bool fits_library();
    bool refresh_routes();
    std::vector<store::Route> read_routes(std::set<std::string> &existing);
    static std::uint32_t pokes();
    bool give_up_slot();
    void adopt_routes(std::vector<store::Route> routes);
    void leave_other_lanes(const std::set<std::string> &existing);
    bool lists_changed();
    void place_lanes();
    void spread();
    std::vector<core::Uuid> tenants_of(RouteWork &route) const;
    void place_lane(LaneWork &work);
    void warn_overflow(const LaneWork &work);
    void attach(LaneWork &work, int index);
    bool has_lane(LaneWork &work, std::int64_t now_us);
    static bool first_warning(const store::Route &route);
    static void warn_foreign(const store::Route &route);
    void warn_of_version();

    /// An idle lane that is looked at.
    struct Looked {
        LaneWork *work;
        int lane; ///< -1: without a slot
        std::uint32_t generation;
        bool waits;
        std::int64_t due_us;
        bool reached; ///< there was time for it
    };

    bool too_many_in_trouble() const;
    static bool may_look(const LaneWork &work);
    std::vector<Looked> take_to_look();
    void look_at_idle();
    static void look(std::span<Looked> lanes);
    void leave_looked(const Looked &looked, bool failed, TimestampTz now);
    LaneWork *most_overdue(std::int64_t &next_due_us);
    LaneWork *take_due(std::int64_t &next_due_us, bool &look);
    bool seize(LaneWork &work);
    void sleep_until(std::int64_t due_us);
    void tick(LaneWork &work);
    LaneWork *take_to_drain();
    LaneWork *take_beyond_to_drain();
    bool drains_beyond(const LaneWork &work) const;
    bool seize_to_drain(LaneWork &work);
    void drain(LaneWork &work);
    core::NextTurn list_tenants(LaneWork &work);
    void follow_tenants(LaneWork &work, std::vector<core::Uuid> tenants);
    core::NextTurn pass(LaneWork &work, bool first_of_tick);
    store::OutboxPlans &plans_of(LaneWork &work);
    core::PassResult publish(LaneWork &work, const store::Effective &settings, const core::PassSettings &pass,
                             core::Store &store, WorkerHost &host);
    core::PassSettings pass_settings(const LaneWork &work, const store::Effective &settings,
                                     bool first_of_tick);
    void make_room(const LaneWork &work, std::int64_t connections);
    void forget_least_used();
    http::CurlTransport &transport_of(LaneWork &work, const store::Effective &settings);
    core::NextTurn committed(LaneWork &work, const store::Effective &settings, const core::PassResult &result,
                             std::int64_t started_us);
    core::NextTurn failed(LaneWork &work, const store::Effective &settings, const pg::Error &error,
                          std::int64_t started_us, const store::OutboxStore *store = nullptr);
    void release(LaneWork &work, const core::NextTurn &next);
    void serve_signals();
    double uniform();

    const int slot_index_;
    WorkerSlot &slot_;
    std::mt19937_64 random_;
    const std::uint32_t idle_event_;
    const std::uint32_t publish_event_;
    std::map<std::string, std::shared_ptr<RouteWork>> routes_;
    std::map<std::pair<std::string, std::optional<core::Uuid>>, LaneWork> work_;
    std::uint32_t lists_ = 0;                            ///< as of place_lanes()
    std::optional<std::uint64_t> configured_parameters_; ///< as of the first look
    bool fits_library_ = true;                           ///< the extension's SQL is of the library's version
    std::string database_;                               ///< its name, as of the last look at the routes
    std::uint64_t routes_generation_ = 0;
    std::uint32_t pokes_ = 0; ///< of this database, as of the last look at the routes
    std::int64_t checked_us_ = 0;
};

} // namespace outbox_relay::worker
