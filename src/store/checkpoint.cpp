#include "store/checkpoint.hpp"

#include <string_view>
#include <unordered_map>

#include "pg/guard.hpp"
#include "pg/spi.hpp"
#include "store/encoding.hpp"
#include "store/relation.hpp"

extern "C" {
#include "access/detoast.h"
#include "access/heapam.h"
#include "access/table.h"
#include "catalog/pg_am.h"
#include "catalog/pg_class.h"
#include "catalog/pg_index.h"
#include "catalog/pg_type.h"
#include "common/hashfn.h"
#include "storage/bufmgr.h"
#include "storage/lock.h"
#include "utils/rel.h"
#include "utils/relcache.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
}

namespace outbox_relay::store {

namespace {

constexpr const char *kNeeds =
    "A checkpoint is an ordinary table with node_key text PRIMARY KEY and hlc bigint NOT NULL.";

std::string remedy() {
    return "Create one, for example CREATE TABLE app.hlc_checkpoint (node_key text PRIMARY KEY, hlc bigint "
           "NOT NULL), and name it in outbox_relay.hlc_checkpoint.";
}

[[noreturn]] void refuse(int sqlstate, const std::string &problem) {
    pg::raise({sqlstate, "outbox_relay.hlc_checkpoint cannot be used: " + problem, kNeeds, remedy()});
}

/// True when the table has a unique index on node_key alone that ON CONFLICT takes. C regime.
bool has_unique_key(Oid table, AttrNumber node_key) {
    const ::Relation relation = table_open(table, AccessShareLock);
    bool found = false;
    ListCell *cell = nullptr;
    foreach (cell, RelationGetIndexList(relation)) {
        const HeapTuple tuple = SearchSysCache1(INDEXRELID, ObjectIdGetDatum(lfirst_oid(cell)));
        if (!HeapTupleIsValid(tuple))
            continue;
        const Form_pg_index index = reinterpret_cast<Form_pg_index>(GETSTRUCT(tuple));
        found = found || (index->indisunique && index->indimmediate && index->indisvalid &&
                          index->indnkeyatts == 1 && index->indkey.values[0] == node_key &&
                          heap_attisnull(tuple, Anum_pg_index_indpred, nullptr));
        ReleaseSysCache(tuple);
    }
    table_close(relation, AccessShareLock);
    return found;
}

bool is_heap(Oid table) {
    return pg::guard([table] {
        const ::Relation relation = table_open(table, AccessShareLock);
        const bool heap = relation->rd_rel->relam == HEAP_TABLE_AM_OID;
        table_close(relation, AccessShareLock);
        return heap;
    });
}

const Column &require_column(const Relation &table, const char *name) {
    const Column *column = table.column(name);
    if (column == nullptr)
        refuse(ERRCODE_UNDEFINED_COLUMN, "table " + table.qualified_name + " has no column \"" + name + "\"");
    return *column;
}

void require_plain(const Relation &table) {
    if (table.kind != RELKIND_RELATION || table.persistence != RELPERSISTENCE_PERMANENT)
        refuse(ERRCODE_WRONG_OBJECT_TYPE, table.qualified_name + " is not an ordinary, permanent table");
    if (!is_heap(table.oid))
        refuse(ERRCODE_WRONG_OBJECT_TYPE, table.qualified_name + " does not have the access method \"heap\"");
    for (const Column &column : table.columns)
        if (column.name != "node_key" && column.name != "hlc" && column.not_null && !column.has_default)
            refuse(ERRCODE_NOT_NULL_VIOLATION, "column \"" + column.name + "\" of table " +
                                                   table.qualified_name + " is NOT NULL and has no default");
}

// ---------------------------------------------------------------------------------------------
// Reading
// ---------------------------------------------------------------------------------------------

/// C regime: true when the key of `tuple` is `node_key`. Keys that were toasted out of line are long
/// and nobody's here.
bool has_key(HeapTuple tuple, TupleDesc descriptor, AttrNumber attnum, std::string_view node_key) {
    bool null = false;
    const Datum datum = heap_getattr(tuple, attnum, descriptor, &null);
    if (null || VARATT_IS_EXTERNAL(DatumGetPointer(datum)) ||
        toast_raw_datum_size(datum) - VARHDRSZ != node_key.size())
        return false;
    const struct varlena *key = PG_DETOAST_DATUM_PACKED(datum);
    return std::string_view(VARDATA_ANY(key), VARSIZE_ANY_EXHDR(key)) == node_key;
}

struct Mark {
    std::int64_t value;
    bool found;
};

/// C regime. Every version is looked at and judged by the newest snapshot: a scan under that snapshot
/// itself would take predicate locks in a serializable transaction, and fail one now and then.
Mark read_mark(const Checkpoint &checkpoint, const std::string_view *node_key) {
    Mark mark{0, false};
    const ::Relation relation = table_open(checkpoint.relation, AccessShareLock);
    const TupleDesc descriptor = RelationGetDescr(relation);
    const Snapshot newest = RegisterSnapshot(GetLatestSnapshot());
    const TableScanDesc scan = table_beginscan(relation, SnapshotAny, 0, nullptr);
    while (const HeapTuple tuple = heap_getnext(scan, ForwardScanDirection)) {
        const Buffer buffer = reinterpret_cast<HeapScanDesc>(scan)->rs_cbuf;
        LockBuffer(buffer, BUFFER_LOCK_SHARE);
        const bool visible = HeapTupleSatisfiesVisibility(tuple, newest, buffer);
        LockBuffer(buffer, BUFFER_LOCK_UNLOCK);
        if (!visible || (node_key != nullptr && !has_key(tuple, descriptor, checkpoint.node_key, *node_key)))
            continue;
        bool null = false;
        const std::int64_t value = DatumGetInt64(heap_getattr(tuple, checkpoint.hlc, descriptor, &null));
        if (null)
            continue;
        // A mark that can't be followed must be seen, whatever else is there.
        mark.value = !mark.found
                         ? value
                         : (mark.value < 0 || value < 0 ? Min(mark.value, value) : Max(mark.value, value));
        mark.found = true;
    }
    table_endscan(scan);
    UnregisterSnapshot(newest);
    table_close(relation, AccessShareLock);
    return mark;
}

std::optional<std::int64_t> found(const Mark &mark) {
    return mark.found ? std::optional(mark.value) : std::nullopt;
}

// ---------------------------------------------------------------------------------------------
// Advancing
// ---------------------------------------------------------------------------------------------

/// Advisory locks of users have 1 or 2 in the last field.
constexpr std::uint16_t kLockClass = 3;

LOCKTAG mark_tag(const Checkpoint &checkpoint, const std::string &node_key) {
    LOCKTAG tag;
    SET_LOCKTAG_ADVISORY(tag, MyDatabaseId, checkpoint.relation,
                         hash_bytes(reinterpret_cast<const unsigned char *>(node_key.data()),
                                    static_cast<int>(node_key.size())),
                         kLockClass);
    return tag;
}

/// $1 node_key, $2 mark. No row comes back when the mark is there already.
std::string advance_sql(const Checkpoint &checkpoint) {
    return "INSERT INTO " + checkpoint.qualified_name +
           " AS c (node_key, hlc) VALUES ($1, $2) ON CONFLICT (node_key) DO UPDATE SET hlc = "
           "GREATEST(c.hlc, EXCLUDED.hlc) WHERE c.hlc OPERATOR(pg_catalog.<) EXCLUDED.hlc "
           "RETURNING hlc";
}

std::string load_sql(const Checkpoint &checkpoint) {
    return "SELECT pg_catalog.max(hlc) FROM " + checkpoint.qualified_name;
}

/// The kept plan of a text, which names its table. Needs spi_connect(). As many as a session has
/// checkpoints.
const pg::Plan &plan_for(const std::string &sql, std::span<const Oid> types, const pg::Context *context) {
    static auto *const kept = new std::unordered_map<std::string, pg::Plan>();
    pg::Plan &plan = (*kept)[sql];
    if (plan.prepared())
        return plan;
    if (context != nullptr)
        plan.prepare_as(*context, sql, types);
    else
        plan.prepare(sql, types, true);
    return plan;
}

pg::Value key_value(const std::string &node_key) {
    if (!to_utf8(node_key))
        pg::raise({ERRCODE_CHARACTER_NOT_IN_REPERTOIRE,
                   "outbox_relay.node_key is not valid in the encoding of this database", "",
                   "Set it to plain ASCII."});
    return pg::Value(pg::text_datum(node_key));
}

/// What the statement left is at least `mark`; `read` gives the mark when no row came back.
template <class Read>
void require_advanced(const Checkpoint &checkpoint, const pg::Result &result, std::int64_t mark,
                      Read &&read) {
    const std::optional<std::int64_t> now =
        result.processed > 0 ? std::optional(DatumGetInt64(result.value(0, 1).datum)) : read();
    if (now && *now >= mark)
        return;
    pg::raise({ERRCODE_TRIGGERED_ACTION_EXCEPTION,
               "the mark of checkpoint " + checkpoint.qualified_name + " did not advance",
               "A trigger or rule of the table swallowed or changed it.",
               "Disable it: without the mark a restart could repeat stamps."});
}

constexpr Oid kAdvanceTypes[] = {TEXTOID, INT8OID};

} // namespace

Checkpoint find_checkpoint(const std::string &name) {
    const std::optional<Relation> table = find_configured_relation(name, AccessShareLock);
    if (!table)
        refuse(ERRCODE_UNDEFINED_TABLE, "relation \"" + name + "\" does not exist");
    require_plain(*table);
    Checkpoint checkpoint;
    checkpoint.relation = table->oid;
    checkpoint.owner = table->owner;
    checkpoint.qualified_name = table->qualified_name;
    const Column &key = require_column(*table, "node_key");
    const Column &hlc = require_column(*table, "hlc");
    if (key.type != TEXTOID && key.type != VARCHAROID)
        refuse(ERRCODE_DATATYPE_MISMATCH,
               "column \"node_key\" of table " + table->qualified_name + " is not text");
    if (hlc.type != INT8OID)
        refuse(ERRCODE_DATATYPE_MISMATCH,
               "column \"hlc\" of table " + table->qualified_name + " is not bigint");
    checkpoint.node_key = key.attnum;
    checkpoint.hlc = hlc.attnum;
    if (!pg::guard([&checkpoint] { return has_unique_key(checkpoint.relation, checkpoint.node_key); }))
        refuse(ERRCODE_INVALID_COLUMN_REFERENCE,
               "table " + table->qualified_name + " has no primary key or unique index on node_key alone");
    return checkpoint;
}

std::optional<std::int64_t> committed_mark(const Checkpoint &checkpoint) {
    return found(pg::guard([&checkpoint] { return read_mark(checkpoint, nullptr); }));
}

std::optional<std::int64_t> committed_mark(const Checkpoint &checkpoint, const std::string &node_key) {
    const std::string_view key(node_key);
    return found(pg::guard([&checkpoint, &key] { return read_mark(checkpoint, &key); }));
}

bool lock_mark(const Checkpoint &checkpoint, const std::string &node_key) {
    const LOCKTAG tag = mark_tag(checkpoint, node_key);
    return pg::guard([&tag] {
        if (LockAcquire(&tag, ExclusiveLock, false, true) != LOCKACQUIRE_NOT_AVAIL)
            return false;
        (void)LockAcquire(&tag, ExclusiveLock, false, false);
        return true;
    });
}

void unlock_mark(const Checkpoint &checkpoint, const std::string &node_key) {
    const LOCKTAG tag = mark_tag(checkpoint, node_key);
    pg::guard([&tag] { (void)LockRelease(&tag, ExclusiveLock, false); });
}

void advance_as_owner(const Checkpoint &checkpoint, const std::string &node_key, std::int64_t mark) {
    pg::Context context;
    context.role = checkpoint.owner;
    pg::spi_connect();
    const pg::Value values[] = {key_value(node_key), pg::Value(Int64GetDatum(mark))};
    const pg::Result result =
        pg::execute_latest_as(context, plan_for(advance_sql(checkpoint), kAdvanceTypes, &context), values);
    require_advanced(checkpoint, result, mark, [&] { return committed_mark(checkpoint, node_key); });
    pg::spi_finish();
}

void advance_as_caller(const Checkpoint &checkpoint, const std::string &node_key, std::int64_t mark) {
    (void)lock_mark(checkpoint, node_key);
    pg::spi_connect();
    const pg::Value values[] = {key_value(node_key), pg::Value(Int64GetDatum(mark))};
    const pg::Result result =
        pg::execute(plan_for(advance_sql(checkpoint), kAdvanceTypes, nullptr), values, false);
    require_advanced(checkpoint, result, mark, [&] { return committed_mark(checkpoint, node_key); });
    pg::spi_finish();
}

std::optional<std::int64_t> load_as_caller(const Checkpoint &checkpoint) {
    pg::spi_connect();
    const pg::Result result = pg::execute(plan_for(load_sql(checkpoint), {}, nullptr), {}, true);
    const pg::Value value = result.value(0, 1);
    const std::optional<std::int64_t> mark =
        value.null ? std::nullopt : std::optional(DatumGetInt64(value.datum));
    pg::spi_finish();
    return mark;
}

} // namespace outbox_relay::store
