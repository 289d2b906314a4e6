#include "pg/transaction.hpp"

#include "pg/guard.hpp"

extern "C" {
#include "access/xact.h"
#include "commands/trigger.h"
#include "nodes/makefuncs.h"
#include "nodes/parsenodes.h"
#include "pgstat.h"
#include "storage/lock.h"
#include "storage/lwlock.h"
#include "utils/timeout.h"
}

namespace pg {

void start_transaction() {
    guard([] {
        SetCurrentStatementStartTimestamp();
        StartTransactionCommand();
    });
    fire_triggers_at_once();
}

void fire_triggers_at_once() {
    guard([] {
        ConstraintsSetStmt *immediate = makeNode(ConstraintsSetStmt);
        immediate->constraints = NIL;
        immediate->deferred = false;
        AfterTriggerSetState(immediate);
    });
}

namespace {

/// A session of the worker's never ends for the application's code that runs in it: what that code locked
/// for the session, with pg_advisory_lock(), would stay locked, for other owners' code too. C regime.
void release_session_locks() {
    LockReleaseAll(USER_LOCKMETHOD, true);
}

} // namespace

void commit_transaction() {
    guard([] {
        MemoryContext before = TopMemoryContext;
        CommitTransactionCommand();
        release_session_locks();
        // Up to 17 the server leaves TopMemoryContext behind, 18 the context of the start.
        MemoryContextSwitchTo(before);
        pgstat_report_stat(false);
    });
}

void abort_transaction() {
    guard([] {
        disable_all_timeouts(false);
        QueryCancelPending = false;
        AbortOutOfAnyTransaction();
        LWLockReleaseAll();
        release_session_locks();
        MemoryContextSwitchTo(TopMemoryContext);
        pgstat_report_stat(false);
    });
}

void Savepoint::begin() {
    context_ = CurrentMemoryContext;
    owner_ = CurrentResourceOwner;
    guard([this] {
        BeginInternalSubTransaction(nullptr);
        MemoryContextSwitchTo(context_);
    });
}

void Savepoint::release() {
    guard([this] {
        ReleaseCurrentSubTransaction();
        MemoryContextSwitchTo(context_);
        CurrentResourceOwner = owner_;
    });
}

void Savepoint::rollback() {
    guard([this] {
        RollbackAndReleaseCurrentSubTransaction();
        MemoryContextSwitchTo(context_);
        CurrentResourceOwner = owner_;
    });
}

bool in_transaction() {
    return IsTransactionState();
}

} // namespace pg
