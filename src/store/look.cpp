#include "store/look.hpp"

#include "pg/compat.hpp"
#include "pg/session.hpp"
#include "store/index.hpp"
#include "store/relation.hpp"
#include "store/tenancy.hpp"

extern "C" {
#include "access/genam.h"
#include "access/relation.h"
#include "access/skey.h"
#include "access/table.h"
#include "access/tableam.h"
#include "nodes/pg_list.h"
#include "storage/lmgr.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/rel.h"
#include "utils/relcache.h"
#include "utils/snapmgr.h"
#include "utils/timestamp.h"
}

namespace outbox_relay::store {

namespace {

void fill(const Route &route, const std::optional<core::Uuid> &tenant, const pg::Context &context,
          LookPath &path) {
    const Tables tables = tables_of(route, tenant, context);
    const Relation relation = pg::act_as(context, [&] { return describe(tables.relation, AccessShareLock); });
    require(missing_or_wrong(relation, Needs{}));
    path = {context.role, relation.oid, look_index(relation, tenant_filter(route) == TenantFilter::column),
            relation.column("available_at")->attnum};
}

/// C regime from here on: a table and its index, open, with the keys of the three seeks.
struct Seeker {
    ::Relation table;
    ::Relation index;
    TupleTableSlot *slot;
    ScanKeyData keys[4]; ///< outbox_route, status, perhaps tenant_id; then available_at
    int plain_keys;      ///< those before available_at
};

void set_equal(Seeker &seeker, int at, RegProcedure equals, Datum value) {
    ScanKeyEntryInitialize(&seeker.keys[at], 0, static_cast<AttrNumber>(at + 1), BTEqualStrategyNumber,
                           InvalidOid, seeker.index->rd_indcollation[at], equals, value);
}

bool is_index_of(::Relation table, Oid index) {
    List *indexes = RelationGetIndexList(table);
    const bool found = list_member_oid(indexes, index);
    list_free(indexes);
    return found;
}

/// Opens both, unless somebody keeps them locked or they are gone.
bool open_seeker(const LookPath &path, Seeker &seeker) {
    if (!ConditionalLockRelationOid(path.table, AccessShareLock))
        return false;
    seeker.table = try_relation_open(path.table, NoLock);
    if (seeker.table == nullptr) {
        UnlockRelationOid(path.table, AccessShareLock);
        return false;
    }
    if (!is_index_of(seeker.table, path.index) || !ConditionalLockRelationOid(path.index, AccessShareLock)) {
        relation_close(seeker.table, AccessShareLock);
        return false;
    }
    seeker.index = index_open(path.index, NoLock);
    seeker.slot = table_slot_create(seeker.table, nullptr);
    return true;
}

void close_seeker(const Seeker &seeker) {
    ExecDropSingleTupleTableSlot(seeker.slot);
    index_close(seeker.index, AccessShareLock);
    relation_close(seeker.table, AccessShareLock);
}

/// Whether the seeker's keys, the first `count` of them, find a visible row; its slot holds it.
bool seek(Seeker &seeker, IndexScanDesc scan, int count) {
    index_rescan(scan, seeker.keys, count, nullptr, 0);
    return index_getnext_slot(scan, ForwardScanDirection, seeker.slot);
}

struct Found {
    bool waits;
    bool parked;
    TimestampTz next;
};

/// Fresh rows, the first parked one, rows in processing. `scans`: with and without the key of available_at.
Found look_for_one(Seeker &seeker, IndexScanDesc with_time, IndexScanDesc without, AttrNumber available_at,
                   Datum pending, Datum processing) {
    Found found{false, false, 0};
    const int time_at = seeker.plain_keys;
    const auto on_time = [&](int flag) {
        ScanKeyEntryInitialize(&seeker.keys[time_at], SK_ISNULL | flag, static_cast<AttrNumber>(time_at + 1),
                               InvalidStrategy, InvalidOid, InvalidOid, InvalidOid, Datum(0));
    };
    set_equal(seeker, 1, F_TEXTEQ, pending);
    on_time(SK_SEARCHNULL);
    found.waits = seek(seeker, with_time, time_at + 1);
    on_time(SK_SEARCHNOTNULL);
    if (seek(seeker, with_time, time_at + 1)) {
        bool is_null = false;
        found.next = DatumGetTimestampTz(slot_getattr(seeker.slot, available_at, &is_null));
        found.parked = !is_null;
    }
    set_equal(seeker, 1, F_TEXTEQ, processing);
    found.waits = found.waits || seek(seeker, without, time_at);
    ExecClearTuple(seeker.slot);
    return found;
}

/// All of it; false when it can't be told.
bool look_for_all(const LookPath &path, const char *route, std::span<const std::optional<core::Uuid>> tenants,
                  bool by_tenant, Found *found) {
    Seeker seeker;
    if (!open_seeker(path, seeker))
        return false;
    PushActiveSnapshot(GetTransactionSnapshot());
    seeker.plain_keys = by_tenant ? 3 : 2;
    set_equal(seeker, 0, F_TEXTEQ, CStringGetTextDatum(route));
    const Datum pending = CStringGetTextDatum("pending");
    const Datum processing = CStringGetTextDatum("processing");
    const auto begin = [&seeker](int count) {
        return pg::compat::index_beginscan(seeker.table, seeker.index, GetActiveSnapshot(), count);
    };
    IndexScanDesc with_time = begin(seeker.plain_keys + 1);
    IndexScanDesc without = begin(seeker.plain_keys);
    for (std::size_t i = 0; i < tenants.size(); ++i) {
        if (by_tenant)
            set_equal(seeker, 2, F_UUID_EQ, PointerGetDatum(tenants[i]->bytes.data()));
        found[i] = look_for_one(seeker, with_time, without, path.available_at, pending, processing);
    }
    index_endscan(with_time);
    index_endscan(without);
    PopActiveSnapshot();
    close_seeker(seeker);
    return true;
}

} // namespace

std::vector<Seen> look_for_rows(const Route &route, std::span<const std::optional<core::Uuid>> tenants,
                                const Effective &settings, LookPath &path) {
    pg::Context context;
    context.role = owner_of(route);
    context.statement_timeout_ms = static_cast<int>(settings.pass_statement_timeout_ms);
    context.lock_timeout_ms = context.statement_timeout_ms;
    if (path.owner != context.role)
        fill(route, tenants.front(), context, path);
    std::vector<Seen> seen(tenants.size());
    std::vector<Found> found(tenants.size());
    const bool by_tenant = tenant_filter(route) == TenantFilter::column;
    const bool told = OidIsValid(path.index) && pg::run_as(context, [&] {
                          return look_for_all(path, route.name.c_str(), tenants, by_tenant, found.data());
                      });
    if (!told)
        path = LookPath();
    for (std::size_t i = 0; i < seen.size(); ++i) {
        seen[i].waits = !told || found[i].waits;
        if (told && found[i].parked)
            seen[i].next = found[i].next;
    }
    return seen;
}

} // namespace outbox_relay::store
