#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <span>
#include <string>

#include "core/uuid.hpp"
#include "pg/spi.hpp"

extern "C" {
#include "datatype/timestamp.h"
}

namespace outbox_relay::api {

/// The rows of a set-returning function, kept in a tuplestore.
class Rows {
  public:
    /// Of a function of records, or, `single`, of one that returns a set of plain values. Raises when
    /// the caller can't take a set.
    explicit Rows(FunctionCallInfo fcinfo, bool single = false);

    /// Adds a row; as many values as the function's result has columns.
    void put(std::span<const pg::Value> values);

  private:
    FunctionCallInfo fcinfo_;
};

/// Values of a row. Those made of nothing are NULL.
pg::Value text_value(const std::string &text);
pg::Value text_or_null(const std::string &text);
pg::Value int_value(std::int32_t number);
pg::Value bigint_value(std::uint64_t number);
pg::Value double_value(double number);
pg::Value uuid_value(const std::optional<core::Uuid> &uuid);
pg::Value time_value(TimestampTz time); ///< 0 is none
pg::Value bigints_value(std::span<const std::uint64_t> numbers);

} // namespace outbox_relay::api
