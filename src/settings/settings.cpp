#include "settings/settings.hpp"

#include <climits>
#include <cstring>
#include <string_view>

#include "core/header.hpp"

#include "pg/entry.hpp"
#include "pg/postgres.hpp"

extern "C" {
#include "utils/guc.h"
}

namespace outbox_relay::settings {

Parameters parameters;

namespace {

constexpr int kDayMs = 24 * 60 * 60 * 1000;

struct Number {
    const char *name;
    const char *what;
    int *variable;
    int standard;
    int low;
    int high;
    GucContext context;
    int flags;
};

struct Text {
    const char *name;
    const char *what;
    char **variable;
    const char *standard;
    GucContext context;
    GucStringCheckHook check;
};

void define_number(const Number &number) {
    DefineCustomIntVariable(number.name, number.what, nullptr, number.variable, number.standard, number.low,
                            number.high, number.context, number.flags, nullptr, nullptr, nullptr);
}

void define_text(const Text &text) {
    DefineCustomStringVariable(text.name, text.what, nullptr, text.variable, text.standard, text.context, 0,
                               text.check, nullptr, nullptr);
}

/// A duration that a superuser sets, as most columns of outbox_route have one.
Number duration(const char *name, const char *what, int *variable, int standard, int low, int high = kDayMs) {
    return {name, what, variable, standard, low, high, PGC_SUSET, GUC_UNIT_MS};
}

/// A count that is also a column of outbox_route.
Number count(const char *name, const char *what, int *variable, int standard, int low, int high) {
    return {name, what, variable, standard, low, high, PGC_SUSET, 0};
}

extern "C" {

static bool outbox_relay_check_uuid(char **value, void **, GucSource) {
    if (*value == nullptr || **value == '\0' || core::parse_uuid(*value).has_value())
        return true;
    GUC_check_errdetail("The value must be a UUID in its hyphenated form, or empty.");
    return false;
}

static bool outbox_relay_check_traceparent(char **value, void **, GucSource) {
    if (*value == nullptr || **value == '\0' || core::is_traceparent(*value))
        return true;
    GUC_check_errdetail("The value must be a W3C traceparent, such as "
                        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01, or empty.");
    return false;
}

/// The parts of the name are checked when it is used: only then is the encoding known.
static bool outbox_relay_check_relation(char **value, void **, GucSource) {
    if (*value == nullptr || **value == '\0' || std::strchr(*value, '.') != nullptr)
        return true;
    GUC_check_errdetail("The value must be a table as schema.table, or empty.");
    return false;
}

static bool outbox_relay_check_node_key(char **value, void **, GucSource) {
    const char *text = *value == nullptr ? "" : *value;
    bool good = *text != '\0' && std::strlen(text) <= 255;
    for (const char *at = text; *at != '\0' && good; ++at)
        good = static_cast<unsigned char>(*at) >= ' ' && *at != 0x7f;
    if (!good)
        GUC_check_errdetail("The value must be 1 to 255 bytes of text without control characters.");
    return good;
}

static bool outbox_relay_check_environment(char **value, void **, GucSource) {
    const char *text = *value == nullptr ? "" : *value;
    bool good = std::strlen(text) <= 63;
    for (const char *at = text; *at != '\0' && good; ++at)
        good = *at > ' ' && *at < 0x7f && *at != '/';
    if (!good)
        GUC_check_errdetail("The value must be at most 63 visible ASCII characters without a slash.");
    return good;
}
}

void define_route_defaults() {
    Parameters &p = parameters;
    define_number(duration("outbox_relay.interval",
                           "Pause between polls of a lane; a wake makes it due earlier.", &p.interval_ms,
                           5000, 1, kLongestPauseMs));
    define_number(count("outbox_relay.max_claim_rows", "Rows that a pass claims at most.", &p.max_claim_rows,
                        100, 1, 100000));
    define_number(duration("outbox_relay.pass_deadline",
                           "Publishing stops this long after a pass began; what was done is committed.",
                           &p.pass_deadline_ms, 5000, 1));
    define_number(duration("outbox_relay.pass_statement_timeout",
                           "Limit of each statement and each lock wait of a pass.",
                           &p.pass_statement_timeout_ms, 1000, 1));
    define_number(duration("outbox_relay.request_timeout",
                           "Limit of one HTTP request; 0: the deadline of its pass alone.",
                           &p.request_timeout_ms, 0, 0));
    define_number(duration("outbox_relay.connect_timeout",
                           "Limit of resolving, connecting and TLS of a request.", &p.connect_timeout_ms,
                           2000, 1));
    define_number(count("outbox_relay.concurrency", "Requests in flight in a pass at most.", &p.concurrency,
                        32, 1, 1000));
    define_number(count("outbox_relay.max_attempts",
                        "Failed attempts after which a row is parked as failed; 0: no end.", &p.max_attempts,
                        20, 0, INT_MAX));
    define_number(duration("outbox_relay.retry_base_delay",
                           "Wait after a row's first failed attempt; doubles with each further one.",
                           &p.retry_base_delay_ms, 1000, 1, kLongestPauseMs));
    define_number(duration("outbox_relay.retry_max_backoff", "Longest wait between two attempts of a row.",
                           &p.retry_max_backoff_ms, 300000, 1, kLongestPauseMs));
    define_number(count("outbox_relay.breaker_threshold",
                        "Consecutive failed publishes that open the breaker of a lane; 0: never.",
                        &p.breaker_threshold, 10, 0, INT_MAX));
    define_number(duration("outbox_relay.reclaim_stale_after",
                           "Age after which a row left in processing returns to pending; 0: off.",
                           &p.reclaim_stale_after_ms, 300000, 0, kLongestPauseMs));
}

void define_server_wide(bool preloading) {
    Parameters &p = parameters;
    DefineCustomBoolVariable("outbox_relay.enabled", "Off: nothing relays, everything else works.", nullptr,
                             &p.enabled, true, PGC_SIGHUP, 0, nullptr, nullptr, nullptr);
    define_text({"outbox_relay.databases",
                 "Databases where workers may run: names and patterns, comma-separated.", &p.databases, "*",
                 PGC_SIGHUP, nullptr});
    define_number({"outbox_relay.workers", "Relay workers for each database that has enabled routes.",
                   &p.workers, 2, 1, 64, PGC_SIGHUP, 0});
    define_number({"outbox_relay.max_batches_per_tick", "Full passes in a row that a lane's turn may take.",
                   &p.max_batches_per_tick, 100, 1, 1000000, PGC_SIGHUP, 0});
    define_text({"outbox_relay.environment",
                 "Part of a route's binding: a copy of the server with another environment relays nothing.",
                 &p.environment, "", PGC_SIGHUP, outbox_relay_check_environment});
    define_number({"outbox_relay.shutdown_drain_timeout",
                   "Time that routes with drain_on_shutdown have at the server's shutdown.",
                   &p.shutdown_drain_timeout_ms, 5000, 1, kDayMs, PGC_SIGHUP, GUC_UNIT_MS});
    if (preloading)
        define_number({"outbox_relay.max_lanes", "Lanes whose state is kept in shared memory.", &p.max_lanes,
                       1024, 16, 65536, PGC_POSTMASTER, 0});
}

void define_clock() {
    Parameters &p = parameters;
    define_text({"outbox_relay.hlc_checkpoint",
                 "Table with the clock's durable marks, schema.table, one per database; empty: none.",
                 &p.hlc_checkpoint, "", PGC_SUSET, outbox_relay_check_relation});
    define_number(duration("outbox_relay.hlc_max_drift",
                           "How far ahead of the wall clock a merged stamp may be.", &p.hlc_max_drift_ms,
                           300000, 0));
    define_text({"outbox_relay.node_key",
                 "Row of the checkpoint table that this session's stamps advance: few and stable keys.",
                 &p.node_key, "default", PGC_USERSET, outbox_relay_check_node_key});
}

void define_context() {
    Parameters &p = parameters;
    define_text({"outbox_relay.tenant_id", "Tenant of the rows staged in this session or transaction.",
                 &p.tenant_id, "", PGC_USERSET, outbox_relay_check_uuid});
    define_text({"outbox_relay.execution_id",
                 "Execution id of the rows staged in this session or transaction.", &p.execution_id, "",
                 PGC_USERSET, outbox_relay_check_uuid});
    define_text({"outbox_relay.correlation_id",
                 "Correlation id of the rows staged in this session or transaction.", &p.correlation_id, "",
                 PGC_USERSET, outbox_relay_check_uuid});
    define_text({"outbox_relay.causation_id",
                 "Causation id of the rows staged in this session or transaction.", &p.causation_id, "",
                 PGC_USERSET, outbox_relay_check_uuid});
    define_text({"outbox_relay.traceparent",
                 "W3C traceparent of the rows staged in this session or transaction.", &p.traceparent, "",
                 PGC_USERSET, outbox_relay_check_traceparent});
}

/// Glob match of one pattern: `*` any run, `?` any one byte.
bool matches(std::string_view pattern, std::string_view name) {
    if (pattern.empty())
        return name.empty();
    if (pattern.front() == '*')
        return matches(pattern.substr(1), name) || (!name.empty() && matches(pattern, name.substr(1)));
    if (name.empty() || (pattern.front() != '?' && pattern.front() != name.front()))
        return false;
    return matches(pattern.substr(1), name.substr(1));
}

std::string_view trimmed(std::string_view text) {
    while (!text.empty() && text.front() == ' ')
        text.remove_prefix(1);
    while (!text.empty() && text.back() == ' ')
        text.remove_suffix(1);
    return text;
}

} // namespace

void define(bool preloading) {
    define_server_wide(preloading);
    define_route_defaults();
    define_clock();
    define_context();
#ifdef OUTBOX_RELAY_FAULT_POINTS
    define_text({"outbox_relay.fault_point", "Test builds only: where a pass fails and how.",
                 &parameters.fault_point, "", PGC_SUSET, nullptr});
#endif
    MarkGUCPrefixReserved("outbox_relay");
}

bool drain_is_short() {
    return parameters.shutdown_drain_timeout_ms < std::int64_t{5} * parameters.pass_statement_timeout_ms;
}

std::optional<core::Uuid> context_uuid(const char *value) {
    if (value == nullptr || *value == '\0')
        return std::nullopt;
    return core::parse_uuid(value);
}

bool database_listed(const char *list, const char *database) {
    std::string_view rest = list == nullptr ? "" : list;
    while (true) {
        const std::size_t comma = rest.find(',');
        const std::string_view pattern = trimmed(rest.substr(0, comma));
        if (!pattern.empty() && matches(pattern, database))
            return true;
        if (comma == std::string_view::npos)
            return false;
        rest.remove_prefix(comma + 1);
    }
}

} // namespace outbox_relay::settings
