#pragma once

#include <cstdint>
#include <vector>

#include "pg/spi.hpp"

namespace outbox_relay::store {

/// One-dimensional arrays as parameters of statements, allocated in the current memory context. The
/// elements of the first two are pointers (to ItemPointerData, to the 16 bytes of a UUID) that are only
/// borrowed until the array is made.
pg::Value tid_array(std::vector<Datum> &elements);
pg::Value uuid_array(std::vector<Datum> &elements);
pg::Value text_array(std::vector<Datum> &elements);
pg::Value int4_array(std::vector<Datum> &elements);
/// `nulls` has an element that is not 0 where the array has NULL; empty: nowhere.
pg::Value timestamptz_array(std::vector<Datum> &elements, std::vector<std::uint8_t> nulls = {});

} // namespace outbox_relay::store
