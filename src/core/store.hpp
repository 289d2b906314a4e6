#pragma once

#include "core/row.hpp"

#include <cstddef>
#include <cstdint>
#include <optional>
#include <stdexcept>
#include <string>
#include <variant>
#include <vector>

namespace outbox_relay::core {

/// A row to be tried again: pending, available at `available_at_us`, attempts one higher when
/// `counts` (a refusal reschedules without counting).
struct Retry {
    std::uint32_t handle = 0;
    std::int64_t available_at_us = 0; ///< wall clock, since 1970
    bool counts = true;
    std::string error; ///< for last_error: clean UTF-8
};

/// A row to be parked as failed, attempts as they are.
struct Park {
    std::uint32_t handle = 0;
    std::string error;
};

/// What a pass has to write down about the rows that it claimed; rows in none of the lists stay as
/// they are.
struct Settlement {
    std::vector<std::uint32_t> published;
    std::vector<Retry> retried;
    std::vector<Park> parked;

    bool empty() const { return published.empty() && retried.empty() && parked.empty(); }
};

/// Why a payload can't be sent.
struct Unsendable {
    std::string reason;
};

/// The outbox table of one lane, as a pass uses it. Every call may throw; then the pass calls
/// rollback() and ends as failed.
class Store {
  public:
    virtual ~Store() = default;

    /// Opens the pass, arms its limits and checks what can be checked before anything is sent.
    virtual void begin() = 0;

    /// How many rows begin() has settled that an earlier pass had published.
    virtual std::int64_t settled_late() const { return 0; }

    /// What reclaim() takes at most.
    static constexpr std::int64_t kReclaimRows = 1000;

    /// Returns stale `processing` rows to pending; how many.
    virtual std::int64_t reclaim() = 0;

    /// Claims up to `max_rows`, in claim order. A store that settles outside of the claim's
    /// transaction (retain) commits here.
    virtual std::vector<Row> claim(std::size_t max_rows) = 0;

    /// The claims from here on find out when the next row is ripe that is parked.
    virtual void ask_for_parked() {}

    /// When it is, wall clock, if a claim that came back short was asked to find out; 0: none.
    virtual std::int64_t next_parked_us() const { return 0; }

    /// The payload of a claimed row, UTF-8, or why it can't be sent.
    virtual std::variant<std::string, Unsendable> render(const Row &row) = 0;

    /// Delivers a claimed row to a target inside the database, in the pass's transaction, or says why
    /// the row can't be: it is parked. What fails in the target is thrown. Of a store without such a
    /// target nobody asks it.
    virtual std::optional<Unsendable> deliver(const Row &row) {
        (void)row;
        throw std::logic_error("the store has no target of its own");
    }

    /// The endpoint has acknowledged `row`: a store may remember it in case settling fails.
    virtual void note_published(const Row &row) noexcept { (void)row; }

    /// Writes outcomes down; throws when the table did not do what it was told (counts differ).
    virtual void settle(const Settlement &settlement) = 0;

    /// How many published rows a settle() takes at once while publishing goes on; 0: all at the
    /// end, in the claim's transaction (consume).
    virtual std::size_t settle_chunk() const = 0;

    virtual void commit() = 0;
    virtual void rollback() noexcept = 0;
};

} // namespace outbox_relay::core
