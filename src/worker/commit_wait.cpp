#include "worker/commit_wait.hpp"

#include "worker/host.hpp"

#include "pg/guard.hpp"

extern "C" {
#include "access/xact.h"
#include "miscadmin.h"
#include "utils/timeout.h"
}

namespace outbox_relay::worker {

namespace {

constexpr int kStandbyHas_ms = 1000;

TimeoutId wait_over;

extern "C" {

static void outbox_relay_commit_wait_over() {
    end_commit_wait();
}

/// Between these two events nothing but the wait for standbys looks at QueryCancelPending, which alone,
/// without InterruptPending, means nothing to anybody else.
static void outbox_relay_commit_events(XactEvent event, void *) {
    switch (event) {
    case XACT_EVENT_PRE_COMMIT:
        signals.in_commit = 1;
        if (signals.terminate)
            enable_timeout_after(wait_over, kStandbyHas_ms);
        break;
    case XACT_EVENT_COMMIT:
    case XACT_EVENT_ABORT:
        if (signals.in_commit && signals.terminate) {
            disable_timeout(wait_over, false);
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

void bound_commit_wait() {
    pg::guard([] {
        wait_over = RegisterTimeout(USER_TIMEOUT, outbox_relay_commit_wait_over);
        RegisterXactCallback(outbox_relay_commit_events, nullptr);
    });
}

} // namespace outbox_relay::worker
