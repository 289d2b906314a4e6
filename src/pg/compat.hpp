#pragma once

/// Differences between server versions, each with its reason; nothing else in the tree asks for
/// PG_VERSION_NUM.

#include <cstdint>

#include "pg/postgres.hpp"

extern "C" {
#include "access/genam.h"
#include "access/transam.h"
#include "catalog/pg_extension.h"
#include "catalog/pg_namespace.h"
#include "catalog/pg_proc.h"
#include "storage/proc.h"
#include "utils/acl.h"
#include "utils/guc.h"
#include "utils/timeout.h"
#include "utils/wait_event.h"
}

#if PG_VERSION_NUM < 150000
#error "outbox_relay needs PostgreSQL 15 or newer"
#endif

namespace pg::compat {

/// The wait event that pg_stat_activity shows while we wait; 17 and newer can name it.
inline std::uint32_t wait_event(const char *name) {
#if PG_VERSION_NUM >= 170000
    return WaitEventExtensionNew(name);
#else
    (void)name;
    return PG_WAIT_EXTENSION;
#endif
}

/// The oldest transaction whose status the commit log still has; under XactTruncationLock. 17 renamed
/// the struct.
inline TransactionId oldest_clog_xid() {
#if PG_VERSION_NUM >= 170000
    return TransamVariables->oldestClogXid;
#else
    return ShmemVariableCache->oldestClogXid;
#endif
}

/// 18 made these signals plain functions of the same name; before it, the macro works as well.
inline void set_signal(int number, void (*handler)(int)) {
    pqsignal(number, handler);
}

/// Privileges of a role on a function and on a schema. 16 made one function of these.
inline bool may_execute(Oid function, Oid role) {
#if PG_VERSION_NUM >= 160000
    return object_aclcheck(ProcedureRelationId, function, role, ACL_EXECUTE) == ACLCHECK_OK;
#else
    return pg_proc_aclcheck(function, role, ACL_EXECUTE) == ACLCHECK_OK;
#endif
}
inline bool may_use_schema(Oid schema, Oid role) {
#if PG_VERSION_NUM >= 160000
    return object_aclcheck(NamespaceRelationId, schema, role, ACL_USAGE) == ACLCHECK_OK;
#else
    return pg_namespace_aclcheck(schema, role, ACL_USAGE) == ACLCHECK_OK;
#endif
}

/// Has the server end this session (FATAL 25P04) when its transaction lasts `ms` from now on, unless
/// transaction_timeout is stricter already; ends with the transaction. 17 brought it: before, and with
/// 0, nothing happens. C regime.
inline void shorten_transaction(int ms) {
#if PG_VERSION_NUM >= 170000
    if (ms <= 0 || (TransactionTimeout > 0 && TransactionTimeout <= ms))
        return;
    (void)set_config_option("transaction_timeout", psprintf("%d", ms), PGC_SUSET, PGC_S_SESSION,
                            GUC_ACTION_LOCAL, true, 0, false);
    // Setting it starts the timer, but does not shorten one that runs.
    enable_timeout_after(TRANSACTION_TIMEOUT, ms);
#else
    (void)ms;
#endif
}

/// A scan of `count` keys; 18 wants to be told that nobody counts for EXPLAIN. C regime.
inline IndexScanDesc index_beginscan(Relation table, Relation index, Snapshot snapshot, int count) {
#if PG_VERSION_NUM >= 180000
    return ::index_beginscan(table, index, snapshot, nullptr, count, 0);
#else
    return ::index_beginscan(table, index, snapshot, count, 0);
#endif
}

} // namespace pg::compat

#if PG_VERSION_NUM >= 180000
#define OUTBOX_RELAY_MODULE_MAGIC PG_MODULE_MAGIC_EXT(.name = "outbox_relay", .version = OUTBOX_RELAY_VERSION)
#else
#define OUTBOX_RELAY_MODULE_MAGIC PG_MODULE_MAGIC
#endif
