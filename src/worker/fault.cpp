#include "worker/fault.hpp"

#ifdef OUTBOX_RELAY_FAULT_POINTS

#include <charconv>
#include <csignal>
#include <string>
#include <string_view>

#include "settings/settings.hpp"

#include "pg/guard.hpp"

extern "C" {
#include "postmaster/interrupt.h"
#include "storage/latch.h"
#include "utils/guc.h"
#include "utils/wait_event.h"
}

namespace outbox_relay::worker {

namespace {

const char *name_of(core::PassPoint point) {
    switch (point) {
    case core::PassPoint::after_begin:
        return "after_begin";
    case core::PassPoint::in_claim:
        return "in_claim";
    case core::PassPoint::after_claim:
        return "after_claim";
    case core::PassPoint::after_publish:
        return "after_publish";
    case core::PassPoint::before_settle:
        return "before_settle";
    case core::PassPoint::in_settle:
        return "in_settle";
    case core::PassPoint::before_commit:
        return "before_commit";
    case core::PassPoint::after_commit:
        return "after_commit";
    }
    return "";
}

/// The action set for this point and count, or an empty text.
std::string_view action_for(core::PassPoint point, std::size_t count) {
    std::string_view spec =
        settings::parameters.fault_point == nullptr ? "" : settings::parameters.fault_point;
    const std::size_t equals = spec.find('=');
    if (equals == std::string_view::npos)
        return {};
    std::string_view place = spec.substr(0, equals);
    const std::size_t colon = place.find(':');
    if (colon != std::string_view::npos) {
        std::size_t wanted = 0;
        const std::string_view number = place.substr(colon + 1);
        (void)std::from_chars(number.data(), number.data() + number.size(), wanted);
        if (wanted != count)
            return {};
        place = place.substr(0, colon);
    }
    return place == name_of(point) ? spec.substr(equals + 1) : std::string_view();
}

void wait_for_change() {
    const std::string before = settings::parameters.fault_point;
    while (before == settings::parameters.fault_point)
        pg::guard([] {
            (void)WaitLatch(MyLatch, WL_LATCH_SET | WL_TIMEOUT | WL_EXIT_ON_PM_DEATH, 50, PG_WAIT_EXTENSION);
            ResetLatch(MyLatch);
            CHECK_FOR_INTERRUPTS();
            if (ConfigReloadPending) {
                ConfigReloadPending = false;
                ProcessConfigFile(PGC_SIGHUP);
            }
        });
}

} // namespace

void reach_fault_point(core::PassPoint point, std::size_t count) {
    const std::string_view action = action_for(point, count);
    if (action.empty())
        return;
    pg::report_at(LOG, {ERRCODE_SUCCESSFUL_COMPLETION,
                        std::string("fault point ") + name_of(point) + " reached: " + std::string(action)});
    if (action == "kill")
        (void)raise(SIGKILL);
    if (action == "cancel")
        (void)raise(SIGINT);
    if (action == "error")
        pg::raise({ERRCODE_INTERNAL_ERROR, std::string("fault point ") + name_of(point)});
    if (action == "fatal")
        pg::guard([] { ereport(FATAL, (errmsg("fault point"))); });
    if (action == "wait")
        wait_for_change();
}

} // namespace outbox_relay::worker

#endif
