-- outbox_ddl: statements for \gexec, and a table made of them that a route accepts.
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

SELECT outbox_ddl('app.outbox');
SELECT outbox_ddl('app.outbox', hlc => true, trace => true, delivery_log => 'app.outbox_delivered');

\echo nothing was created
SELECT count(*) FROM pg_class WHERE relnamespace = 'app'::regnamespace;

SELECT outbox_ddl('app.outbox', hlc => true, trace => true, delivery_log => 'app.outbox_delivered') \gexec
SELECT indexdef FROM pg_indexes WHERE schemaname = 'app' ORDER BY indexname COLLATE "C";
INSERT INTO app.outbox_delivered VALUES (gen_random_uuid(), 'r', gen_random_uuid(), NULL, now());
SELECT tableoid::regclass FROM app.outbox_delivered;
INSERT INTO outbox_route (name, relation, url, propagate_trace, enabled)
    VALUES ('orders', 'app.outbox', 'http://127.0.0.1:9/', true, false) RETURNING name, relation;

\echo hostile names
CREATE SCHEMA "Sch""ema";
SELECT outbox_ddl('"Sch""ema"."we""ird; DROP TABLE app.outbox;--"') \gexec
SELECT indexname FROM pg_indexes WHERE schemaname = 'Sch"ema' ORDER BY indexname COLLATE "C";
INSERT INTO outbox_route (name, relation, url, enabled)
    VALUES ('x''); DELETE FROM app.outbox; --%s $1', '"Sch""ema"."we""ird; DROP TABLE app.outbox;--"',
            'http://127.0.0.1:9/', false) RETURNING name;
SELECT outbox_depth(name), outbox_has_undrained(name), outbox_oldest_pending_age(name), outbox_requeue_failed(name)
    FROM outbox_route ORDER BY name;

\echo index names of 63 bytes
SELECT length(substring(s FROM 'INDEX (\S+)')) FROM outbox_ddl('app.' || repeat('t', 63)) s WHERE s LIKE 'CREATE INDEX%';

\echo refused
SELECT attempt(format('SELECT outbox_ddl(%L)', n))
    FROM unnest(ARRAY[NULL, '', 'outbox', 'a.b.c', 'a.', '"a.b', 'app outbox']) n;
SELECT attempt('SELECT outbox_ddl(''app.outbox'', delivery_log => ''log'')');

DROP FUNCTION attempt;
DROP EXTENSION outbox_relay;
DROP SCHEMA app CASCADE;
DROP SCHEMA "Sch""ema" CASCADE;
