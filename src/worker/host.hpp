#pragma once

#include <csignal>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "core/pass.hpp"
#include "core/transport.hpp"
#include "store/route.hpp"
#include "worker/lanes.hpp"

namespace outbox_relay::worker {

/// What the relay worker's signal handlers leave for its loop.
struct Signals {
    volatile std::sig_atomic_t terminate; ///< SIGTERM came: leave soon
    volatile std::sig_atomic_t may_die;   ///< SIGTERM may end the session at the next interrupt check
    volatile std::sig_atomic_t in_commit; ///< a COMMIT has begun, and may wait for a synchronous standby
};
extern Signals signals;

/// Installs the handlers of a relay worker: while it publishes or settles, SIGTERM only asks (the pass
/// ends in order); in a statement before anything was sent it ends the session.
void install_signal_handlers();

/// Ends the wait of a COMMIT for synchronous standbys. Safe in a signal handler.
void end_commit_wait();

/// Whether the SIGTERM that came is the server's shutdown, as against a mere eviction of this process
/// (pg_terminate_backend, DROP DATABASE): also where a smart shutdown still waits for its clients. May wait
/// up to a second for the answer.
bool server_is_stopping();

/// The drain of this process begins, if it has not yet: its end is outbox_relay.shutdown_drain_timeout away.
void begin_drain();
bool is_draining();
/// Time to the drain's end; not above zero when it is over or has not begun.
std::int64_t drain_left_us();

/// Limits of a pass in a drain: publishing stops a fifth of the time that is left before its end, and a
/// closing statement is cut at the end.
void keep_time_to_commit(store::Effective &settings);

/// True when a database wants those who are connected to go: somebody holds or waits for a lock on it that
/// conflicts with being so (DROP, RENAME, SET TABLESPACE, as a TEMPLATE).
bool database_is_wanted(Oid database);

/// How many requests this process can have in flight: a quarter of the files that it may open. The others
/// are for the server's files, for what a resolver opens, and for what newer libcurls hold besides a
/// request's connection. A request beyond that would only be refused by our own kernel and be taken for a
/// failure of the endpoint.
std::int64_t most_requests_in_flight();

/// The pass's view of the relay worker: interrupts, phases, fault points.
class WorkerHost : public core::PassHost {
  public:
    /// `drains`: at the server's shutdown the pass goes on as long as the drain has time.
    WorkerHost(WorkerSlot &slot, Lane &lane, bool drains) : slot_(slot), lane_(lane), drains_(drains) {}

    /// The pass sends by `transport`; without one its target lies inside the database.
    void watch(const core::Transport *transport) { transport_ = transport; }
    Order pulse() override;
    bool has_to_leave() const override;
    void at(core::PassPoint point, std::size_t count) override;

  private:
    void show(Phase phase);

    WorkerSlot &slot_;
    Lane &lane_;
    const bool drains_;
    const core::Transport *transport_ = nullptr;
    std::int64_t probed_us_ = 0;
    bool leaving_ = false;
};

/// A transport that is there from its first request on, and whose waits for the network show in
/// pg_stat_activity, as `wait_event`.
class VisibleWaits final : public core::Transport {
  public:
    VisibleWaits(std::function<core::Transport &()> make, std::uint32_t wait_event)
        : make_(std::move(make)), wait_event_(wait_event) {}

    void start(std::uint64_t ticket, core::Request request, const core::RequestLimits &limits) override {
        if (transport_ == nullptr)
            transport_ = &make_();
        transport_->start(ticket, std::move(request), limits);
    }
    void poll(int max_wait_ms, std::vector<core::Reply> &replies) override;
    void cancel(std::vector<core::Reply> &replies) override {
        if (transport_ != nullptr)
            transport_->cancel(replies);
    }
    std::size_t in_flight() const override { return transport_ == nullptr ? 0 : transport_->in_flight(); }

  private:
    const std::function<core::Transport &()> make_;
    core::Transport *transport_ = nullptr;
    const std::uint32_t wait_event_;
};

/// Shows `phase` in outbox_stat_worker.
void show_phase(WorkerSlot &slot, Phase phase);

} // namespace outbox_relay::worker
