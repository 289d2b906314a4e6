#include "worker/on_demand.hpp"

#include <algorithm>
#include <cstring>
#include <memory>
#include <optional>
#include <random>
#include <string>

#include "http/curl_transport.hpp"
#include "store/outbox.hpp"
#include "worker/fault.hpp"
#include "worker/host.hpp"
#include "worker/lanes.hpp"
#include "worker/memory.hpp"
#include "worker/pass_settings.hpp"

#include "pg/error.hpp"
#include "pg/guard.hpp"

extern "C" {
#include "postmaster/bgworker.h"
#include "storage/pmsignal.h"
}

namespace outbox_relay::worker {

namespace {

/// As many as max_claim_rows allows; a pass holds them in memory.
constexpr std::int64_t kMostRows = 100'000;

/// The pass's view of a session: cancels, its statement_timeout and its end come as errors out of the
/// interrupts.
class SessionHost final : public core::PassHost {
  public:
    Order pulse() override {
        pg::guard([] {
            CHECK_FOR_INTERRUPTS();
            if (!PostmasterIsAlive())
                ereport(FATAL, (errcode(ERRCODE_ADMIN_SHUTDOWN),
                                errmsg("terminating connection due to unexpected postmaster exit")));
        });
        return Order::go_on;
    }

    void at(core::PassPoint point, std::size_t count) override { reach_fault_point(point, count); }
};

/// What a lane remembers is read and not added to: here the caller's rollback is meant to return the rows,
/// but what the lane's own passes have published and not settled goes out once. What its live pass holds is
/// its own, and so is what it has sent and could not mark yet.
class LiveClaim final : public store::RowMemory {
  public:
    LiveClaim(const std::string &route, const std::optional<core::Uuid> &tenant)
        : key_(lane_key(MyDatabaseId, route, tenant)) {}

    std::vector<store::RowVersion> load() override {
        LockedLanes locked(LW_SHARED);
        const int lane = find_lane(key_);
        std::vector<store::RowVersion> versions;
        if (lane >= 0)
            versions = LaneMemory(lane).load();
        std::erase_if(versions, [](const store::RowVersion &version) {
            return version.why != store::Remembered::published && version.taken_at == 0;
        });
        return versions;
    }
    void add(const store::RowVersion &) noexcept override {}
    void replace(std::span<const store::RowVersion>) noexcept override {}
    std::int64_t live_claim() const noexcept override {
        LockedLanes locked(LW_SHARED);
        const int lane = find_lane(key_);
        return lane < 0 ? 0 : LaneMemory(lane).live_claim();
    }
    void set_live_claim(std::int64_t) noexcept override {}

  private:
    const LaneKey key_;
};

/// A deferred check would run at the caller's commit, as the caller: the server refuses to queue it. By
/// the place that raises it, since messages are translated.
bool is_refused_deferral(const pg::Error &error) {
    const char *place = error.data()->funcname;
    return error.sqlstate() == ERRCODE_INSUFFICIENT_PRIVILEGE && place != nullptr &&
           std::strcmp(place, "afterTriggerMarkEvents") == 0;
}

/// Marks this session as running a pass for a C++ scope.
class Running {
  public:
    Running() { running_ = true; }
    ~Running() { running_ = false; }
    Running(const Running &) = delete;
    Running &operator=(const Running &) = delete;

    static bool is_running() { return running_; }

  private:
    static bool running_;
};
bool Running::running_ = false;

/// Code that a pass runs (a target function, a trigger) would claim the rows that the pass holds already:
/// they are locked by its own transaction.
void refuse_inside_a_pass() {
    const bool in_worker =
        MyBgworkerEntry != nullptr && std::strcmp(MyBgworkerEntry->bgw_library_name, "outbox_relay") == 0;
    if (in_worker || Running::is_running())
        pg::raise({ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE, "a pass can't be run inside a pass",
                   "A target function or a trigger of the pass called outbox_relay_pass().",
                   "Stage an event for the other route instead: its lane wakes at commit."});
}

core::PassResult run(const store::Route &route, const std::optional<core::Uuid> &tenant,
                     const store::Effective &settings, const core::PassSettings &pass) {
    SessionHost host;
    LiveClaim memory(route.name, tenant);
    ServerClock clock;
    store::OutboxPlans plans;
    std::random_device random;
    std::mt19937_64 generator((std::uint64_t{random()} << 32) | random());
    const std::unique_ptr<store::OutboxStore> store = store::make_outbox_store(
        route, tenant, settings, plans, host, memory, store::Frame::callers, (generator() & 1) != 0);
    if (!route.target_function.empty())
        return core::run_local_pass(pass, *store, clock, host);
    http::TransportSettings transport_settings;
    transport_settings.max_connections = static_cast<int>(settings.concurrency);
    transport_settings.ca_file = route.ca_file;
    http::CurlTransport transport(transport_settings);
    return core::run_pass(pass, *store, transport, clock, host, generator);
}

} // namespace

core::PassResult pass_on_demand(const store::Route &route, const std::optional<core::Uuid> &tenant,
                                std::int64_t max_rows) {
    refuse_inside_a_pass();
    const Running running;
    store::Effective settings = store::effective(route);
    settings.concurrency = std::min(settings.concurrency, most_requests_in_flight());
    core::PassSettings pass = pass_settings(route, settings, database_name());
    if (max_rows > 0)
        pass.max_claim_rows = static_cast<std::size_t>(std::min(max_rows, kMostRows));
    pass.reclaim = settings.reclaim_stale_after_ms > 0;
    try {
        return run(route, tenant, settings, pass);
    } catch (const pg::Error &error) {
        if (!is_refused_deferral(error))
            throw;
        pg::raise(
            {error.sqlstate(), error.message(),
             "A deferrable constraint or trigger of the route's table would be checked after the pass.",
             "Run SET CONSTRAINTS ALL IMMEDIATE before the pass, make the constraint NOT DEFERRABLE, or "
             "leave the route to "
             "the worker, which checks it at the end of each statement."});
    }
}

} // namespace outbox_relay::worker
