#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "pg/session.hpp"

extern "C" {
#include "executor/spi.h"
}

namespace pg {

/// A parameter of a statement.
struct Value {
    Datum datum = 0;
    bool null = true;

    Value() = default;
    explicit Value(Datum value) : datum(value), null(false) {}
};

/// A statement prepared once and kept for the life of the process; it replans itself after DDL.
class Plan {
  public:
    Plan() = default;
    Plan(const Plan &) = delete;
    Plan &operator=(const Plan &) = delete;
    Plan(Plan &&other) noexcept : plan_(other.plan_) { other.plan_ = nullptr; }
    Plan &operator=(Plan &&other) noexcept;
    ~Plan() { release(); }

    /// Needs spi_connect(). `generic` forces a plan that does not depend on the parameters: an idle
    /// claim costs 9 us with it and 120 to 190 us without.
    void prepare(const std::string &sql, std::span<const Oid> types, bool generic);
    /// The same as `context.role`, in its context, with a generic plan.
    void prepare_as(const Context &context, const std::string &sql, std::span<const Oid> types);
    bool prepared() const noexcept { return plan_ != nullptr; }
    void release() noexcept;
    SPIPlanPtr get() const noexcept { return plan_; }

  private:
    SPIPlanPtr plan_ = nullptr;
};

/// What a statement gave. Valid until spi_finish() or the transaction's end.
struct Result {
    std::uint64_t processed = 0;
    SPITupleTable *table = nullptr;

    /// Value of column `column` (1 is the first) of row `row` (0 is the first).
    Value value(std::uint64_t row, int column) const;
};

/// Opens and closes a connection to SPI. After an error the abort closes it.
void spi_connect();
void spi_finish();

/// Runs a kept plan under `context`, with a snapshot of its own; read_only statements see the
/// transaction's snapshot. `name` is what pg_stat_activity shows; nullptr: as it is. Throws pg::Error also
/// for what SPI reports by a code.
Result execute_as(const Context &context, const Plan &plan, std::span<const Value> values, const char *name,
                  std::uint64_t max_rows = 0);

/// The same for a statement that has to see what is committed now, whatever snapshot the transaction
/// has; nothing of what it sees counts against the transaction's isolation.
Result execute_latest_as(const Context &context, const Plan &plan, std::span<const Value> values);

/// The rows of a kept plan in portions: none is fetched, and none locked, before it is asked for.
class Cursor {
  public:
    /// Opens it under `context`. Needs spi_connect().
    Cursor(const Context &context, const Plan &plan, std::span<const Value> values);
    Cursor(const Cursor &) = delete;
    Cursor &operator=(const Cursor &) = delete;

    /// The next `max_rows` rows; fewer at the end.
    Result fetch(std::uint64_t max_rows);

    /// After an error the abort does it.
    void close();

  private:
    const Context context_;
    Portal portal_ = nullptr;
};

/// Runs a kept plan as the current user, in the current context (staging, probes).
Result execute(const Plan &plan, std::span<const Value> values, bool read_only, std::uint64_t max_rows = 0);

/// Runs a statement text once, as the current user. Needs spi_connect().
Result execute_text(const std::string &sql, bool read_only);

/// A text datum made of `text`, in the current memory context.
Datum text_datum(const std::string &text);
/// The text of a text datum.
std::string text_of(Datum datum);

} // namespace pg
