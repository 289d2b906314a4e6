#pragma once

#include <optional>
#include <string>

#include "core/uuid.hpp"

namespace outbox_relay::settings {

/// The longest pause that a setting may ask for, 24 days: as far as whole days of milliseconds fit an int.
constexpr int kLongestPauseMs = 24 * 24 * 60 * 60 * 1000;

/// The configuration parameters `outbox_relay.…` as the server keeps them; spec.md section 3. Times
/// in milliseconds. Written by the server only.
struct Parameters {
    // SIGHUP and postmaster
    bool enabled;
    char *databases;
    int workers;
    int max_lanes;
    int max_batches_per_tick;
    char *environment;
    int shutdown_drain_timeout_ms;
    // SUSET; each also a column of outbox_route
    int interval_ms;
    int max_claim_rows;
    int pass_deadline_ms;
    int pass_statement_timeout_ms;
    int request_timeout_ms;
    int connect_timeout_ms;
    int concurrency;
    int max_attempts;
    int retry_base_delay_ms;
    int retry_max_backoff_ms;
    int breaker_threshold;
    int reclaim_stale_after_ms;
    // SUSET: the clock
    char *hlc_checkpoint; ///< schema.table, or empty
    int hlc_max_drift_ms;
    // USERSET
    char *node_key;
    // USERSET: the invocation context
    char *tenant_id;
    char *execution_id;
    char *correlation_id;
    char *causation_id;
    char *traceparent;
#ifdef OUTBOX_RELAY_FAULT_POINTS
    char *fault_point;
#endif
};

extern Parameters parameters;

/// Defines all of them. Called by _PG_init, in the postmaster or in a session that loads the library
/// late; what needs the postmaster is defined only there.
void define(bool preloading);

/// True when a drain may leave its last pass no time to commit: its closing statements have a fifth of the
/// time, each up to pass_statement_timeout.
bool drain_is_short();

/// The UUID that a context parameter holds; nothing when it is empty. Its form was checked when it
/// was set.
std::optional<core::Uuid> context_uuid(const char *value);

/// True when `database` matches one of the comma-separated names and patterns (`*`, `?`) of `list`.
bool database_listed(const char *list, const char *database);

} // namespace outbox_relay::settings
