-- Staging: outbox_stage, outbox_stage_many, outbox_wake. Without an endpoint: the route is paused.
\set VERBOSITY terse
CREATE EXTENSION outbox_relay;
CREATE SCHEMA app;
SELECT outbox_ddl('app.outbox', trace => true) \gexec
INSERT INTO outbox_route (name, relation, url, enabled, propagate_trace)
    VALUES ('orders', 'app.outbox', 'http://127.0.0.1:9/', false, true);
INSERT INTO outbox_route (name, relation, url, enabled, require_transaction, max_payload_bytes)
    VALUES ('strict', 'app.outbox', 'http://127.0.0.1:9/', false, true, 100);
CREATE FUNCTION attempt(sql text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE detail text; hint text; result text;
BEGIN
    EXECUTE sql INTO result;
    RETURN 'no error: ' || coalesce(result, 'NULL');
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
    RETURN concat_ws(E'\n  ', SQLSTATE || ' ' || SQLERRM, nullif(detail, ''), nullif(hint, ''));
END $$;

\echo one pending row with its defaults (STG-01, STG-18, STG-28)
SELECT outbox_stage('orders', 'order.placed', '{"n": 19.99}') IS NOT NULL AS staged;
SELECT outbox_route, event_type, payload, status, attempts, available_at IS NULL AS at_once, ordering_key,
       occurred_at = created_at AS same_instant, substring(id::text, 15, 1) AS id_version,
       substring(event_id::text, 15, 1) AS event_id_version, published_at, processing_at, last_error, tenant_id
    FROM app.outbox;

\echo what is given is kept (STG-18, STG-19, STG-22)
TRUNCATE app.outbox;
SELECT outbox_stage('orders', 't', '[1]', '00000000-0000-7000-8000-000000000001', 'key', '2026-01-02 03:04:05+00',
    '00000000-0000-0000-0000-000000000002', '00000000-0000-0000-0000-000000000003',
    '00000000-0000-0000-0000-000000000004', '00000000-0000-0000-0000-000000000005',
    '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01', '2026-01-03 00:00:00+00');
SET timezone = 'UTC';
SET datestyle = 'ISO';
SELECT event_id, ordering_key, occurred_at, tenant_id, execution_id, correlation_id, causation_id, traceparent, available_at
    FROM app.outbox;

\echo the same event again is nothing (STG-09, STG-10, STG-13)
SELECT outbox_stage('orders', 'other', '{}', event_id => '00000000-0000-7000-8000-000000000001');
UPDATE app.outbox SET status = 'failed';
SELECT outbox_stage('orders', 'other', '{}', event_id => '00000000-0000-7000-8000-000000000001');
BEGIN;
SELECT outbox_stage('strict', 'other', '{}', event_id => '00000000-0000-7000-8000-000000000001');
COMMIT;
SELECT outbox_route, event_type, status FROM app.outbox ORDER BY 1;

\echo rollback and savepoint (STG-02, STG-03)
TRUNCATE app.outbox;
BEGIN;
SELECT outbox_stage('orders', 'kept', '{}') IS NOT NULL AS staged;
SAVEPOINT s;
SELECT outbox_stage('orders', 'dropped', '{}') IS NOT NULL AS staged;
ROLLBACK TO s;
COMMIT;
BEGIN;
SELECT outbox_stage('orders', 'gone', '{}') IS NOT NULL AS staged;
ROLLBACK;
SELECT event_type FROM app.outbox;

\echo the context (STG-20)
TRUNCATE app.outbox;
BEGIN;
SET LOCAL outbox_relay.tenant_id = '00000000-0000-0000-0000-00000000000a';
SET LOCAL outbox_relay.execution_id = '00000000-0000-0000-0000-00000000000b';
SET LOCAL outbox_relay.correlation_id = '00000000-0000-0000-0000-00000000000c';
SET LOCAL outbox_relay.causation_id = '00000000-0000-0000-0000-00000000000d';
SET LOCAL outbox_relay.traceparent = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01';
SELECT outbox_stage('orders', 't', '{}') IS NOT NULL AS staged;
SELECT outbox_stage('orders', 't', '{}', tenant_id => '00000000-0000-0000-0000-0000000000ff') IS NOT NULL AS staged;
SELECT outbox_stage_many('orders', '[{"event_type": "t", "payload": {}}]');
COMMIT;
SELECT tenant_id, execution_id, correlation_id, causation_id, traceparent FROM app.outbox ORDER BY created_at, id;
SET outbox_relay.tenant_id = 'nonsense';
SET outbox_relay.traceparent = '00-nonsense';

\echo time goes on (STG-16)
TRUNCATE app.outbox;
SELECT count(outbox_stage('orders', i::text, '{}')) FROM generate_series(1, 1000) i;
SELECT count(DISTINCT created_at) AS instants, count(DISTINCT id) AS ids,
       bool_and(ok) AS ascending
    FROM (SELECT created_at, id, id > lag(id, 1, '00000000-0000-0000-0000-000000000000') OVER (ORDER BY event_type::int)
                 AND created_at > lag(created_at, 1, '-infinity') OVER (ORDER BY event_type::int) AS ok FROM app.outbox) s;

\echo many (STG-06, STG-14, STG-17, STG-21)
TRUNCATE app.outbox;
SELECT outbox_stage_many('orders', '[
    {"event_type": "a", "payload": {"exact": 12345678901234567890.123456789, "tiny": 1e-30}, "ordering_key": "k",
     "event_id": "00000000-0000-7000-8000-000000000001", "occurred_at": "2026-01-02T03:04:05.000006Z",
     "tenant_id": "00000000-0000-0000-0000-000000000002", "available_at": null},
    {"event_type": "b", "payload": "text"},
    {"event_type": "c", "payload": 7, "event_id": "00000000-0000-7000-8000-000000000001"}]');
SELECT event_type, payload, ordering_key, event_id = '00000000-0000-7000-8000-000000000001' AS given, tenant_id,
       occurred_at < '2026-01-03' AS long_ago
    FROM app.outbox ORDER BY id;
SELECT count(DISTINCT created_at) FROM app.outbox;
SELECT outbox_stage_many('orders', '[]');
TRUNCATE app.outbox;
SELECT outbox_stage_many('orders', jsonb_agg(jsonb_build_object('event_type', i::text, 'payload', i)))
    FROM generate_series(1, 1201) i;
SELECT bool_and(payload::int = n) AS in_call_order
    FROM (SELECT payload, row_number() OVER (ORDER BY id) AS n FROM app.outbox) s;

\echo bad input, and nothing is staged
TRUNCATE app.outbox;
SELECT attempt(sql) FROM unnest(ARRAY[
    $$SELECT outbox_stage(NULL, 't', '{}')$$,
    $$SELECT outbox_stage('orders', NULL, '{}')$$,
    $$SELECT outbox_stage('orders', 't', NULL)$$,
    $$SELECT outbox_stage('orders', '', '{}')$$,
    $$SELECT outbox_stage('nobody', 't', '{}')$$,
    $$SELECT outbox_stage('orders', 't', '{}', traceparent => 'nonsense')$$,
    $$SELECT outbox_stage('strict', 't', to_jsonb(repeat('x', 200)))$$,
    $$SELECT outbox_stage_many(NULL, '[]')$$,
    $$SELECT outbox_stage_many('orders', NULL)$$,
    $$SELECT outbox_stage_many('nobody', '[]')$$,
    $$SELECT outbox_stage_many('orders', '{}')$$,
    $$SELECT outbox_stage_many('orders', '7')$$,
    $$SELECT outbox_stage_many('orders', '[{"event_type": "t", "payload": 1}, 7]')$$,
    $$SELECT outbox_stage_many('orders', '[{"event_type": "t", "payload": 1}, [1]]')$$,
    $$SELECT outbox_stage_many('orders', '[{"event_type": "t"}]')$$,
    $$SELECT outbox_stage_many('orders', '[{"event_type": "t", "payload": null}]')$$,
    $$SELECT outbox_stage_many('orders', '[{"payload": 1}]')$$,
    $$SELECT outbox_stage_many('orders', '[{"event_type": 5, "payload": 1}]')$$,
    $$SELECT outbox_stage_many('orders', '[{"event_type": "", "payload": 1}]')$$,
    $$SELECT outbox_stage_many('orders', '[{"event_type": "t", "payload": 1, "foo": 2}]')$$,
    $$SELECT outbox_stage_many('orders', '[{"event_type": "t", "payload": 1, "event_id": "x"}]')$$,
    $$SELECT outbox_stage_many('orders', '[{"event_type": "t", "payload": 1, "occurred_at": "yesterday or so"}]')$$,
    $$SELECT outbox_stage_many('orders', '[{"event_type": "t", "payload": 1, "traceparent": "x"}]')$$,
    $$SELECT outbox_stage_many('strict', jsonb_build_array(jsonb_build_object('event_type', 't', 'payload', repeat('x', 200))))$$
    ]) AS sql;
SELECT count(*) FROM app.outbox;

\echo require_transaction (STG-26, STG-27): a client outside of a block, then a function, a DO and a block
SELECT outbox_stage('strict', 't', '{}');
SELECT outbox_stage_many('strict', '[]');
SELECT attempt($$SELECT outbox_stage('strict', 'function', '1') IS NOT NULL$$);
DO $$ BEGIN PERFORM outbox_stage('strict', 'do', '1'); END $$;
CREATE PROCEDURE stages() LANGUAGE plpgsql AS $$ BEGIN PERFORM outbox_stage('strict', 'procedure', '1'); END $$;
CALL stages();
BEGIN;
SELECT outbox_stage('strict', 'block', '1') IS NOT NULL AS staged;
COMMIT;
SELECT event_type FROM app.outbox ORDER BY 1;

\echo as the caller: its rights hold
CREATE ROLE regress_stager;
GRANT USAGE ON SCHEMA app TO regress_stager;
SET ROLE regress_stager;
SELECT outbox_stage('orders', 't', '{}');
RESET ROLE;
GRANT INSERT ON app.outbox TO regress_stager;
SET ROLE regress_stager;
SELECT outbox_stage('orders', 'granted', '1') IS NOT NULL AS staged;
RESET ROLE;

\echo the table may be replaced under its name
CREATE TABLE app.other (LIKE app.outbox INCLUDING ALL);
ALTER TABLE app.outbox RENAME TO old;
ALTER TABLE app.other RENAME TO outbox;
SELECT outbox_stage('orders', 'replaced', '1') IS NOT NULL AS staged;
SELECT event_type FROM app.outbox;

\echo the wake trigger
CREATE TRIGGER wake AFTER INSERT ON app.outbox REFERENCING NEW TABLE AS staged
    FOR EACH STATEMENT EXECUTE FUNCTION outbox_wake();
CREATE TRIGGER wake_all AFTER INSERT ON app.outbox FOR EACH STATEMENT EXECUTE FUNCTION outbox_wake();
INSERT INTO app.outbox SELECT gen_random_uuid(), 'orders', gen_random_uuid(), 'plain', NULL, NULL, NULL, NULL, now(), '1',
    'pending', now() FROM generate_series(1, 3);
SELECT count(*) FROM app.outbox;
CREATE TRIGGER wrong BEFORE INSERT ON app.outbox FOR EACH ROW EXECUTE FUNCTION outbox_wake();
SELECT attempt($$SELECT outbox_stage('orders', 't', '{}')$$);
SELECT outbox_wake();

DROP OWNED BY regress_stager;
DROP ROLE regress_stager;
DROP SCHEMA app CASCADE;
DROP EXTENSION outbox_relay;
DROP FUNCTION attempt(text);
DROP PROCEDURE stages();
