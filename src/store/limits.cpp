#include "store/limits.hpp"

#include <algorithm>
#include <climits>
#include <cstring>

#include "pg/guard.hpp"

extern "C" {
#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/pg_db_role_setting.h"
#include "common/hashfn.h"
#include "storage/proc.h"
#include "utils/array.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/guc.h"
#include "utils/rel.h"
}

namespace outbox_relay::store {

namespace {

constexpr int kNames = 4;
constexpr const char *kName[kNames] = {"statement_timeout", "lock_timeout",
                                       "idle_in_transaction_session_timeout", "transaction_timeout"};

/// Configured values of these, -1 where nothing is configured.
struct Configured {
    int ms[kNames] = {-1, -1, -1, -1};
};

/// Takes `setting` ("name=value") over where a more specific place has not set it. C regime.
void take(Configured *configured, const char *setting) {
    const char *equals = std::strchr(setting, '=');
    if (equals == nullptr)
        return;
    const std::size_t length = static_cast<std::size_t>(equals - setting);
    for (int i = 0; i < kNames; ++i) {
        int value = 0;
        const char *hint = nullptr;
        if (configured->ms[i] < 0 && std::strlen(kName[i]) == length &&
            pg_strncasecmp(setting, kName[i], length) == 0 &&
            parse_int(equals + 1, &value, GUC_UNIT_MS, &hint))
            configured->ms[i] = value;
    }
}

/// Calls `visit` with each setting ("name=value") of one (database, role) pair. C regime.
template <class Visit>
void each_setting(Relation relation, Oid database, Oid role, Visit &&visit) {
    ScanKeyData keys[2];
    ScanKeyInit(&keys[0], Anum_pg_db_role_setting_setdatabase, BTEqualStrategyNumber, F_OIDEQ,
                ObjectIdGetDatum(database));
    ScanKeyInit(&keys[1], Anum_pg_db_role_setting_setrole, BTEqualStrategyNumber, F_OIDEQ,
                ObjectIdGetDatum(role));
    SysScanDesc scan = systable_beginscan(relation, DbRoleSettingDatidRolidIndexId, true, nullptr, 2, keys);
    HeapTuple tuple = nullptr;
    while ((tuple = systable_getnext(scan)) != nullptr) {
        bool null = false;
        const Datum value =
            heap_getattr(tuple, Anum_pg_db_role_setting_setconfig, RelationGetDescr(relation), &null);
        if (null)
            continue;
        Datum *elements = nullptr;
        int count = 0;
        deconstruct_array(DatumGetArrayTypeP(value), TEXTOID, -1, false, TYPALIGN_INT, &elements, nullptr,
                          &count);
        for (int i = 0; i < count; ++i)
            visit(TextDatumGetCString(elements[i]));
    }
    systable_endscan(scan);
}

/// The most specific place wins: database and role, role, database, all.
Configured read_configured(Oid owner) {
    return pg::guard([owner] {
        Configured configured;
        const auto note = [&configured](const char *setting) { take(&configured, setting); };
        Relation relation = table_open(DbRoleSettingRelationId, AccessShareLock);
        each_setting(relation, MyDatabaseId, owner, note);
        each_setting(relation, InvalidOid, owner, note);
        each_setting(relation, MyDatabaseId, InvalidOid, note);
        each_setting(relation, InvalidOid, InvalidOid, note);
        table_close(relation, AccessShareLock);
        return configured;
    });
}

int strictest(std::int64_t own_ms, int configured_ms, int session_ms) {
    std::int64_t limit = own_ms;
    if (configured_ms > 0)
        limit = std::min<std::int64_t>(limit, configured_ms);
    if (session_ms > 0)
        limit = std::min<std::int64_t>(limit, session_ms);
    return static_cast<int>(std::min<std::int64_t>(limit, INT_MAX));
}

} // namespace

Limits limits_for(Oid owner, const Effective &settings) {
    const Configured configured = read_configured(owner);
    Limits limits;
    limits.statement_ms = strictest(settings.pass_statement_timeout_ms, configured.ms[0], StatementTimeout);
    limits.lock_ms = strictest(settings.pass_statement_timeout_ms, configured.ms[1], LockTimeout);
    limits.idle_ms = strictest(settings.pass_deadline_ms + settings.pass_statement_timeout_ms,
                               configured.ms[2], IdleInTransactionSessionTimeout);
    limits.transaction_ms = std::max(0, configured.ms[3]);
    return limits;
}

std::uint64_t configured_parameters() {
    return pg::guard([] {
        static constexpr char kPrefix[] = "outbox_relay.";
        std::uint64_t sum = 0;
        const auto add = [&sum](const char *setting) {
            if (pg_strncasecmp(setting, kPrefix, sizeof(kPrefix) - 1) == 0)
                sum =
                    hash_combine64(sum, hash_bytes_extended(reinterpret_cast<const unsigned char *>(setting),
                                                            static_cast<int>(std::strlen(setting)), 0));
        };
        Relation relation = table_open(DbRoleSettingRelationId, AccessShareLock);
        each_setting(relation, MyDatabaseId, InvalidOid, add);
        each_setting(relation, InvalidOid, InvalidOid, add);
        table_close(relation, AccessShareLock);
        return sum;
    });
}

} // namespace outbox_relay::store
