#pragma once

#include "pg/postgres.hpp"

extern "C" {
#include "utils/resowner.h"
}

namespace pg {

/// Starts a transaction of a background worker: READ COMMITTED as the worker pinned it, deferrable
/// constraints checked at statement end, so that no user code is left to run at COMMIT as the worker.
void start_transaction();

/// Commits it, releases advisory locks of the session, leaves CurrentMemoryContext as it was before, and
/// reports table statistics.
void commit_transaction();

/// Gets rid of whatever transaction, locks and timers an error left behind. Safe outside of one.
void abort_transaction();

/// From here to the transaction's end deferrable constraints and triggers are checked and fired at the
/// end of each statement: nothing of a table's owner is left for the commit.
void fire_triggers_at_once();

/// A savepoint in the transaction of whoever called us. The memory context and resource owner of before
/// are current again after each of the three.
class Savepoint {
  public:
    void begin();
    void release();
    /// Undoes all since begin(), whatever state an error has left.
    void rollback();

  private:
    MemoryContext context_ = nullptr;
    ResourceOwner owner_ = nullptr;
};

/// True between start_transaction() and its end.
bool in_transaction();

} // namespace pg
