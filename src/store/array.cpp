#include "store/array.hpp"

#include "pg/guard.hpp"

extern "C" {
#include "catalog/pg_type.h"
#include "storage/itemptr.h"
#include "utils/array.h"
#include "utils/uuid.h"
}

namespace outbox_relay::store {

namespace {

/// An element type: oid, typlen, typbyval, typalign.
struct Element {
    Oid type;
    int length;
    bool by_value;
    char align;
};

pg::Value array_of(std::vector<Datum> &elements, bool *nulls, const Element &element) {
    const int count = static_cast<int>(elements.size());
    return pg::guard([&elements, nulls, &element, count] {
        int dimensions[1] = {count};
        int bounds[1] = {1};
        ArrayType *array =
            count == 0 ? construct_empty_array(element.type)
                       : construct_md_array(elements.data(), nulls, 1, dimensions, bounds, element.type,
                                            element.length, element.by_value, element.align);
        return pg::Value(PointerGetDatum(array));
    });
}

} // namespace

pg::Value tid_array(std::vector<Datum> &elements) {
    return array_of(elements, nullptr, {TIDOID, sizeof(ItemPointerData), false, TYPALIGN_SHORT});
}

pg::Value uuid_array(std::vector<Datum> &elements) {
    return array_of(elements, nullptr, {UUIDOID, UUID_LEN, false, TYPALIGN_CHAR});
}

pg::Value text_array(std::vector<Datum> &elements) {
    return array_of(elements, nullptr, {TEXTOID, -1, false, TYPALIGN_INT});
}

pg::Value int4_array(std::vector<Datum> &elements) {
    return array_of(elements, nullptr, {INT4OID, 4, true, TYPALIGN_INT});
}

pg::Value timestamptz_array(std::vector<Datum> &elements, std::vector<std::uint8_t> nulls) {
    return array_of(elements, nulls.empty() ? nullptr : reinterpret_cast<bool *>(nulls.data()),
                    {TIMESTAMPTZOID, 8, FLOAT8PASSBYVAL, TYPALIGN_DOUBLE});
}

} // namespace outbox_relay::store
