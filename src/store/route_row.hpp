#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "store/route.hpp"

extern "C" {
#include "access/htup.h"
#include "access/tupdesc.h"
#include "datatype/timestamp.h"
}

namespace outbox_relay::store {

/// One row of outbox_route with its columns found by name. Lives in the memory context that was
/// current when it was made, and no longer than the tuple.
class RouteRow {
  public:
    /// Raises when the tuple can't be read.
    RouteRow(HeapTuple tuple, TupleDesc descriptor);

    bool is_null(const char *column) const { return values_[index(column)].null; }

    /// Each gives the empty value for NULL.
    std::string text(const char *column) const;
    std::string name(const char *column) const;
    bool boolean(const char *column) const;
    std::optional<std::int64_t> integer(const char *column) const;
    std::optional<Interval> interval(const char *column) const;
    /// Elements of an array; an empty one stands for a NULL element.
    std::vector<std::optional<std::string>> texts(const char *column) const;
    std::vector<std::optional<int>> integers(const char *column) const;
    /// A jsonb column as JSON text in UTF-8.
    std::string json(const char *column) const;

    HeapTuple tuple() const { return tuple_; }
    TupleDesc descriptor() const { return descriptor_; }
    /// The column's number, 1 the first. Raises when the row has no such column.
    int number(const char *column) const;

  private:
    struct Cell {
        Datum datum;
        bool null;
    };

    std::size_t index(const char *column) const { return static_cast<std::size_t>(number(column) - 1); }
    const Cell &cell(const char *column) const { return values_[index(column)]; }

    HeapTuple tuple_;
    TupleDesc descriptor_;
    std::vector<Cell> values_;
};

/// The row as a Route. Never refuses: what the trigger would not have let in becomes the nearest
/// value (months of an interval count 30 days, unknown words the default).
Route parse_route(const RouteRow &row);

/// An interval in milliseconds, rounded away from zero, so that what is not nothing stays so.
std::int64_t interval_ms(const Interval &interval);

/// The members of a JSON object of strings, in order; nothing when `json` is anything else.
std::optional<std::vector<std::pair<std::string, std::string>>> parse_headers(const std::string &json);

} // namespace outbox_relay::store
