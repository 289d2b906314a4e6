#include "store/encoding.hpp"

#include <algorithm>

#include "core/text.hpp"

#include "pg/guard.hpp"
#include "pg/transaction.hpp"

extern "C" {
#include "access/xact.h"
#include "catalog/namespace.h"
#include "mb/pg_wchar.h"
}

namespace outbox_relay::store {

namespace {

bool is_ascii(std::string_view bytes) {
    return std::all_of(bytes.begin(), bytes.end(),
                       [](char c) { return static_cast<unsigned char>(c) < 0x80; });
}

/// Converts without raising; nothing unless every byte was converted. In a transaction.
std::optional<std::string> convert_in_transaction(std::string_view bytes, int from, int to) {
    const Oid procedure = pg::guard([from, to] { return FindDefaultConversionProc(from, to); });
    if (!OidIsValid(procedure))
        return std::nullopt;
    std::string source(bytes);
    std::string target(source.size() * MAX_CONVERSION_GROWTH + 1, '\0');
    const int converted = pg::guard([&] {
        return pg_do_encoding_conversion_buf(
            procedure, from, to, reinterpret_cast<unsigned char *>(source.data()),
            static_cast<int>(source.size()), reinterpret_cast<unsigned char *>(target.data()),
            static_cast<int>(target.size()), true);
    });
    if (converted != static_cast<int>(source.size()))
        return std::nullopt;
    target.resize(target.find('\0'));
    return target;
}

/// The same from anywhere: a worker also names routes and errors between its transactions, and the
/// catalog that knows the conversion can't be read there.
std::optional<std::string> convert(std::string_view bytes, int from, int to) {
    if (IsTransactionState())
        return convert_in_transaction(bytes, from, to);
    pg::start_transaction();
    try {
        std::optional<std::string> converted = convert_in_transaction(bytes, from, to);
        pg::commit_transaction();
        return converted;
    } catch (...) {
        pg::abort_transaction();
        throw;
    }
}

} // namespace

std::optional<std::string> to_utf8(std::string_view bytes) {
    if (is_ascii(bytes))
        return std::string(bytes);
    const int encoding = GetDatabaseEncoding();
    if (encoding == PG_UTF8 || encoding == PG_SQL_ASCII) {
        if (!core::is_utf8(bytes))
            return std::nullopt;
        return std::string(bytes);
    }
    return convert(bytes, encoding, PG_UTF8);
}

std::string from_utf8(const std::string &text) {
    const int encoding = GetDatabaseEncoding();
    if (encoding == PG_UTF8 || is_ascii(text))
        return text;
    if (encoding != PG_SQL_ASCII) {
        std::optional<std::string> converted = convert(text, PG_UTF8, encoding);
        if (converted)
            return *converted;
    }
    std::string ascii = text;
    std::replace_if(
        ascii.begin(), ascii.end(), [](char c) { return static_cast<unsigned char>(c) >= 0x80; }, '?');
    return ascii;
}

} // namespace outbox_relay::store
