/// The pass against a simulated table, endpoint and clock: seeded random schedules with failures at
/// every call. What must hold is checked after each: nothing lost, duplicates only where a failure
/// explains them, key order kept, counters right.

#include "core/pass.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>
#include <stdexcept>

using namespace outbox_relay::core;

namespace {

using Random = std::mt19937_64;

bool chance(Random &random, double probability) {
    return std::uniform_real_distribution<double>(0, 1)(random) < probability;
}

class FakeClock : public Clock {
  public:
    std::int64_t monotonic_us() override { return now_us; }
    std::int64_t wall_us() override { return 1'700'000'000'000'000 + now_us; }
    std::int64_t now_us = 1'000'000;
};

/// One event over its life, as an all-knowing observer sees it.
struct Event {
    std::optional<std::string> key;
    bool pending = true; ///< in the table as pending
    bool failed = false; ///< in the table as failed
    bool gone = false;
    std::int64_t available_at_us = 0;
    std::int32_t attempts = 0;
    int delivered = 0; ///< whole requests that reached the endpoint
    int acknowledged = 0;
    int excused = 0; ///< deliveries that a failure allows to repeat
    bool delivered_in_pass = false;
};

struct World {
    FakeClock clock;
    std::vector<Event> events;
    Random random;
    double store_fault = 0;
    double transport_fault = 0;
};

/// A consume store, or with chunk > 0 a retain-like one whose settle() is final at once.
class FakeStore : public Store {
  public:
    FakeStore(World &world, std::size_t chunk) : world_(world), chunk_(chunk) {}

    void begin() override {
        fail("begin");
        claimed_.clear();
        draft_ = world_.events;
    }
    std::int64_t reclaim() override { return 0; }
    std::vector<Row> claim(std::size_t max_rows) override {
        fail("claim");
        std::vector<Row> rows;
        for (std::size_t i = 0; i < world_.events.size() && rows.size() < max_rows; ++i) {
            const Event &event = world_.events[i];
            if (!event.pending || event.available_at_us > world_.clock.wall_us())
                continue;
            Row row;
            row.handle = static_cast<std::uint32_t>(claimed_.size());
            row.event_id.bytes[0] = static_cast<std::uint8_t>(i >> 8);
            row.event_id.bytes[1] = static_cast<std::uint8_t>(i);
            row.event_type = "type";
            row.ordering_key = event.key;
            row.occurred_at_us = 0;
            row.attempts = event.attempts;
            claimed_.push_back(i);
            rows.push_back(row);
        }
        return rows;
    }
    std::variant<std::string, Unsendable> render(const Row &row) override {
        fail("render");
        return std::to_string(claimed_[row.handle]);
    }
    /// A target of the store's own: its effect lasts as the pass does.
    std::optional<Unsendable> deliver(const Row &row) override {
        fail("deliver");
        world_.clock.now_us += static_cast<std::int64_t>(world_.random() % 50'000);
        if (claimed_[row.handle] % 11 == 10)
            return Unsendable{"never"};
        order_kept = order_kept && (calls_.empty() || calls_.back() < claimed_[row.handle]);
        calls_.push_back(claimed_[row.handle]);
        return std::nullopt;
    }
    void settle(const Settlement &settlement) override {
        fail("settle");
        for (const std::uint32_t handle : settlement.published) {
            Event &event = draft_[claimed_[handle]];
            event.pending = false;
            event.gone = true;
        }
        for (const Retry &retry : settlement.retried) {
            Event &event = draft_[claimed_[retry.handle]];
            event.attempts += retry.counts ? 1 : 0;
            event.available_at_us = retry.available_at_us;
        }
        for (const Park &park : settlement.parked) {
            Event &event = draft_[claimed_[park.handle]];
            event.pending = false;
            event.failed = true;
        }
        if (chunk_ > 0)
            write();
        fail("settle, behind the statements");
    }
    std::size_t settle_chunk() const override { return chunk_; }
    void commit() override {
        fail("commit");
        for (const std::size_t event : calls_)
            ++world_.events[event].delivered;
        write();
    }
    void rollback() noexcept override { rolled_back = true; }

    bool rolled_back = false;
    bool order_kept = true;

  private:
    void fail(const char *where) {
        if (chance(world_.random, world_.store_fault))
            throw std::runtime_error(where);
    }
    /// What the table learns; what the endpoint has seen is not the table's.
    void write() {
        for (std::size_t i = 0; i < draft_.size(); ++i) {
            Event &event = world_.events[i];
            event.pending = draft_[i].pending;
            event.failed = draft_[i].failed;
            event.gone = draft_[i].gone;
            event.attempts = draft_[i].attempts;
            event.available_at_us = draft_[i].available_at_us;
        }
    }

    World &world_;
    const std::size_t chunk_;
    std::vector<std::size_t> claimed_;
    std::vector<std::size_t> calls_;
    std::vector<Event> draft_;
};

class FakeTransport : public Transport {
  public:
    explicit FakeTransport(World &world) : world_(world) {}

    void start(std::uint64_t ticket, Request request, const RequestLimits &limits) override {
        const std::size_t event = static_cast<std::size_t>(std::stoul(request.body));
        check_order(event);
        Flight flight;
        flight.event = event;
        flight.reply.ticket = ticket;
        flight.reply.body_bytes = static_cast<std::int64_t>(request.body.size());
        flight.ends_us = world_.clock.now_us + 1000 + static_cast<std::int64_t>(world_.random() % 300'000);
        decide(flight);
        if (limits.timeout_ms > 0 && flight.ends_us > world_.clock.now_us + limits.timeout_ms * 1000) {
            flight.ends_us = world_.clock.now_us + limits.timeout_ms * 1000;
            flight.reply.failure = Failure::timeout;
            flight.reply.header_complete = false;
        }
        flights_.push_back(flight);
    }
    void poll(int max_wait_ms, std::vector<Reply> &replies) override {
        if (chance(world_.random, world_.transport_fault))
            throw std::runtime_error("transport");
        std::int64_t next_us = world_.clock.now_us + max_wait_ms * 1000;
        for (const Flight &flight : flights_)
            next_us = std::min(next_us, std::max(flight.ends_us, world_.clock.now_us));
        world_.clock.now_us = next_us;
        for (std::size_t i = 0; i < flights_.size();) {
            if (flights_[i].ends_us > world_.clock.now_us) {
                ++i;
                continue;
            }
            end(flights_[i], replies);
            flights_.erase(flights_.begin() + static_cast<std::ptrdiff_t>(i));
        }
    }
    void cancel(std::vector<Reply> &replies) override {
        for (Flight &flight : flights_) {
            flight.reply.failure = Failure::cancelled;
            flight.reply.header_complete = false;
            flight.reply.status = 0;
            // It may have arrived all the same.
            if (!flight.reply.nothing_sent && chance(world_.random, 0.5))
                deliver(flight, false);
            else
                flight.reply.nothing_sent = false;
            replies.push_back(flight.reply);
        }
        flights_.clear();
    }
    std::size_t in_flight() const override { return flights_.size(); }

    std::size_t most_in_flight = 0;
    int overlaps = 0;
    int inversions = 0;
    std::map<std::string, std::size_t> last_started; ///< of each key in this pass

  private:
    struct Flight {
        std::size_t event = 0;
        Reply reply;
        std::int64_t ends_us = 0;
        bool reaches = true;
    };

    void decide(Flight &flight) {
        Reply &reply = flight.reply;
        reply.header_complete = true;
        reply.uploaded = true;
        const std::uint64_t dice = world_.random() % 100;
        if (dice < 60) {
            reply.status = 200;
        } else if (dice < 75) {
            reply.status = 500;
        } else if (dice < 80) {
            reply.status = 200;
            reply.uploaded = false;
            flight.reaches = false;
        } else if (dice < 86) {
            reply.failure = Failure::reset;
            reply.header_complete = false;
        } else if (dice < 91) {
            reply.failure = Failure::connect;
            reply.header_complete = false;
            reply.nothing_sent = true;
            flight.reaches = false;
        } else if (dice < 94) {
            reply.status = 429;
            reply.retry_after = "1";
            flight.reaches = false;
        } else {
            flight.ends_us += 60'000'000;
            reply.status = 200;
        }
    }
    void check_order(std::size_t event) {
        const std::optional<std::string> &key = world_.events[event].key;
        for (const Flight &flight : flights_)
            if (key && world_.events[flight.event].key == key)
                ++overlaps;
        if (key) {
            const auto last = last_started.find(*key);
            if (last != last_started.end() && last->second > event)
                ++inversions;
            last_started[*key] = event;
        }
        most_in_flight = std::max(most_in_flight, flights_.size() + 1);
    }
    void deliver(Flight &flight, bool acknowledged) {
        Event &event = world_.events[flight.event];
        ++event.delivered;
        event.delivered_in_pass = true;
        event.acknowledged += acknowledged ? 1 : 0;
        // A delivery that the relay can't know of, or that failed, may be repeated.
        event.excused += acknowledged ? 0 : 1;
    }
    void end(Flight &flight, std::vector<Reply> &replies) {
        flight.reply.latency_us = 1000;
        if (flight.reaches)
            deliver(flight, flight.reply.header_complete && flight.reply.status == 200);
        replies.push_back(flight.reply);
    }

    World &world_;
    std::vector<Flight> flights_;
};

class FakeHost : public PassHost {
  public:
    explicit FakeHost(World &world, double order) : world_(world), order_(order) {}
    Order pulse() override {
        if (!chance(world_.random, order_))
            return Order::go_on;
        asked = true;
        return chance(world_.random, 0.5) ? Order::finish : Order::leave;
    }
    void at(PassPoint, std::size_t) override {}
    bool asked = false;

  private:
    World &world_;
    double order_;
};

PassSettings settings_for(Random &random) {
    PassSettings settings;
    settings.max_claim_rows = 1 + random() % 40;
    settings.concurrency = 1 + random() % 10;
    settings.deadline_us = 50'000 + static_cast<std::int64_t>(random() % 3'000'000);
    settings.request_timeout_us = random() % 3 == 0 ? 200'000 : 0;
    settings.breaker_threshold = static_cast<std::uint32_t>(random() % 12);
    settings.retry = {1'000'000, 60'000'000, static_cast<std::int32_t>(random() % 4)};
    settings.envelope.url = "http://endpoint/";
    settings.envelope.source = "/test";
    settings.envelope.route = "route";
    return settings;
}

void expect_counters(const PassResult &result) {
    EXPECT_EQ(result.claimed,
              result.published + result.failed + result.retried + result.refused + result.untouched);
    EXPECT_GE(result.untouched, 0);
}

/// Deliveries of a pass that came to nothing, or of a settle chunk that was not written.
void excuse_pass(World &world) {
    for (Event &event : world.events)
        if (event.delivered_in_pass && !event.gone && !event.failed)
            ++event.excused;
}

void run_schedule(std::uint64_t seed, std::size_t chunk) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    World world;
    world.random.seed(seed);
    world.store_fault = world.random() % 3 == 0 ? 0.02 : 0;
    world.transport_fault = world.random() % 4 == 0 ? 0.01 : 0;
    const double order = world.random() % 5 == 0 ? 0.02 : 0;
    world.events.resize(1 + world.random() % 60);
    for (Event &event : world.events)
        if (world.random() % 4 != 0)
            event.key = std::string(1, static_cast<char>('a' + world.random() % 5));
    const PassSettings settings = settings_for(world.random);

    FakeTransport transport(world);
    for (int pass = 0; pass < 30; ++pass) {
        for (Event &event : world.events)
            event.delivered_in_pass = false;
        transport.last_started.clear();
        FakeStore store(world, chunk);
        FakeHost host(world, order);
        try {
            expect_counters(run_pass(settings, store, transport, world.clock, host, world.random));
            EXPECT_FALSE(store.rolled_back);
        } catch (const std::runtime_error &) {
            EXPECT_TRUE(store.rolled_back);
            excuse_pass(world);
        }
        EXPECT_EQ(transport.in_flight(), 0u);
        world.clock.now_us += 70'000'000;
    }

    EXPECT_EQ(transport.overlaps, 0);
    EXPECT_EQ(transport.inversions, 0);
    EXPECT_LE(transport.most_in_flight, settings.concurrency);
    for (const Event &event : world.events) {
        EXPECT_TRUE(event.gone ? event.acknowledged > 0 : (event.pending || event.failed)) << "lost";
        EXPECT_LE(event.delivered, 1 + event.excused) << "repeated without a reason";
    }
}

/// A target inside the database: each event takes effect exactly once, in claim order within a pass, and no
/// attempt is counted.
void run_local_schedule(std::uint64_t seed) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    World world;
    world.random.seed(seed);
    world.store_fault = world.random() % 2 == 0 ? 0.02 : 0;
    const double order = world.random() % 5 == 0 ? 0.02 : 0;
    world.events.resize(1 + world.random() % 60);
    const PassSettings settings = settings_for(world.random);
    for (int pass = 0; pass < 60; ++pass) {
        FakeStore store(world, 0);
        FakeHost host(world, order);
        const std::int64_t started_us = world.clock.now_us;
        try {
            const PassResult result = run_local_pass(settings, store, world.clock, host);
            expect_counters(result);
            EXPECT_EQ(result.retried + result.refused, 0);
            EXPECT_LE(world.clock.now_us - started_us, settings.deadline_us + 50'000);
            EXPECT_EQ(result.stop == Stop::asked, host.asked);
        } catch (const std::runtime_error &) {
            EXPECT_TRUE(store.rolled_back);
        }
        EXPECT_TRUE(store.order_kept);
    }
    for (std::size_t i = 0; i < world.events.size(); ++i) {
        const Event &event = world.events[i];
        EXPECT_EQ(event.delivered, event.gone ? 1 : 0);
        EXPECT_EQ(event.failed, i % 11 == 10 && !event.pending);
        EXPECT_EQ(event.attempts, 0);
    }
}

} // namespace

TEST(Pass, delivers_exactly_once_inside_the_database) {
    for (std::uint64_t seed = 1; seed <= 5'000; ++seed) {
        run_local_schedule(seed);
        if (HasFatalFailure() || HasNonfatalFailure())
            break;
    }
}

TEST(Pass, loses_nothing_under_random_failures) {
    for (std::uint64_t seed = 1; seed <= 10'000; ++seed) {
        run_schedule(seed, 0);
        if (HasFatalFailure() || HasNonfatalFailure())
            break;
    }
}

TEST(Pass, settles_in_chunks_where_the_store_asks) {
    for (std::uint64_t seed = 1; seed <= 2'000; ++seed) {
        run_schedule(seed, 4);
        if (HasFatalFailure() || HasNonfatalFailure())
            break;
    }
}
