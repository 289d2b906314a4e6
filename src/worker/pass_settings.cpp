#include "worker/pass_settings.hpp"

#include "core/url_template.hpp"
#include "store/encoding.hpp"

#include "pg/clock.hpp"
#include "pg/guard.hpp"

extern "C" {
#include "commands/dbcommands.h"
#include "utils/timestamp.h"
}

namespace outbox_relay::worker {

std::int64_t ServerClock::monotonic_us() {
    return pg::monotonic_us();
}

std::int64_t ServerClock::wall_us() {
    return pg::unix_us_of(GetCurrentTimestamp());
}

std::string database_name() {
    const char *name = pg::guard([] { return get_database_name(MyDatabaseId); });
    return name == nullptr ? std::string() : std::string(name);
}

core::PassSettings pass_settings(const store::Route &route, const store::Effective &settings,
                                 const std::string &database) {
    core::PassSettings pass;
    pass.max_claim_rows = static_cast<std::size_t>(settings.max_claim_rows);
    pass.concurrency = static_cast<std::size_t>(settings.concurrency);
    pass.deadline_us = settings.pass_deadline_ms * 1000;
    pass.request_timeout_us = settings.request_timeout_ms * 1000;
    pass.connect_timeout_us = settings.connect_timeout_ms * 1000;
    pass.key_order = route.ordering == store::Ordering::key;
    pass.refusals_are_the_rows_own = core::has_placeholders(route.url);
    pass.breaker_threshold = static_cast<std::uint32_t>(settings.breaker_threshold);
    pass.retry = {settings.retry_base_delay_ms * 1000, settings.retry_max_backoff_ms * 1000,
                  static_cast<std::int32_t>(settings.max_attempts)};
    pass.fail_statuses = route.fail_statuses;

    core::EnvelopeSettings &envelope = pass.envelope;
    const auto utf8 = [](const std::string &text) { return store::to_utf8(text).value_or(text); };
    envelope.route = utf8(route.name);
    envelope.url = route.url;
    envelope.method = route.method;
    envelope.source = route.source.empty() ? "/" + utf8(database) + "/" + envelope.route : utf8(route.source);
    envelope.cloudevents = route.cloudevents;
    envelope.forze = route.forze;
    envelope.hlc = route.hlc_ordering;
    envelope.trace = route.propagate_trace;
    envelope.headers = route.headers;
    envelope.user_agent = "outbox_relay/" OUTBOX_RELAY_VERSION;
    return pass;
}

} // namespace outbox_relay::worker
