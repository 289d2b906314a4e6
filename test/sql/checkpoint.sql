-- The checkpoint of the hybrid logical clock: what advances it, and when.
\set VERBOSITY terse
CREATE EXTENSION outbox_relay;
CREATE SCHEMA app;
SELECT outbox_ddl('app.outbox', hlc => true) \gexec
INSERT INTO outbox_route (name, relation, url, enabled, hlc_ordering)
    VALUES ('orders', 'app.outbox', 'http://127.0.0.1:9/', false, true);
CREATE FUNCTION attempt(sql text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE detail text; hint text; result text;
BEGIN
    EXECUTE sql INTO result;
    RETURN 'no error: ' || coalesce(result, 'NULL');
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
    RETURN concat_ws(E'\n  ', SQLSTATE || ' ' || SQLERRM, nullif(detail, ''), nullif(hint, ''));
END $$;
\set stage 'SELECT outbox_stage(''orders'', ''t'', ''{}'') IS NOT NULL AS staged'

\echo none set: staging needs no table (CKP-09), nothing to load (CKP-14)
:stage;
SELECT hlc_checkpoint_load();
SELECT attempt('SELECT hlc_checkpoint_advance(1)');

\echo what can not be a checkpoint, and staging says so (CKP-17)
CREATE TABLE app.no_key (node_key text NOT NULL, hlc bigint NOT NULL);
CREATE TABLE app.wide_key (node_key text, tenant_id uuid, hlc bigint NOT NULL, PRIMARY KEY (node_key, tenant_id));
CREATE TABLE app.some_keys (node_key text, hlc bigint NOT NULL);
CREATE UNIQUE INDEX ON app.some_keys (node_key) WHERE node_key <> 'x';
CREATE TABLE app.late_key (node_key text UNIQUE DEFERRABLE, hlc bigint NOT NULL);
CREATE TABLE app.no_hlc (node_key text PRIMARY KEY);
CREATE TABLE app.numeric_hlc (node_key text PRIMARY KEY, hlc numeric);
CREATE TABLE app.more (node_key text PRIMARY KEY, hlc bigint, tenant_id uuid NOT NULL);
CREATE UNLOGGED TABLE app.unlogged (node_key text PRIMARY KEY, hlc bigint);
CREATE TABLE app.parted (node_key text PRIMARY KEY, hlc bigint) PARTITION BY HASH (node_key);
CREATE VIEW app.view AS SELECT 'default'::text AS node_key, 1::bigint AS hlc;
CREATE FUNCTION try_checkpoint(name text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
    PERFORM set_config('outbox_relay.hlc_checkpoint', name, true);
    RETURN split_part(attempt('SELECT outbox_stage(''orders'', ''t'', ''{}'')'), E'\n', 1);
END $$;
SELECT try_checkpoint(name) FROM unnest(ARRAY['app.none', 'nowhere.none', 'a.b.c', 'app."unclosed', 'app.no_key',
    'app.wide_key', 'app.some_keys', 'app.late_key', 'app.no_hlc', 'app.numeric_hlc', 'app.more', 'app.unlogged',
    'app.parted', 'app.view']) name;
SET outbox_relay.hlc_checkpoint = 'unqualified';
SET outbox_relay.node_key = '';
BEGIN;
SET LOCAL outbox_relay.hlc_checkpoint = 'app.none';
SELECT attempt('SELECT hlc_now()');
ROLLBACK;
SELECT attempt('SELECT hlc_now()') ~ 'no error' AS unset_again;

\echo load and advance (CKP-01 to CKP-03, CKP-06)
CREATE TABLE app.checkpoint (node_key text PRIMARY KEY, hlc bigint NOT NULL);
SET outbox_relay.hlc_checkpoint = 'app.checkpoint';
SELECT hlc_checkpoint_load();
SELECT hlc_checkpoint_advance(hlc_pack(9000, 3)), hlc_checkpoint_advance(hlc_pack(5000, 0)),
       hlc_checkpoint_advance(hlc_pack(9000, 3));
SELECT hlc_checkpoint_load() = hlc_pack(9000, 3) AS kept;
SELECT hlc_checkpoint_advance(hlc_pack(1000, 0), 'a'), hlc_checkpoint_advance(hlc_pack(10000, 9), 'b');
SELECT node_key, hlc_encode(hlc) FROM app.checkpoint ORDER BY 1;
SELECT hlc_checkpoint_load() = hlc_pack(10000, 9) AS over_all_keys;
SELECT attempt('SELECT hlc_checkpoint_advance(NULL)');
SELECT attempt('SELECT hlc_checkpoint_advance(-1)');
SELECT attempt('SELECT hlc_checkpoint_advance(1, '''')');
BEGIN;
SELECT hlc_checkpoint_advance(hlc_pack(20000, 0), 'b');
ROLLBACK;
SELECT hlc_checkpoint_load() = hlc_pack(10000, 9) AS rolled_back;

CREATE VIEW app.covered AS
    SELECT (SELECT max(o.hlc) FROM app.outbox o) = c.hlc AS equal FROM app.checkpoint c WHERE node_key = 'default';

\echo commits with the rows, and equals their maximum (CKP-04, CKP-07)
:stage;
TABLE app.covered;
BEGIN;
:stage;
:stage;
COMMIT;
TABLE app.covered;
SELECT outbox_stage_many('orders', '[{"event_type":"a","payload":1},{"event_type":"b","payload":2}]');
TABLE app.covered;

\echo rolls back with them, also to a savepoint (CKP-05); staging nothing writes nothing (CKP-08)
SELECT xmin AS before FROM app.checkpoint WHERE node_key = 'default' \gset
BEGIN;
:stage;
ROLLBACK;
BEGIN;
SELECT count(*) > 0 AS rows FROM app.outbox;
COMMIT;
BEGIN;
SAVEPOINT a;
:stage;
SAVEPOINT b;
:stage;
RELEASE b;
ROLLBACK TO a;
COMMIT;
SELECT xmin = :'before' AS untouched FROM app.checkpoint WHERE node_key = 'default';
BEGIN;
:stage;
SAVEPOINT a;
:stage;
ROLLBACK TO a;
SAVEPOINT c;
:stage;
SAVEPOINT d;
:stage;
ROLLBACK TO d;
RELEASE c;
COMMIT;
TABLE app.covered;
DO $$
BEGIN
    FOR i IN 1..20 LOOP
        BEGIN
            PERFORM outbox_stage('orders', 't', '{}');
            IF i % 3 = 2 THEN
                RAISE EXCEPTION 'undone';
            END IF;
        EXCEPTION WHEN raise_exception THEN
            NULL;
        END;
    END LOOP;
END $$;
TABLE app.covered;

\echo procedures that commit, WITH HOLD, several statements in a string, PREPARE
CREATE PROCEDURE app.work() LANGUAGE plpgsql AS $$
BEGIN
    PERFORM outbox_stage('orders', 't', '{}');
    COMMIT;
    PERFORM outbox_stage('orders', 't', '{}');
    ROLLBACK;
    PERFORM outbox_stage('orders', 't', '{}');
END $$;
CALL app.work();
TABLE app.covered;
BEGIN;
DECLARE held CURSOR WITH HOLD FOR SELECT outbox_stage('orders', 't', '{}') IS NOT NULL AS staged FROM generate_series(1, 3);
COMMIT;
FETCH ALL FROM held;
CLOSE held;
TABLE app.covered;
SELECT outbox_stage('orders', 't', '{}') IS NOT NULL AS staged\; SELECT outbox_stage('orders', 't', '{}') IS NOT NULL AS staged;
TABLE app.covered;
BEGIN;
:stage;
PREPARE TRANSACTION 'regress_held';
COMMIT PREPARED 'regress_held';
TABLE app.covered;

\echo read-only transactions stamp without a mark; one that became read-only after it staged is covered
SELECT xmin AS before FROM app.checkpoint WHERE node_key = 'default' \gset
BEGIN READ ONLY;
SELECT hlc_now() > 0 AS stamped;
COMMIT;
SET default_transaction_read_only = on;
SELECT hlc_now() > 0 AS stamped;
RESET default_transaction_read_only;
SELECT xmin = :'before' AS untouched FROM app.checkpoint WHERE node_key = 'default';
BEGIN;
:stage;
SET TRANSACTION READ ONLY;
COMMIT;
TABLE app.covered;

\echo every isolation level, deferred triggers that stage
BEGIN ISOLATION LEVEL REPEATABLE READ;
:stage;
COMMIT;
BEGIN ISOLATION LEVEL SERIALIZABLE;
:stage;
COMMIT;
TABLE app.covered;
CREATE TABLE app.orders (id int);
CREATE FUNCTION app.stage_order() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    PERFORM outbox_stage('orders', 'order.placed', to_jsonb(NEW));
    RETURN NULL;
END $$;
CREATE CONSTRAINT TRIGGER late AFTER INSERT ON app.orders DEFERRABLE INITIALLY DEFERRED
    FOR EACH ROW EXECUTE FUNCTION app.stage_order();
BEGIN;
INSERT INTO app.orders VALUES (1), (2);
COMMIT;
TABLE app.covered;

\echo a key for each session
SET outbox_relay.node_key = 'Node 2';
:stage;
SELECT c.hlc = (SELECT max(hlc) FROM app.outbox) AS equal FROM app.checkpoint c WHERE node_key = 'Node 2';
RESET outbox_relay.node_key;

\echo the rights of the table owner, not of the stager
CREATE ROLE regress_hlc_owner;
CREATE ROLE regress_hlc_stager;
CREATE SCHEMA marks AUTHORIZATION regress_hlc_owner;
SET ROLE regress_hlc_owner;
CREATE TABLE marks.checkpoint (node_key text PRIMARY KEY, hlc bigint NOT NULL, by name DEFAULT current_user);
ALTER TABLE marks.checkpoint ENABLE ROW LEVEL SECURITY;
RESET ROLE;
GRANT USAGE ON SCHEMA app TO regress_hlc_stager;
GRANT INSERT ON app.outbox TO regress_hlc_stager;
SET outbox_relay.hlc_checkpoint = 'marks.checkpoint';
SET ROLE regress_hlc_stager;
:stage;
SELECT split_part(attempt('SELECT hlc_checkpoint_load()'), E'\n', 1) AS load,
       split_part(attempt('SELECT hlc_checkpoint_advance(1)'), E'\n', 1) AS advance;
RESET ROLE;
SELECT c.hlc = (SELECT max(hlc) FROM app.outbox) AS equal, by FROM marks.checkpoint c;

\echo what swallows the mark fails the commit
CREATE FUNCTION marks.swallow() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;
CREATE FUNCTION marks.lower() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN NEW.hlc := 5; RETURN NEW; END $$;
CREATE TRIGGER swallow BEFORE INSERT ON marks.checkpoint FOR EACH ROW EXECUTE FUNCTION marks.swallow();
SET outbox_relay.node_key = 'other';
:stage;
DROP TRIGGER swallow ON marks.checkpoint;
CREATE TRIGGER lower BEFORE INSERT ON marks.checkpoint FOR EACH ROW EXECUTE FUNCTION marks.lower();
:stage;
DROP TRIGGER lower ON marks.checkpoint;
:stage;
SELECT node_key FROM marks.checkpoint ORDER BY hlc;
RESET outbox_relay.node_key;

\echo a mark that can not be followed is an error, one far ahead a warning (T-17)
SET outbox_relay.hlc_checkpoint = 'app.checkpoint';
UPDATE app.checkpoint SET hlc = -5 WHERE node_key = 'a';
\c
\set VERBOSITY terse
SET outbox_relay.hlc_checkpoint = 'app.checkpoint';
:stage;
UPDATE app.checkpoint SET hlc = 9223372036854775807 WHERE node_key = 'a';
:stage;
SELECT hlc_last() < 9223372036854775807 AS clock_is_well;
DELETE FROM app.checkpoint WHERE node_key = 'a';
:stage;
TABLE app.covered;

\echo a table that is dropped, or swapped under its name, is noticed
ALTER TABLE app.checkpoint RENAME TO old_checkpoint;
:stage;
CREATE TABLE app.checkpoint (node_key text PRIMARY KEY, hlc bigint NOT NULL);
:stage;
SELECT c.hlc = (SELECT max(hlc) FROM app.outbox) AS equal FROM app.checkpoint c;
DROP TABLE app.checkpoint CASCADE;
BEGIN;
SET LOCAL outbox_relay.hlc_checkpoint = '';
:stage;
SET LOCAL outbox_relay.hlc_checkpoint = 'app.checkpoint';
COMMIT;

DROP SCHEMA app, marks CASCADE;
DROP EXTENSION outbox_relay;
DROP ROLE regress_hlc_owner, regress_hlc_stager;
DROP FUNCTION attempt, try_checkpoint;
