\echo Use "CREATE EXTENSION outbox_relay" to load this file. \quit

-- Objects are created unqualified, so that they land in the schema that CREATE EXTENSION was given, and
-- without OR REPLACE or IF NOT EXISTS, so that nothing planted beforehand is adopted.

----------------------------------------------------------------------------------------------------
-- Routes
----------------------------------------------------------------------------------------------------

CREATE TABLE outbox_route (
    name text COLLATE "C" PRIMARY KEY,
    relation text,
    url text,
    target_function text,
    method text NOT NULL DEFAULT 'POST',
    enabled boolean NOT NULL DEFAULT true,
    storage text NOT NULL DEFAULT 'consume',
    delivery_log text,
    hlc_ordering boolean NOT NULL DEFAULT false,
    propagate_trace boolean NOT NULL DEFAULT false,
    require_transaction boolean NOT NULL DEFAULT false,
    ordering text NOT NULL DEFAULT 'key',
    tenants_function text,
    relation_function text,
    delivery_log_function text,
    tenant_isolation text NOT NULL DEFAULT 'none',
    envelope text[] NOT NULL DEFAULT '{cloudevents,forze}',
    source text,
    headers jsonb NOT NULL DEFAULT '{}',
    fail_statuses integer[] NOT NULL DEFAULT '{}',
    max_payload_bytes integer NOT NULL DEFAULT 4194304,
    ca_file text,
    owner name NOT NULL,
    bound_to text NOT NULL,
    drain_on_shutdown boolean NOT NULL DEFAULT false,
    "interval" interval,
    max_claim_rows integer,
    pass_deadline interval,
    pass_statement_timeout interval,
    request_timeout interval,
    connect_timeout interval,
    concurrency integer,
    max_attempts integer,
    retry_base_delay interval,
    retry_max_backoff interval,
    breaker_threshold integer,
    reclaim_stale_after interval
);

REVOKE ALL ON outbox_route FROM PUBLIC;

SELECT pg_catalog.pg_extension_config_dump('outbox_route', '');

COMMENT ON TABLE outbox_route IS
    'A row per route, a named stream of events with one target. Write to it with INSERT, UPDATE and DELETE; workers follow from the next pass on.';
COMMENT ON COLUMN outbox_route.name IS
    'What rows carry in outbox_route: 1 to 63 bytes, no control characters. No default.';
COMMENT ON COLUMN outbox_route.relation IS
    'The outbox table, schema.table as SQL spells it. Exactly one of relation and relation_function. Default NULL.';
COMMENT ON COLUMN outbox_route.url IS
    'HTTP(S) target; may hold {event_type}, {ordering_key}, {tenant_id}, {event_id} and {route}, percent-encoded on use. No credentials in it. Exactly one of url and target_function. Default NULL.';
COMMENT ON COLUMN outbox_route.target_function IS
    'Instead of a url: schema.function as SQL spells it, taking an outbox_message and returning void; called once per event as the owner, in the transaction that settles the event. An error fails the whole pass. Default NULL.';
COMMENT ON COLUMN outbox_route.method IS
    'HTTP method: POST, PUT or PATCH. Default POST.';
COMMENT ON COLUMN outbox_route.enabled IS
    'False pauses the route. Default true.';
COMMENT ON COLUMN outbox_route.storage IS
    'What becomes of a published row: consume deletes it, retain keeps it as published. Default consume.';
COMMENT ON COLUMN outbox_route.delivery_log IS
    'Table that each published row is appended to in the statement that deletes it, schema.table; not with retain. Default NULL: none.';
COMMENT ON COLUMN outbox_route.hlc_ordering IS
    'True: events are stamped by the hybrid logical clock and claimed by (hlc NULLS LAST, created_at, id), not (created_at, id); needs that column and its index. Default false.';
COMMENT ON COLUMN outbox_route.propagate_trace IS
    'True: traceparent is staged and forwarded; needs that column. Default false.';
COMMENT ON COLUMN outbox_route.require_transaction IS
    'True: outbox_stage called by a client outside a transaction block is error 25P01. Default false.';
COMMENT ON COLUMN outbox_route.ordering IS
    'none, or key: rows of a pass with the same ordering key go out one after another in claim order. Default key.';
COMMENT ON COLUMN outbox_route.tenants_function IS
    'schema.function, as f() RETURNS SETOF uuid: the tenants, each of which gets a lane of its own; called as the owner once an interval. Default NULL: no tenants.';
COMMENT ON COLUMN outbox_route.relation_function IS
    'Instead of relation: schema.function, as f(tenant uuid) RETURNS text, the tenant''s outbox table; called as the owner by staging, passes and probes. Needs tenants_function. Default NULL.';
COMMENT ON COLUMN outbox_route.delivery_log_function IS
    'Instead of delivery_log: schema.function, as f(tenant uuid) RETURNS text, the tenant''s delivery log. Needs tenants_function. Default NULL.';
COMMENT ON COLUMN outbox_route.tenant_isolation IS
    'none, or namespace: no table of the route may be shared by tenants, so that it needs a relation_function, and a log only by delivery_log_function. Default none.';
COMMENT ON COLUMN outbox_route.envelope IS
    'Header families of a request: any of cloudevents and forze. Default {cloudevents,forze}.';
COMMENT ON COLUMN outbox_route.source IS
    'CloudEvents source. Default, when NULL: /database/route.';
COMMENT ON COLUMN outbox_route.headers IS
    'Extra request headers, an object of strings; may not override the envelope''s. Default {}.';
COMMENT ON COLUMN outbox_route.fail_statuses IS
    'HTTP statuses, 100 to 599 but no 2xx, that fail a row at once. Default {}.';
COMMENT ON COLUMN outbox_route.max_payload_bytes IS
    'Largest payload in bytes, counted as jsonb stores it before compression: 1 to 268435456. Default 4194304 (4 MiB).';
COMMENT ON COLUMN outbox_route.ca_file IS
    'File of certificate authorities to trust, an absolute path on the server; needs pg_read_server_files or superuser. Default NULL: those of the system.';
COMMENT ON COLUMN outbox_route.owner IS
    'The role that passes run as. Default: the relation''s owner where the writer is a member of it, else current_user.';
COMMENT ON COLUMN outbox_route.bound_to IS
    'System identifier, database oid and outbox_relay.environment that the route runs under; elsewhere it idles. Default: here. Never changed by UPDATE.';
COMMENT ON COLUMN outbox_route.drain_on_shutdown IS
    'True: at the shutdown of the server what is claimable still goes out, one attempt a row, within outbox_relay.shutdown_drain_timeout. Default false.';
COMMENT ON COLUMN outbox_route."interval" IS
    'Pause between polls, 1 ms to 24 days. Default NULL: outbox_relay.interval (5 s).';
COMMENT ON COLUMN outbox_route.max_claim_rows IS
    'Rows that a pass claims, 1 to 100000. Default NULL: outbox_relay.max_claim_rows (100).';
COMMENT ON COLUMN outbox_route.pass_deadline IS
    'Publishing stops this long after a pass began, 1 ms to 1 day. Default NULL: outbox_relay.pass_deadline (5 s).';
COMMENT ON COLUMN outbox_route.pass_statement_timeout IS
    'Limit of each statement and each lock wait of a pass, 1 ms to 1 day. Default NULL: outbox_relay.pass_statement_timeout (1 s).';
COMMENT ON COLUMN outbox_route.request_timeout IS
    'Limit of one HTTP request, 0 to 1 day; 0: the pass''s deadline alone. Default NULL: outbox_relay.request_timeout (0).';
COMMENT ON COLUMN outbox_route.connect_timeout IS
    'Limit of resolving, connecting and TLS of a request, 1 ms to 1 day. Default NULL: outbox_relay.connect_timeout (2 s).';
COMMENT ON COLUMN outbox_route.concurrency IS
    'Requests in flight in a pass, 1 to 1000. Default NULL: outbox_relay.concurrency (32).';
COMMENT ON COLUMN outbox_route.max_attempts IS
    'Failed attempts after which a row is parked as failed; 0: no end. Default NULL: outbox_relay.max_attempts (20).';
COMMENT ON COLUMN outbox_route.retry_base_delay IS
    'Wait after a row''s first failed attempt, doubling with each further one, 1 ms to 24 days. Default NULL: outbox_relay.retry_base_delay (1 s).';
COMMENT ON COLUMN outbox_route.retry_max_backoff IS
    'Longest wait between two attempts of a row, 1 ms to 24 days. Default NULL: outbox_relay.retry_max_backoff (5 min).';
COMMENT ON COLUMN outbox_route.breaker_threshold IS
    'Consecutive failed publishes that open the breaker of a lane; 0: never. Default NULL: outbox_relay.breaker_threshold (10).';
COMMENT ON COLUMN outbox_route.reclaim_stale_after IS
    'Age after which a row left in processing returns to pending, 0 to 24 days; 0: off. Default NULL: outbox_relay.reclaim_stale_after (5 min).';

CREATE FUNCTION outbox_route_check() RETURNS trigger
    LANGUAGE c VOLATILE PARALLEL UNSAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_route_check';
COMMENT ON FUNCTION outbox_route_check() IS
    'Validates what is written to outbox_route and fills owner and bound_to.';
REVOKE ALL ON FUNCTION outbox_route_check() FROM PUBLIC;

CREATE FUNCTION outbox_route_changed() RETURNS trigger
    LANGUAGE c VOLATILE PARALLEL UNSAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_route_changed';
COMMENT ON FUNCTION outbox_route_changed() IS
    'Tells sessions and workers, at commit, that outbox_route changed.';
REVOKE ALL ON FUNCTION outbox_route_changed() FROM PUBLIC;

CREATE TRIGGER outbox_route_check BEFORE INSERT OR UPDATE OR DELETE ON outbox_route
    FOR EACH ROW EXECUTE FUNCTION outbox_route_check();
CREATE TRIGGER outbox_route_check_truncate BEFORE TRUNCATE ON outbox_route
    FOR EACH STATEMENT EXECUTE FUNCTION outbox_route_check();
CREATE TRIGGER outbox_route_changed AFTER INSERT OR UPDATE OR DELETE OR TRUNCATE ON outbox_route
    FOR EACH STATEMENT EXECUTE FUNCTION outbox_route_changed();

COMMENT ON TRIGGER outbox_route_check ON outbox_route IS
    'Validates what is written.';
COMMENT ON TRIGGER outbox_route_check_truncate ON outbox_route IS
    'Asks for membership in the owner of every route.';
COMMENT ON TRIGGER outbox_route_changed ON outbox_route IS
    'Tells sessions and workers.';

-- Also under session_replication_role = replica.
ALTER TABLE outbox_route ENABLE ALWAYS TRIGGER outbox_route_check;
ALTER TABLE outbox_route ENABLE ALWAYS TRIGGER outbox_route_check_truncate;
ALTER TABLE outbox_route ENABLE ALWAYS TRIGGER outbox_route_changed;

CREATE FUNCTION outbox_adopt(route text DEFAULT NULL) RETURNS bigint
    LANGUAGE c VOLATILE PARALLEL UNSAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_adopt';
COMMENT ON FUNCTION outbox_adopt(text) IS
    'Binds a route (default NULL: all whose owner the caller is a member of) to this server, database and outbox_relay.environment, in a copy that is to relay and after pg_upgrade; how many were bound elsewhere.';
REVOKE ALL ON FUNCTION outbox_adopt(text) FROM PUBLIC;

-- Not in dumps: no pg_extension_config_dump.
CREATE TABLE outbox_secret (
    name text COLLATE "C" PRIMARY KEY,
    owner name NOT NULL DEFAULT current_user,
    value text NOT NULL
);
REVOKE ALL ON outbox_secret FROM PUBLIC;
COMMENT ON TABLE outbox_secret IS
    'Secrets that routes of the same owner may name. Never in a dump; a base backup and a TEMPLATE copy hold them.';
COMMENT ON COLUMN outbox_secret.name IS 'What routes call it: 1 to 63 bytes without blanks and braces. No default.';
COMMENT ON COLUMN outbox_secret.owner IS 'The role whose routes may name it. Default current_user.';
COMMENT ON COLUMN outbox_secret.value IS 'The secret: 1 to 8192 bytes. No default.';

CREATE FUNCTION outbox_secret_check() RETURNS trigger
    LANGUAGE c VOLATILE PARALLEL UNSAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_secret_check';
COMMENT ON FUNCTION outbox_secret_check() IS
    'Validates what is written to outbox_secret.';
REVOKE ALL ON FUNCTION outbox_secret_check() FROM PUBLIC;
CREATE TRIGGER outbox_secret_check BEFORE INSERT OR UPDATE OR DELETE ON outbox_secret
    FOR EACH ROW EXECUTE FUNCTION outbox_secret_check();
CREATE TRIGGER outbox_secret_check_truncate BEFORE TRUNCATE ON outbox_secret
    FOR EACH STATEMENT EXECUTE FUNCTION outbox_secret_check();
COMMENT ON TRIGGER outbox_secret_check ON outbox_secret IS
    'Validates what is written.';
COMMENT ON TRIGGER outbox_secret_check_truncate ON outbox_secret IS
    'Asks for a superuser.';
ALTER TABLE outbox_secret ENABLE ALWAYS TRIGGER outbox_secret_check;
ALTER TABLE outbox_secret ENABLE ALWAYS TRIGGER outbox_secret_check_truncate;

CREATE FUNCTION outbox_route_settings(
        OUT name text, OUT setting text, OUT value text, OUT source text)
    RETURNS SETOF record
    LANGUAGE c VOLATILE PARALLEL RESTRICTED ROWS 100
    AS 'MODULE_PATHNAME', 'outbox_relay_route_settings';
COMMENT ON FUNCTION outbox_route_settings() IS
    'The rows of outbox_route_effective; needs the right to read that view.';

CREATE VIEW outbox_route_effective AS
    SELECT s.name, s.setting, s.value, s.source FROM outbox_route_settings() s;
REVOKE ALL ON outbox_route_effective FROM PUBLIC;
COMMENT ON VIEW outbox_route_effective IS
    'What holds for each route right now, and why; routes whose owner the reader is a member of.';
COMMENT ON COLUMN outbox_route_effective.name IS 'The route.';
COMMENT ON COLUMN outbox_route_effective.setting IS 'A column of outbox_route.';
COMMENT ON COLUMN outbox_route_effective.value IS 'Its value now; durations with their unit.';
COMMENT ON COLUMN outbox_route_effective.source IS
    'route: the column says so; guc: outbox_relay.… says so; default: nobody does.';

----------------------------------------------------------------------------------------------------
-- Passes
----------------------------------------------------------------------------------------------------

CREATE TYPE outbox_message AS (
    id uuid,
    outbox_route text,
    event_id uuid,
    event_type text,
    tenant_id uuid,
    execution_id uuid,
    correlation_id uuid,
    causation_id uuid,
    occurred_at timestamptz,
    payload jsonb,
    ordering_key text,
    attempts integer,
    hlc bigint,
    traceparent text
);

COMMENT ON TYPE outbox_message IS
    'An event as a target function is given it: columns of the outbox row.';
COMMENT ON COLUMN outbox_message.id IS 'The row''s id.';
COMMENT ON COLUMN outbox_message.outbox_route IS 'The route.';
COMMENT ON COLUMN outbox_message.event_id IS 'The event''s id, the same at each repeat.';
COMMENT ON COLUMN outbox_message.event_type IS 'What happened.';
COMMENT ON COLUMN outbox_message.tenant_id IS 'The tenant, or NULL.';
COMMENT ON COLUMN outbox_message.execution_id IS 'The execution that staged the event, or NULL.';
COMMENT ON COLUMN outbox_message.correlation_id IS 'The correlation id, or NULL.';
COMMENT ON COLUMN outbox_message.causation_id IS 'The id of what caused the event, or NULL.';
COMMENT ON COLUMN outbox_message.occurred_at IS 'When it happened.';
COMMENT ON COLUMN outbox_message.payload IS 'The event''s data.';
COMMENT ON COLUMN outbox_message.ordering_key IS 'The ordering key, or NULL.';
COMMENT ON COLUMN outbox_message.attempts IS 'Attempts that failed before; a target function''s own errors count none.';
COMMENT ON COLUMN outbox_message.hlc IS 'The stamp, on a route with hlc_ordering.';
COMMENT ON COLUMN outbox_message.traceparent IS 'The W3C trace context, on a route with propagate_trace.';

CREATE FUNCTION outbox_relay_pass(
        route text, max_rows integer DEFAULT NULL, tenant_id uuid DEFAULT NULL,
        OUT claimed bigint, OUT published bigint, OUT failed bigint, OUT retried bigint,
        OUT refused bigint, OUT reclaimed bigint, OUT untouched bigint)
    RETURNS record
    LANGUAGE c VOLATILE PARALLEL UNSAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_pass';
COMMENT ON FUNCTION outbox_relay_pass(text, integer, uuid) IS
    'One pass of the route now, as its owner, in the caller''s transaction, as a savepoint of it: sets no timeouts, skips rows that the transaction wrote itself, and a rollback returns every row. Ignores the schedule of the route''s lane and whether it is enabled. max_rows (default NULL: max_claim_rows): rows to claim, at least 1. tenant_id (default NULL): of that tenant alone, on a route with tenants. Returns what became of the rows; claimed is the sum of all but reclaimed.';
REVOKE ALL ON FUNCTION outbox_relay_pass(text, integer, uuid) FROM PUBLIC;

----------------------------------------------------------------------------------------------------
-- Staging
----------------------------------------------------------------------------------------------------

-- (staging: begin)
CREATE FUNCTION outbox_stage(
        route text, event_type text, payload jsonb, event_id uuid DEFAULT NULL,
        ordering_key text DEFAULT NULL, occurred_at timestamptz DEFAULT NULL, tenant_id uuid DEFAULT NULL,
        execution_id uuid DEFAULT NULL, correlation_id uuid DEFAULT NULL, causation_id uuid DEFAULT NULL,
        traceparent text DEFAULT NULL, available_at timestamptz DEFAULT NULL)
    RETURNS uuid
    LANGUAGE c VOLATILE PARALLEL UNSAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_stage';
COMMENT ON FUNCTION outbox_stage(text, text, jsonb, uuid, text, timestamptz, uuid, uuid, uuid, uuid, text, timestamptz) IS
    'Inserts one pending row into the route''s outbox table, as the caller and in its transaction; the route''s lane wakes at commit. Returns the event id, NULL when (route, event_id) was already there. All but the first three default NULL: event_id, then, is a new UUIDv7, occurred_at now, available_at at once, the other ids and traceparent those of the settings outbox_relay.tenant_id and so on.';

CREATE FUNCTION outbox_stage_many(route text, events jsonb) RETURNS bigint
    LANGUAGE c VOLATILE PARALLEL UNSAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_stage_many';
COMMENT ON FUNCTION outbox_stage_many(text, jsonb) IS
    'outbox_stage for an array of objects whose keys are the names of its arguments, event_type and payload required, in one INSERT and with one created_at; an absent key or JSON null is its default. Returns how many rows were new. Anything malformed is an error that names the element, and nothing is staged. No defaults.';

CREATE FUNCTION outbox_wake() RETURNS trigger
    LANGUAGE c VOLATILE PARALLEL UNSAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_wake';
COMMENT ON FUNCTION outbox_wake() IS
    'Trigger AFTER INSERT FOR EACH STATEMENT on an outbox table: plain INSERT and COPY wake the relay at commit. With REFERENCING NEW TABLE the lanes of the inserted rows, else all of the table''s.';
-- (staging: end)

----------------------------------------------------------------------------------------------------
-- The hybrid logical clock
----------------------------------------------------------------------------------------------------

CREATE FUNCTION hlc_now() RETURNS bigint
    LANGUAGE c VOLATILE PARALLEL UNSAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_hlc_now';
COMMENT ON FUNCTION hlc_now() IS
    'A new stamp of the server''s hybrid logical clock: milliseconds since 1970 << 16 | logical, larger than every stamp given or merged before. Needs the preload; an error in recovery. With outbox_relay.hlc_checkpoint the transaction advances the mark of outbox_relay.node_key when it commits.';

CREATE FUNCTION hlc_update(stamp bigint) RETURNS bigint
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_hlc_update';
COMMENT ON FUNCTION hlc_update(bigint) IS
    'Merges a stamp of another clock and gives a new one above it. Raises 22P02 for a negative stamp, 22008 for one more than outbox_relay.hlc_max_drift (5 min) ahead of the wall clock.';

CREATE FUNCTION hlc_observe(header text) RETURNS bigint
    LANGUAGE c VOLATILE STRICT PARALLEL UNSAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_hlc_observe';
COMMENT ON FUNCTION hlc_observe(text) IS
    'The same from a forze_hlc or ce-hlc header of a consumed event, which a stranger may have written: malformed or too far ahead, it changes nothing and the result is NULL.';

CREATE FUNCTION hlc_last() RETURNS bigint
    LANGUAGE c VOLATILE PARALLEL SAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_hlc_last';
COMMENT ON FUNCTION hlc_last() IS
    'The largest stamp that the clock has given or merged since the server started, without giving one; 0: none yet.';

CREATE FUNCTION hlc_pack(ms bigint, logical integer) RETURNS bigint
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_hlc_pack';
COMMENT ON FUNCTION hlc_pack(bigint, integer) IS
    'The stamp of these parts: milliseconds since 1970, 0 to 140737488355327, and logical, 0 to 65535.';

CREATE FUNCTION hlc_physical_ms(stamp bigint) RETURNS bigint
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_hlc_physical_ms';
COMMENT ON FUNCTION hlc_physical_ms(bigint) IS
    'The milliseconds since 1970 of a stamp.';

CREATE FUNCTION hlc_logical(stamp bigint) RETURNS integer
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_hlc_logical';
COMMENT ON FUNCTION hlc_logical(bigint) IS
    'The logical part of a stamp, 0 to 65535.';

CREATE FUNCTION hlc_timestamp(stamp bigint) RETURNS timestamptz
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_hlc_timestamp';
COMMENT ON FUNCTION hlc_timestamp(bigint) IS
    'The milliseconds of a stamp as a time.';

CREATE FUNCTION hlc_encode(stamp bigint) RETURNS text
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_hlc_encode';
COMMENT ON FUNCTION hlc_encode(bigint) IS
    'A stamp as text, as headers carry it: 15 digits of milliseconds, a dot, 5 digits of the logical part; sorts like the stamp.';

CREATE FUNCTION hlc_parse(encoded text) RETURNS bigint
    LANGUAGE c IMMUTABLE STRICT PARALLEL SAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_hlc_parse';
COMMENT ON FUNCTION hlc_parse(text) IS
    'The stamp of a text that hlc_encode gave; 22P02 for any other.';

CREATE FUNCTION hlc_checkpoint_advance(mark bigint, node_key text DEFAULT NULL) RETURNS void
    LANGUAGE c VOLATILE PARALLEL UNSAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_hlc_checkpoint_advance';
COMMENT ON FUNCTION hlc_checkpoint_advance(bigint, text) IS
    'Raises the mark of node_key (default NULL: outbox_relay.node_key) in the table outbox_relay.hlc_checkpoint to at least mark, never lowers it; as the caller, in its transaction. Stamping transactions do this by themselves.';

CREATE FUNCTION hlc_checkpoint_load() RETURNS bigint
    LANGUAGE c VOLATILE PARALLEL RESTRICTED
    AS 'MODULE_PATHNAME', 'outbox_relay_hlc_checkpoint_load';
COMMENT ON FUNCTION hlc_checkpoint_load() IS
    'The largest mark over all keys of the table outbox_relay.hlc_checkpoint, as the caller sees it; NULL when there is none.';

----------------------------------------------------------------------------------------------------
-- Probes and repairs
----------------------------------------------------------------------------------------------------

CREATE FUNCTION outbox_depth(
        route text, tenant_id uuid DEFAULT NULL,
        OUT pending bigint, OUT processing bigint, OUT failed bigint)
    RETURNS record
    LANGUAGE c STABLE PARALLEL RESTRICTED
    AS 'MODULE_PATHNAME', 'outbox_relay_depth';
COMMENT ON FUNCTION outbox_depth(text, uuid) IS
    'Rows of a route that are pending (those parked for a retry too), processing and failed; published rows are never counted. tenant_id (default NULL): of that tenant alone.';

CREATE FUNCTION outbox_has_undrained(route text, tenant_id uuid DEFAULT NULL) RETURNS boolean
    LANGUAGE c STABLE PARALLEL RESTRICTED
    AS 'MODULE_PATHNAME', 'outbox_relay_has_undrained';
COMMENT ON FUNCTION outbox_has_undrained(text, uuid) IS
    'True while a row of the route is pending or processing. tenant_id (default NULL): of that tenant alone.';

CREATE FUNCTION outbox_oldest_pending_age(route text, tenant_id uuid DEFAULT NULL) RETURNS interval
    LANGUAGE c STABLE PARALLEL RESTRICTED
    AS 'MODULE_PATHNAME', 'outbox_relay_oldest_pending_age';
COMMENT ON FUNCTION outbox_oldest_pending_age(text, uuid) IS
    'Time since the oldest pending row of the route was created, those parked for a retry included; NULL without one. tenant_id (default NULL): of that tenant alone.';

CREATE FUNCTION outbox_requeue_failed(
        route text, event_ids uuid[] DEFAULT NULL, tenant_id uuid DEFAULT NULL)
    RETURNS bigint
    LANGUAGE c VOLATILE PARALLEL UNSAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_requeue_failed';
COMMENT ON FUNCTION outbox_requeue_failed(text, uuid[], uuid) IS
    'Returns failed rows of the route to pending, attempts 0, gives rows that are set aside another try, and wakes it; how many. event_ids (default NULL): NULL all, {} none. tenant_id (default NULL): of that tenant alone. Runs as the route''s owner, in whom the caller must be a member.';
REVOKE ALL ON FUNCTION outbox_requeue_failed(text, uuid[], uuid) FROM PUBLIC;

CREATE FUNCTION outbox_ddl(
        relation text, hlc boolean DEFAULT false, trace boolean DEFAULT false,
        delivery_log text DEFAULT NULL)
    RETURNS SETOF text
    LANGUAGE c STABLE PARALLEL RESTRICTED ROWS 5
    AS 'MODULE_PATHNAME', 'outbox_relay_ddl';
COMMENT ON FUNCTION outbox_ddl(text, boolean, boolean, text) IS
    'The statements that create an outbox table and its indexes, for \gexec; creates nothing. hlc (default false): with the hlc column and its index; trace (default false): with traceparent; delivery_log (default NULL): also that table, partitioned by day.';

----------------------------------------------------------------------------------------------------
-- Seeing it
----------------------------------------------------------------------------------------------------

CREATE FUNCTION outbox_stat_route_rows(
        OUT route text, OUT tenant_id uuid, OUT state text, OUT due_at timestamptz,
        OUT backoff_until timestamptz, OUT breaker text, OUT in_flight integer, OUT set_aside integer,
        OUT passes bigint, OUT failed_passes bigint, OUT consecutive_failures bigint,
        OUT claimed bigint, OUT published bigint, OUT failed bigint, OUT retried bigint,
        OUT refused bigint, OUT reclaimed bigint, OUT duplicates_avoided bigint,
        OUT bytes_published bigint, OUT latency_p50_ms double precision,
        OUT latency_p95_ms double precision, OUT latency_p99_ms double precision,
        OUT latency_buckets bigint[], OUT last_pass_at timestamptz, OUT last_pass_ms bigint,
        OUT last_error_at timestamptz, OUT last_error text, OUT stats_reset timestamptz)
    RETURNS SETOF record
    LANGUAGE c VOLATILE PARALLEL RESTRICTED ROWS 100
    AS 'MODULE_PATHNAME', 'outbox_relay_stat_route';
COMMENT ON FUNCTION outbox_stat_route_rows() IS
    'The rows of outbox_stat_route.';

CREATE VIEW outbox_stat_route AS
    SELECT s.route, s.tenant_id, s.state, s.due_at, s.backoff_until, s.breaker, s.in_flight, s.set_aside,
           s.passes, s.failed_passes, s.consecutive_failures, s.claimed, s.published, s.failed, s.retried,
           s.refused, s.reclaimed, s.duplicates_avoided, s.bytes_published, s.latency_p50_ms,
           s.latency_p95_ms, s.latency_p99_ms, s.latency_buckets, s.last_pass_at, s.last_pass_ms,
           s.last_error_at, s.last_error, s.stats_reset
    FROM outbox_stat_route_rows() s;
GRANT SELECT ON outbox_stat_route TO PUBLIC;
COMMENT ON VIEW outbox_stat_route IS
    'Every lane of this database''s routes and what it did since stats_reset. pg_monitor sees all, others the routes whose owner they are a member of.';
COMMENT ON COLUMN outbox_stat_route.route IS 'The route.';
COMMENT ON COLUMN outbox_stat_route.tenant_id IS 'The tenant of the lane; NULL: the route''s one lane.';
COMMENT ON COLUMN outbox_stat_route.state IS
    'idle, due, running, backoff, refused, paused, foreign (bound elsewhere) or broken (the extension is not of the loaded library''s version, the owner is gone, or the server has no slot for a worker).';
COMMENT ON COLUMN outbox_stat_route.due_at IS 'When its next pass is due.';
COMMENT ON COLUMN outbox_stat_route.backoff_until IS 'Until when it waits after a failed pass.';
COMMENT ON COLUMN outbox_stat_route.breaker IS 'closed, open or probing.';
COMMENT ON COLUMN outbox_stat_route.in_flight IS 'Requests in flight now.';
COMMENT ON COLUMN outbox_stat_route.set_aside IS 'Rows set aside because their settling fails.';
COMMENT ON COLUMN outbox_stat_route.passes IS 'Passes that committed.';
COMMENT ON COLUMN outbox_stat_route.failed_passes IS 'Passes that failed and were undone.';
COMMENT ON COLUMN outbox_stat_route.consecutive_failures IS 'Passes since the last good one that failed or ended by refusal.';
COMMENT ON COLUMN outbox_stat_route.claimed IS 'Rows claimed.';
COMMENT ON COLUMN outbox_stat_route.published IS 'Rows published and settled.';
COMMENT ON COLUMN outbox_stat_route.failed IS 'Rows parked as failed.';
COMMENT ON COLUMN outbox_stat_route.retried IS 'Rows rescheduled after a failed attempt.';
COMMENT ON COLUMN outbox_stat_route.refused IS 'Rows refused by the endpoint, without an attempt counted.';
COMMENT ON COLUMN outbox_stat_route.reclaimed IS 'Rows returned from processing to pending.';
COMMENT ON COLUMN outbox_stat_route.duplicates_avoided IS
    'Rows settled without being sent again after a failed pass.';
COMMENT ON COLUMN outbox_stat_route.bytes_published IS 'Bytes of the bodies published.';
COMMENT ON COLUMN outbox_stat_route.latency_p50_ms IS 'Median time of a request in milliseconds.';
COMMENT ON COLUMN outbox_stat_route.latency_p95_ms IS '95th percentile of a request in milliseconds.';
COMMENT ON COLUMN outbox_stat_route.latency_p99_ms IS '99th percentile of a request in milliseconds.';
COMMENT ON COLUMN outbox_stat_route.latency_buckets IS
    'Histogram of request times: 48 buckets, upper bounds 50 us * 2^(i/2), the first is i = 0, the last has none.';
COMMENT ON COLUMN outbox_stat_route.last_pass_at IS 'When the last pass ended.';
COMMENT ON COLUMN outbox_stat_route.last_pass_ms IS 'How long the last pass took in milliseconds.';
COMMENT ON COLUMN outbox_stat_route.last_error_at IS 'When last_error happened.';
COMMENT ON COLUMN outbox_stat_route.last_error IS 'The last failure of a pass.';
COMMENT ON COLUMN outbox_stat_route.stats_reset IS 'When the counters began.';

CREATE FUNCTION outbox_stat_worker_rows(
        OUT pid integer, OUT database name, OUT route text, OUT tenant_id uuid, OUT phase text,
        OUT since timestamptz)
    RETURNS SETOF record
    LANGUAGE c VOLATILE PARALLEL RESTRICTED ROWS 10
    AS 'MODULE_PATHNAME', 'outbox_relay_stat_worker';
COMMENT ON FUNCTION outbox_stat_worker_rows() IS
    'The rows of outbox_stat_worker.';

CREATE VIEW outbox_stat_worker AS
    SELECT s.pid, s.database, s.route, s.tenant_id, s.phase, s.since FROM outbox_stat_worker_rows() s;
GRANT SELECT ON outbox_stat_worker TO PUBLIC;
COMMENT ON VIEW outbox_stat_worker IS
    'The launcher and the workers of this server. Whose lane a worker serves is shown to pg_monitor and to members of the route''s owner.';
COMMENT ON COLUMN outbox_stat_worker.pid IS 'Process id.';
COMMENT ON COLUMN outbox_stat_worker.database IS 'Its database; NULL: the launcher.';
COMMENT ON COLUMN outbox_stat_worker.route IS 'The route that it serves now.';
COMMENT ON COLUMN outbox_stat_worker.tenant_id IS 'The tenant that it serves now.';
COMMENT ON COLUMN outbox_stat_worker.phase IS
    'starting, idle, claim, publish, settle, commit, or launcher.';
COMMENT ON COLUMN outbox_stat_worker.since IS 'Since when it is in this phase.';

CREATE FUNCTION outbox_stat_reset() RETURNS void
    LANGUAGE c VOLATILE PARALLEL UNSAFE
    AS 'MODULE_PATHNAME', 'outbox_relay_stat_reset';
COMMENT ON FUNCTION outbox_stat_reset() IS
    'Sets the counters of this database''s lanes to zero.';
REVOKE ALL ON FUNCTION outbox_stat_reset() FROM PUBLIC;
