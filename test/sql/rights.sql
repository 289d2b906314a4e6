-- Who may what.
SET client_min_messages = warning;
CREATE EXTENSION outbox_relay;
CREATE SCHEMA app;
GRANT USAGE ON SCHEMA app TO PUBLIC;
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
CREATE ROLE regress_outbox_nobody;
CREATE ROLE regress_outbox_admin;
CREATE ROLE regress_outbox_owner;
CREATE ROLE regress_outbox_member IN ROLE regress_outbox_owner;
CREATE ROLE regress_outbox_monitor IN ROLE pg_monitor;
SELECT outbox_ddl('app.outbox') \gexec
SELECT outbox_ddl('app.own') \gexec
ALTER TABLE app.outbox OWNER TO regress_outbox_owner;
ALTER TABLE app.own OWNER TO regress_outbox_admin;
INSERT INTO outbox_route (name, relation, url, enabled) VALUES ('r', 'app.outbox', 'http://127.0.0.1:9/', false) RETURNING owner;

\echo everybody may call
SELECT p.proname FROM pg_depend d JOIN pg_proc p ON d.classid = 'pg_proc'::regclass AND d.objid = p.oid
WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
  AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'outbox_relay')
  AND has_function_privilege('regress_outbox_nobody', p.oid, 'EXECUTE') ORDER BY 1;
\echo everybody may read
SELECT c.relname FROM pg_depend d JOIN pg_class c ON d.classid = 'pg_class'::regclass AND d.objid = c.oid
WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
  AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'outbox_relay')
  AND has_table_privilege('regress_outbox_nobody', c.oid, 'SELECT, INSERT, UPDATE, DELETE, TRUNCATE, REFERENCES, TRIGGER')
ORDER BY 1;

\echo nobody
SET ROLE regress_outbox_nobody;
SELECT attempt(s) FROM unnest(ARRAY['SELECT * FROM outbox_route',
    'INSERT INTO outbox_route (name, relation, url) VALUES (''x'', ''app.outbox'', ''http://127.0.0.1:9/'')',
    'UPDATE outbox_route SET enabled = true', 'DELETE FROM outbox_route', 'TRUNCATE outbox_route',
    'SELECT * FROM outbox_route_effective', 'SELECT outbox_route_settings()', 'SELECT outbox_requeue_failed(''r'')',
    'SELECT outbox_stat_reset()', 'SELECT outbox_depth(''r'')', 'SELECT outbox_has_undrained(''r'')',
    'SELECT outbox_oldest_pending_age(''r'')', 'SELECT outbox_depth(''unknown'')', 'SET outbox_relay.interval = 1',
    'SET outbox_relay.tenant_id = ''x''']) s;
SELECT count(*) FROM outbox_stat_route;
SELECT count(route) FROM outbox_stat_worker;
RESET ROLE;

\echo the route table granted, but no member of the owner
GRANT ALL ON outbox_route TO regress_outbox_admin;
GRANT SELECT ON outbox_route_effective TO regress_outbox_admin;
SET ROLE regress_outbox_admin;
INSERT INTO outbox_route (name, relation, url, enabled) VALUES ('own', 'app.own', 'http://127.0.0.1:9/', false) RETURNING owner;
SELECT attempt(s) FROM unnest(ARRAY[
    'INSERT INTO outbox_route (name, relation, url, owner) VALUES (''x'', ''app.outbox'', ''http://127.0.0.1:9/'', ''regress_outbox_owner'')',
    'INSERT INTO outbox_route (name, relation, url, owner, bound_to) VALUES (''x'', ''app.outbox'', ''http://127.0.0.1:9/'', ''regress_outbox_owner'', ''1/2/'')',
    'INSERT INTO outbox_route (name, relation, url, owner, bound_to) VALUES (''x'', ''app.outbox'', ''http://127.0.0.1:9/'', ''regress_missing_role'', ''1/2/'')',
    'UPDATE outbox_route SET enabled = false WHERE name = ''r''',
    'UPDATE outbox_route SET owner = ''regress_outbox_admin'' WHERE name = ''r''',
    'UPDATE outbox_route SET owner = ''regress_outbox_owner'' WHERE name = ''own''',
    'UPDATE outbox_route SET ca_file = ''/etc/ssl/ca.pem'' WHERE name = ''own''',
    'DELETE FROM outbox_route WHERE name = ''r''', 'TRUNCATE outbox_route']) s;
SELECT DISTINCT name FROM outbox_route_effective;
SELECT route FROM outbox_stat_route;
RESET ROLE;
GRANT pg_read_server_files TO regress_outbox_admin;
SET ROLE regress_outbox_admin;
UPDATE outbox_route SET ca_file = '/etc/ssl/ca.pem' WHERE name = 'own' RETURNING ca_file;
\echo on the table of another role, whose code would run as this role
SET client_min_messages = warning;
INSERT INTO outbox_route (name, relation, url, enabled) VALUES ('foreign', 'app.outbox', 'http://127.0.0.1:9/', false) RETURNING owner;
DELETE FROM outbox_route WHERE name IN ('own', 'foreign');
RESET ROLE;
\echo so a superuser can not own a route on it either
CREATE ROLE regress_outbox_super SUPERUSER;
INSERT INTO outbox_route (name, relation, url, owner, enabled) VALUES ('super', 'app.outbox', 'http://127.0.0.1:9/', 'regress_outbox_super', false);
SELECT attempt('SELECT outbox_requeue_failed(''super'')');
DELETE FROM outbox_route WHERE name = 'super';

\echo requeue: by GRANT and membership, as the owner
CREATE TABLE app.acted (who text, session_path text);
GRANT INSERT ON app.acted TO PUBLIC;
CREATE FUNCTION app.note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO app.acted VALUES (current_user, current_setting('search_path'));
    RETURN NEW;
END $$;
CREATE TRIGGER note BEFORE UPDATE ON app.outbox FOR EACH ROW EXECUTE FUNCTION app.note();
INSERT INTO app.outbox (id, outbox_route, event_id, event_type, occurred_at, payload, status, created_at)
    VALUES (gen_random_uuid(), 'r', gen_random_uuid(), 't', now(), '{}', 'failed', now());
SET ROLE regress_outbox_member;
SELECT attempt('SELECT outbox_requeue_failed(''r'')');
RESET ROLE;
GRANT EXECUTE ON FUNCTION outbox_requeue_failed TO regress_outbox_member, regress_outbox_admin;
SET ROLE regress_outbox_admin;
SELECT attempt('SELECT outbox_requeue_failed(''r'')');
SET ROLE regress_outbox_member;
SELECT outbox_requeue_failed('r');
SELECT current_user;
RESET ROLE;
SELECT * FROM app.acted;
\echo code of the owner can not become somebody else
CREATE OR REPLACE FUNCTION app.note() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    RESET ROLE;
    RETURN NEW;
END $$;
ALTER TABLE app.outbox DISABLE TRIGGER note;
UPDATE app.outbox SET status = 'failed';
ALTER TABLE app.outbox ENABLE TRIGGER note;
SELECT attempt('SELECT outbox_requeue_failed(''r'')');

\echo probes with the rights of the caller on the table
SET ROLE regress_outbox_member;
SELECT outbox_depth('r');
RESET ROLE;
GRANT SELECT ON app.outbox TO regress_outbox_nobody;
SET ROLE regress_outbox_nobody;
SELECT outbox_depth('r'), outbox_has_undrained('r');
RESET ROLE;

\echo who sees which routes
INSERT INTO outbox_route (name, relation, url, enabled) VALUES ('own', 'app.own', 'http://127.0.0.1:9/', false);
SET ROLE regress_outbox_member;
SELECT route FROM outbox_stat_route ORDER BY 1;
SET ROLE regress_outbox_monitor;
SELECT route FROM outbox_stat_route ORDER BY 1;
RESET ROLE;

DROP FUNCTION attempt;
DROP EXTENSION outbox_relay;
DROP SCHEMA app CASCADE;
DROP ROLE regress_outbox_nobody, regress_outbox_member, regress_outbox_owner, regress_outbox_admin,
    regress_outbox_monitor, regress_outbox_super;
