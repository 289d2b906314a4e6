#include "api/rows.hpp"

#include <cstring>
#include <vector>

#include "pg/guard.hpp"

extern "C" {
#include "catalog/pg_type.h"
#include "funcapi.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/timestamp.h"
#include "utils/tuplestore.h"
#include "utils/uuid.h"
}

namespace outbox_relay::api {

Rows::Rows(FunctionCallInfo fcinfo, bool single) : fcinfo_(fcinfo) {
    pg::guard([fcinfo, single] { InitMaterializedSRF(fcinfo, single ? MAT_SRF_USE_EXPECTED_DESC : 0); });
}

void Rows::put(std::span<const pg::Value> values) {
    std::vector<Datum> datums;
    const auto nulls = std::make_unique<bool[]>(values.size());
    datums.reserve(values.size());
    for (const pg::Value &value : values) {
        nulls[datums.size()] = value.null;
        datums.push_back(value.datum);
    }
    const auto *result = reinterpret_cast<ReturnSetInfo *>(fcinfo_->resultinfo);
    pg::guard([&] { tuplestore_putvalues(result->setResult, result->setDesc, datums.data(), nulls.get()); });
}

pg::Value text_value(const std::string &text) {
    return pg::Value(pg::text_datum(text));
}

pg::Value text_or_null(const std::string &text) {
    return text.empty() ? pg::Value() : text_value(text);
}

pg::Value int_value(std::int32_t number) {
    return pg::Value(Int32GetDatum(number));
}

pg::Value bigint_value(std::uint64_t number) {
    return pg::Value(Int64GetDatum(static_cast<std::int64_t>(number)));
}

pg::Value double_value(double number) {
    return pg::Value(Float8GetDatum(number));
}

pg::Value uuid_value(const std::optional<core::Uuid> &uuid) {
    if (!uuid.has_value())
        return {};
    return pg::Value(pg::guard([&uuid] {
        auto *copy = static_cast<pg_uuid_t *>(palloc(sizeof(pg_uuid_t)));
        std::memcpy(copy->data, uuid->bytes.data(), UUID_LEN);
        return UUIDPGetDatum(copy);
    }));
}

pg::Value time_value(TimestampTz time) {
    return time == 0 ? pg::Value() : pg::Value(TimestampTzGetDatum(time));
}

pg::Value bigints_value(std::span<const std::uint64_t> numbers) {
    return pg::Value(pg::guard([numbers] {
        auto *datums = static_cast<Datum *>(palloc(numbers.size() * sizeof(Datum)));
        for (std::size_t i = 0; i < numbers.size(); ++i)
            datums[i] = Int64GetDatum(static_cast<std::int64_t>(numbers[i]));
        return PointerGetDatum(construct_array(datums, static_cast<int>(numbers.size()), INT8OID, 8,
                                               FLOAT8PASSBYVAL, TYPALIGN_DOUBLE));
    }));
}

} // namespace outbox_relay::api
