#include "pg/wal.hpp"

#include <algorithm>

#include "pg/compat.hpp"
#include "pg/guard.hpp"

extern "C" {
#include "access/transam.h"
#include "access/xlog.h"
#include "storage/lwlock.h"
}

namespace pg {

namespace {

/// C regime. What is older than the commit log was flushed before that was truncated.
XLogRecPtr commit_lsn(TransactionId xid) {
    if (!TransactionIdIsNormal(xid))
        return InvalidXLogRecPtr;
    XLogRecPtr lsn = InvalidXLogRecPtr;
    LWLockAcquire(XactTruncationLock, LW_SHARED);
    if (!TransactionIdPrecedes(xid, compat::oldest_clog_xid()))
        lsn = TransactionIdGetCommitLSN(xid);
    LWLockRelease(XactTruncationLock);
    return lsn;
}

} // namespace

void flush_commits(std::span<const TransactionId> xids) {
    guard([&xids] {
        XLogRecPtr youngest = InvalidXLogRecPtr;
        TransactionId previous = InvalidTransactionId;
        for (const TransactionId xid : xids) {
            if (xid != previous)
                youngest = std::max(youngest, commit_lsn(xid));
            previous = xid;
        }
        if (XLogNeedsFlush(youngest))
            XLogFlush(youngest);
    });
}

} // namespace pg
