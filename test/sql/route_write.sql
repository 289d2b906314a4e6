-- Writing routes: defaults, owner and binding, restored rows, updates, renaming, what is in effect.
SET client_min_messages = warning;
CREATE EXTENSION outbox_relay;
CREATE SCHEMA app;
\pset format unaligned
\pset tuples_only on
-- What a statement is answered with: SQLSTATE and message, DETAIL, HINT.
CREATE FUNCTION attempt(statement text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
    state text; message text; detail text; hint text;
BEGIN
    EXECUTE statement;
    RETURN 'ok';
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, message = MESSAGE_TEXT,
        detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
    RETURN state || ' ' || message || COALESCE(E'\n  ' || NULLIF(detail, ''), '')
        || COALESCE(E'\n  ' || NULLIF(hint, ''), '');
END $$;
SELECT outbox_ddl('app.outbox') \gexec
CREATE ROLE regress_outbox_owner;
GRANT USAGE ON SCHEMA app TO regress_outbox_owner;
ALTER TABLE app.outbox OWNER TO regress_outbox_owner;
CREATE VIEW here AS
    SELECT system_identifier || '/' || d.oid || '/' || current_setting('outbox_relay.environment') AS binding
    FROM pg_control_system(), pg_database d WHERE datname = current_database();

\echo defaults
BEGIN;
INSERT INTO outbox_route (name, relation, url) VALUES ('orders', 'app.outbox', 'http://127.0.0.1:9/{tenant_id}/x');
SELECT method, enabled, storage, propagate_trace, require_transaction, ordering, envelope, source, headers,
       fail_statuses, max_payload_bytes, ca_file, owner, bound_to = binding FROM outbox_route, here;
UPDATE outbox_route SET enabled = false;
COMMIT;

\echo spelled as SQL spells it, and methods in any case
UPDATE outbox_route SET relation = 'APP . "outbox"', method = 'put' RETURNING relation, method;
UPDATE outbox_route SET relation = 'app.outbox', owner = NULL RETURNING owner;
\echo names may end in a space
INSERT INTO outbox_route (name, relation, url, enabled) VALUES ('a ', 'app.outbox', 'http://127.0.0.1:9/', false);
SELECT '"' || name || '"' FROM outbox_route ORDER BY name;
DELETE FROM outbox_route WHERE name = 'a ';

\echo the binding is never updated
SELECT attempt('UPDATE outbox_route SET bound_to = ''elsewhere''');
SELECT attempt('UPDATE outbox_route SET bound_to = NULL');

\echo a row that brings its binding is checked for form alone
INSERT INTO outbox_route (name, relation, url, owner, bound_to)
    VALUES ('restored', 'missing.outbox', 'http://127.0.0.1:9/', 'regress_missing_role', '1/2/staging')
    RETURNING relation, owner, bound_to;
SELECT attempt('INSERT INTO outbox_route (name, relation, url, bound_to) VALUES (''x'', ''missing'', ''http://127.0.0.1:9/'', ''1/2/'')');
SELECT attempt('INSERT INTO outbox_route (name, relation, url, bound_to) VALUES (''x'', ''a.b'', ''ftp://127.0.0.1/'', ''1/2/'')');
UPDATE outbox_route SET enabled = false WHERE name = 'restored' RETURNING enabled;
SELECT attempt('UPDATE outbox_route SET relation = ''missing.other'' WHERE name = ''restored''');
SELECT attempt('SELECT outbox_requeue_failed(''restored'')');
SELECT attempt('SELECT outbox_depth(''restored'')');
COPY outbox_route (name, relation, url, owner, bound_to, max_claim_rows) FROM stdin;
copied	missing.outbox	http://127.0.0.1:9/	regress_missing_role	1/2/staging	7
\.
SET session_replication_role = replica;
SELECT attempt('INSERT INTO outbox_route (name, relation, url) VALUES (''x'', ''app.missing'', ''http://127.0.0.1:9/'')');
RESET session_replication_role;
SELECT route, state FROM outbox_stat_route ORDER BY route;
DELETE FROM outbox_route WHERE name IN ('restored', 'copied');

\echo renaming
SELECT attempt('UPDATE outbox_route SET name = ''renamed''');
UPDATE outbox_route SET name = 'orders';
INSERT INTO app.outbox (id, outbox_route, event_id, event_type, occurred_at, payload, status, created_at)
    SELECT gen_random_uuid(), 'orders', gen_random_uuid(), 't', now(), '{}', s, now()
    FROM unnest(ARRAY['pending', 'failed', 'published']) s;
SELECT attempt('UPDATE outbox_route SET name = ''later''');
UPDATE app.outbox SET status = 'processing' WHERE status = 'pending';
SELECT attempt('UPDATE outbox_route SET name = ''later''');
DELETE FROM app.outbox WHERE status = 'processing';
UPDATE outbox_route SET name = 'later' RETURNING name;

\echo a table that is gone does not stop a change elsewhere
DROP TABLE app.outbox;
UPDATE outbox_route SET concurrency = 5, name = 'last' RETURNING name, concurrency;
SELECT attempt('UPDATE outbox_route SET propagate_trace = true');

\echo in effect
SET outbox_relay.breaker_threshold = 3;
UPDATE outbox_route SET interval = '90 s', request_timeout = '1500 ms', connect_timeout = '1500 ms', max_attempts = 0,
    retry_max_backoff = '0.5 days', source = '/shop', headers = '{"X-Token": "secret"}', fail_statuses = '{400,422}',
    envelope = '{}', ordering = 'none';
SELECT name, setting, value, source FROM outbox_route_effective
    WHERE setting <> 'bound_to' ORDER BY name, setting COLLATE "C";
RESET outbox_relay.breaker_threshold;

\echo seen at once in the same transaction, gone with its rollback
BEGIN;
DELETE FROM outbox_route;
SELECT attempt('SELECT outbox_depth(''last'')');
ROLLBACK;
SELECT attempt('SELECT outbox_depth(''last'')');
BEGIN;
SAVEPOINT s;
UPDATE outbox_route SET name = 'other';
SELECT attempt('SELECT outbox_depth(''other'')');
ROLLBACK TO s;
SELECT attempt('SELECT outbox_depth(''other'')');
COMMIT;
TRUNCATE outbox_route;
SELECT attempt('SELECT outbox_depth(''last'')');

\echo the newest committed route, also under an old snapshot
SELECT outbox_ddl('app.outbox') \gexec
BEGIN ISOLATION LEVEL REPEATABLE READ;
SELECT count(*) FROM outbox_route;
INSERT INTO outbox_route (name, relation, url, enabled) VALUES ('young', 'app.outbox', 'http://127.0.0.1:9/', false);
SELECT outbox_depth('young');
COMMIT;

\echo the trigger functions serve no other table
CREATE TABLE app.other (a int);
CREATE TRIGGER t BEFORE INSERT ON app.other FOR EACH ROW EXECUTE FUNCTION outbox_route_check();
SELECT attempt('INSERT INTO app.other VALUES (1)');
SELECT attempt('SELECT outbox_route_check()');

DROP VIEW here;
DROP FUNCTION attempt;
DROP TABLE app.other;
DROP EXTENSION outbox_relay;
DROP SCHEMA app CASCADE;
DROP ROLE regress_outbox_owner;
