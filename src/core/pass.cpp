#include "core/pass.hpp"

#include "core/key_order.hpp"
#include "core/outcome.hpp"

#include <algorithm>
#include <optional>
#include <utility>

#include "core/no_postgres.hpp"

namespace outbox_relay::core {

namespace {

/// Unsent requests in a row that end a pass's publishing (spec.md section 6).
constexpr int kUnsentInARow = 3;
/// A pass takes stale rows back in portions, this many at most: the rest is the next tick's.
constexpr int kReclaimPortions = 10;
/// What is in flight when the process has to end gets this long.
constexpr std::int64_t kFinishGrace_us = 1'000'000;
/// The longest wait without a pulse.
constexpr std::int64_t kSlice_us = 100'000;

/// The publishing part of one pass: starts requests, judges replies, fills the settlement.
class Publishing {
  public:
    Publishing(const PassSettings &settings, Store &store, Transport &transport, Clock &clock, PassHost &host,
               std::mt19937_64 &random, PassResult &result, std::int64_t started_us)
        : settings_(settings), store_(store), transport_(transport), clock_(clock), host_(host),
          random_(random), result_(result), deadline_us_(started_us + settings.deadline_us) {
        result_.publish_failures = settings.publish_failures;
        result_.refused_rows = settings.refused_rows;
        policy_.fail_statuses = settings.fail_statuses;
        policy_.max_hold_us = settings.retry.cap_us;
    }

    /// Publishes `rows` in claim order until done, the deadline or a reason to stop. What is still to
    /// be written down comes back.
    Settlement run(const std::vector<Row> &rows) {
        rows_ = &rows;
        for (std::size_t i = 0; i < rows.size(); ++i)
            take(i);
        // What came while the claim ran counts before the first request.
        obey(host_.pulse());
        while (true) {
            start_what_fits();
            if (transport_.in_flight() == 0 && (stopped_ || order_.empty()))
                break;
            wait_and_judge();
            settle_full_chunk();
        }
        // A lane of one or two rows meets a dead endpoint too, and has to back off from it.
        if (unsent_in_a_row_ > 0 && !settings_.refusals_are_the_rows_own)
            stop(Stop::refused);
        return std::move(settlement_);
    }

  private:
    void take(std::size_t index) {
        if (!row(index).acknowledged) {
            order_.add(index, row(index).ordering_key, settings_.key_order);
            return;
        }
        settlement_.published.push_back(row(index).handle);
        ++result_.published;
        ++result_.duplicates_avoided;
    }

    const Row &row(std::size_t index) const { return (*rows_)[index]; }

    void stop(Stop why) {
        if (why == Stop::refused || why == Stop::held || why == Stop::breaker)
            result_.lane_refused = true;
        if (!stopped_)
            result_.stop = why;
        stopped_ = true;
    }

    void start_what_fits() {
        while (!stopped_ && order_.has_ready() && transport_.in_flight() < settings_.concurrency &&
               (bytes_in_flight_ < settings_.max_bytes_in_flight || transport_.in_flight() == 0)) {
            const std::int64_t now_us = clock_.monotonic_us();
            const std::int64_t left_us = deadline_us_ - now_us;
            if (left_us <= 0 || (started_ > 0 && left_us < settings_.expected_latency_us)) {
                stop(Stop::deadline);
                return;
            }
            const std::optional<std::size_t> index = order_.next();
            if (!index)
                return;
            start(*index, left_us);
        }
    }

    void start(std::size_t index, std::int64_t left_us) {
        std::variant<std::string, Unsendable> payload = store_.render(row(index));
        if (Unsendable *unsendable = std::get_if<Unsendable>(&payload)) {
            park(index, std::move(unsendable->reason));
            return;
        }
        std::variant<Request, NotEncodable> built =
            build_request(settings_.envelope, row(index), std::move(std::get<std::string>(payload)));
        if (NotEncodable *problem = std::get_if<NotEncodable>(&built)) {
            park(index, std::move(problem->reason));
            return;
        }
        Request &request = std::get<Request>(built);
        bytes_in_flight_ += request.body.size();
        ++started_;
        RequestLimits limits;
        if (settings_.request_timeout_us > 0 && settings_.request_timeout_us < left_us)
            limits.timeout_ms = std::max<std::int64_t>(1, settings_.request_timeout_us / 1000);
        limits.connect_timeout_ms = std::max<std::int64_t>(1, settings_.connect_timeout_us / 1000);
        transport_.start(index, std::move(request), limits);
    }

    void park(std::size_t index, std::string reason) {
        settlement_.parked.push_back({row(index).handle, std::move(reason)});
        ++result_.failed;
        order_.done(index);
    }

    void wait_and_judge() {
        const std::int64_t now_us = clock_.monotonic_us();
        const std::int64_t end_us = finish_by_us_ ? std::min(*finish_by_us_, deadline_us_) : deadline_us_;
        replies_.clear();
        if (now_us >= end_us) {
            give_up(now_us >= deadline_us_);
            return;
        }
        const std::int64_t wait_us = std::min(kSlice_us, end_us - now_us);
        transport_.poll(static_cast<int>((wait_us + 999) / 1000), replies_);
        for (const Reply &reply : replies_)
            judge_reply(reply, true);
        obey(host_.pulse());
    }

    void obey(PassHost::Order order) {
        if (order == PassHost::Order::go_on)
            return;
        stop(Stop::asked);
        if (order == PassHost::Order::leave)
            finish_by_us_ = clock_.monotonic_us();
        else if (!finish_by_us_)
            finish_by_us_ = clock_.monotonic_us() + kFinishGrace_us;
    }

    /// Cancels what is in flight. At the deadline that is a failed attempt of each; when the process
    /// has to end it is none.
    void give_up(bool at_deadline) {
        stop(at_deadline ? Stop::deadline : Stop::asked);
        transport_.cancel(replies_);
        for (const Reply &reply : replies_)
            judge_reply(reply, at_deadline);
    }

    void judge_reply(const Reply &reply, bool cancellation_counts) {
        const std::size_t index = static_cast<std::size_t>(reply.ticket);
        bytes_in_flight_ -= std::min(bytes_in_flight_, static_cast<std::size_t>(reply.body_bytes));
        policy_.wall_us = clock_.wall_us();
        Outcome outcome = judge(reply, policy_);
        if (outcome.verdict == Verdict::cancelled && cancellation_counts)
            judge_cancelled(reply, outcome);
        if (outcome.verdict == Verdict::held && settings_.refusals_are_the_rows_own && reply.status == 410)
            outcome.verdict = Verdict::retried;
        apply(index, reply, outcome);
        order_.done(index);
    }

    /// At the deadline. Of what was not even connected an outage burns no attempt; it is none where others
    /// got through.
    void judge_cancelled(const Reply &reply, Outcome &outcome) {
        if (reply.nothing_sent && result_.published > 0)
            return;
        outcome.verdict = reply.nothing_sent ? Verdict::refused : Verdict::retried;
        outcome.error_class = reply.nothing_sent ? "connect" : "deadline";
        outcome.error = reply.nothing_sent ? "connect: no connection before pass_deadline"
                                           : "deadline: no answer before pass_deadline";
    }

    void apply(std::size_t index, const Reply &reply, Outcome &outcome) {
        if (outcome.verdict != Verdict::refused)
            unsent_in_a_row_ = 0;
        if (outcome.verdict != Verdict::refused && outcome.verdict != Verdict::held &&
            outcome.verdict != Verdict::cancelled)
            result_.refused_rows = 0;
        switch (outcome.verdict) {
        case Verdict::published:
            published(index, reply);
            return;
        case Verdict::cancelled:
            return;
        case Verdict::refused:
            refused(outcome);
            return;
        case Verdict::held:
            held(index, outcome);
            return;
        case Verdict::failed: {
            // While the breaker is open the endpoint is at fault, not the row.
            const bool open = breaker_open();
            failed_publish(outcome);
            if (open)
                retry(index, outcome);
            else
                fail(index, outcome);
            return;
        }
        case Verdict::retried:
            failed_publish(outcome);
            retry(index, outcome);
            return;
        }
    }

    void published(std::size_t index, const Reply &reply) {
        store_.note_published(row(index));
        settlement_.published.push_back(row(index).handle);
        ++result_.published;
        result_.bytes_published += reply.body_bytes;
        ++result_.latency[latency_bucket(reply.latency_us)];
        result_.publish_failures = 0;
        host_.at(PassPoint::after_publish, static_cast<std::size_t>(result_.published));
    }

    void note_error(const Outcome &outcome) {
        result_.error_class = outcome.error_class;
        result_.error = outcome.error;
    }

    bool breaker_open() const {
        return settings_.breaker_threshold > 0 && result_.publish_failures >= settings_.breaker_threshold;
    }

    void failed_publish(const Outcome &outcome) {
        note_error(outcome);
        ++result_.publish_failures;
        if (breaker_open())
            stop(Stop::breaker);
    }

    /// Nothing was sent: the row stays as it is.
    void refused(const Outcome &outcome) {
        note_error(outcome);
        ++result_.refused;
        ++result_.unsent;
        ++unsent_in_a_row_;
        if (settings_.refusals_are_the_rows_own ? own_refusals_are_too_many()
                                                : unsent_in_a_row_ >= kUnsentInARow)
            stop(Stop::refused);
    }

    /// One more refusal that was the row's own: so many in a row, over the passes, are the lane's.
    bool own_refusals_are_too_many() {
        ++result_.refused_rows;
        return settings_.breaker_threshold > 0 && result_.refused_rows >= settings_.breaker_threshold;
    }

    /// The endpoint asked to wait: the row is rescheduled without an attempt, and the lane waits.
    void held(std::size_t index, Outcome &outcome) {
        note_error(outcome);
        ++result_.refused;
        const std::int64_t wait_us = std::max(outcome.hold_us, settings_.retry.base_us);
        reschedule(index, wait_us, false, outcome);
        if (settings_.refusals_are_the_rows_own && !own_refusals_are_too_many())
            return;
        result_.hold_us = std::max(result_.hold_us, outcome.hold_us);
        stop(Stop::held);
    }

    void fail(std::size_t index, Outcome &outcome) {
        settlement_.parked.push_back({row(index).handle, std::move(outcome.error)});
        ++result_.failed;
    }

    void retry(std::size_t index, Outcome &outcome) {
        const std::int64_t attempts = row(index).attempts;
        if (settings_.retry.exhausted(attempts)) {
            fail(index, outcome);
            return;
        }
        const double uniform = std::uniform_real_distribution<double>(0.0, 1.0)(random_);
        ++result_.retried;
        reschedule(index, settings_.retry.delay_us(attempts + 1, uniform), true, outcome);
    }

    void reschedule(std::size_t index, std::int64_t wait_us, bool counts, Outcome &outcome) {
        const std::int64_t at_us = clock_.wall_us() + wait_us;
        settlement_.retried.push_back({row(index).handle, at_us, counts, std::move(outcome.error)});
        if (result_.next_retry_at_us == 0 || at_us < result_.next_retry_at_us)
            result_.next_retry_at_us = at_us;
    }

    /// Retain marks published rows while publishing goes on, so that a crash repeats one chunk.
    void settle_full_chunk() {
        const std::size_t chunk = store_.settle_chunk();
        if (chunk == 0 || settlement_.published.size() < chunk)
            return;
        Settlement part;
        part.published.swap(settlement_.published);
        store_.settle(part);
    }

    const PassSettings &settings_;
    Store &store_;
    Transport &transport_;
    Clock &clock_;
    PassHost &host_;
    std::mt19937_64 &random_;
    PassResult &result_;
    const std::int64_t deadline_us_;
    OutcomePolicy policy_;
    const std::vector<Row> *rows_ = nullptr;
    KeyOrder order_;
    Settlement settlement_;
    std::vector<Reply> replies_;
    std::optional<std::int64_t> finish_by_us_;
    std::size_t bytes_in_flight_ = 0;
    std::size_t started_ = 0;
    int unsent_in_a_row_ = 0;
    bool stopped_ = false;
};

/// Delivers `rows` through the store until done, the deadline or a reason to stop.
Settlement deliver_each(Store &store, Clock &clock, PassHost &host, const std::vector<Row> &rows,
                        PassResult &result, std::int64_t deadline_us) {
    Settlement settlement;
    for (const Row &row : rows) {
        const std::int64_t now_us = clock.monotonic_us();
        if (now_us >= deadline_us)
            result.stop = Stop::deadline;
        else if (host.pulse() != PassHost::Order::go_on)
            result.stop = Stop::asked;
        if (result.stop != Stop::drained)
            break;
        if (std::optional<Unsendable> unsendable = store.deliver(row)) {
            settlement.parked.push_back({row.handle, std::move(unsendable->reason)});
            ++result.failed;
            continue;
        }
        settlement.published.push_back(row.handle);
        ++result.published;
        ++result.latency[latency_bucket(clock.monotonic_us() - now_us)];
        host.at(PassPoint::after_publish, static_cast<std::size_t>(result.published));
    }
    return settlement;
}

void reclaim(Store &store, PassResult &result) {
    for (int portion = 0; portion < kReclaimPortions; ++portion) {
        const std::int64_t taken = store.reclaim();
        result.reclaimed += taken;
        result.reclaims_more = taken >= Store::kReclaimRows;
        if (!result.reclaims_more)
            return;
    }
}

/// A pass from begin to commit; `publish` takes the claimed rows, the result to fill and the pass's
/// start, and gives what is still to be written down.
template <class Publish>
PassResult attempt_pass(const PassSettings &settings, Store &store, Clock &clock, PassHost &host,
                        Publish &&publish) {
    PassResult result;
    const std::int64_t started_us = clock.monotonic_us();
    store.begin();
    host.at(PassPoint::after_begin, 0);
    if (settings.reclaim)
        reclaim(store, result);
    if (settings.asks_for_parked)
        store.ask_for_parked();
    const std::vector<Row> rows = store.claim(settings.max_claim_rows);
    result.published = result.duplicates_avoided = store.settled_late();
    result.claimed = static_cast<std::int64_t>(rows.size()) + result.published;
    result.full = rows.size() >= settings.max_claim_rows;
    result.publish_failures = settings.publish_failures;
    result.refused_rows = settings.refused_rows;
    result.next_retry_at_us = store.next_parked_us();
    if (!rows.empty()) {
        host.at(PassPoint::after_claim, 0);
        const Settlement settlement = publish(rows, result, started_us);
        host.at(PassPoint::before_settle, static_cast<std::size_t>(result.published));
        if (!settlement.empty())
            store.settle(settlement);
        host.at(PassPoint::before_commit, static_cast<std::size_t>(result.published));
    }
    store.commit();
    if (!rows.empty())
        host.at(PassPoint::after_commit, static_cast<std::size_t>(result.published));
    result.untouched = result.claimed - result.published - result.failed - result.retried - result.refused;
    return result;
}

} // namespace

PassResult run_pass(const PassSettings &settings, Store &store, Transport &transport, Clock &clock,
                    PassHost &host, std::mt19937_64 &random) {
    try {
        return attempt_pass(settings, store, clock, host,
                            [&](const std::vector<Row> &rows, PassResult &result, std::int64_t started_us) {
                                return Publishing(settings, store, transport, clock, host, random, result,
                                                  started_us)
                                    .run(rows);
                            });
    } catch (...) {
        std::vector<Reply> discarded;
        transport.cancel(discarded);
        store.rollback();
        throw;
    }
}

PassResult run_local_pass(const PassSettings &settings, Store &store, Clock &clock, PassHost &host) {
    try {
        return attempt_pass(settings, store, clock, host,
                            [&](const std::vector<Row> &rows, PassResult &result, std::int64_t started_us) {
                                return deliver_each(store, clock, host, rows, result,
                                                    started_us + settings.deadline_us);
                            });
    } catch (...) {
        store.rollback();
        throw;
    }
}

} // namespace outbox_relay::core
