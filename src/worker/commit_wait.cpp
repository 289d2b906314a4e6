#include "worker/commit_wait.hpp"

#include "worker/host.hpp"

#include "pg/guard.hpp"

extern "C" {
#include "access/xact.h"
#include "miscadmin.h"
#include "replication/syncrep.h"
#include "replication/walsender.h"
#include "storage/procsignal.h"
#include "utils/timeout.h"
#include "utils/timestamp.h"
}

namespace outbox_relay::worker {

namespace {

constexpr int kLookEvery_ms = 500;

TimeoutId look_out;

extern "C" {

/// A barrier that is pending is somebody's DROP DATABASE or the like, of any database, which waits for us.
static void outbox_relay_look_out() {
    if (signals.terminate || ProcSignalBarrierPending)
        end_commit_wait();
}

/// Between these two events nothing but the wait for standbys looks at QueryCancelPending, which alone,
/// without InterruptPending, means nothing to anybody else.
static void outbox_relay_commit_events(XactEvent event, void *) {
    switch (event) {
    case XACT_EVENT_PRE_COMMIT:
        signals.in_commit = 1;
        if (signals.terminate || waits_for_standbys())
            enable_timeout_every(look_out, TimestampTzPlusMilliseconds(GetCurrentTimestamp(), kLookEvery_ms),
                                 kLookEvery_ms);
        break;
    case XACT_EVENT_COMMIT:
    case XACT_EVENT_ABORT:
        if (signals.in_commit && (signals.terminate || get_timeout_active(look_out))) {
            disable_timeout(look_out, false);
            QueryCancelPending = false;
        }
        signals.in_commit = 0;
        break;
    default:
        break;
    }
}
}

} // namespace

bool waits_for_standbys() {
    return SyncRepRequested() && SyncRepStandbyNames != nullptr && SyncRepStandbyNames[0] != '\0';
}

void bound_commit_wait() {
    pg::guard([] {
        look_out = RegisterTimeout(USER_TIMEOUT, outbox_relay_look_out);
        RegisterXactCallback(outbox_relay_commit_events, nullptr);
    });
}

} // namespace outbox_relay::worker
