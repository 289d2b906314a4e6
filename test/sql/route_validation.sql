-- Bad routes: each refused with SQLSTATE, DETAIL and HINT, nothing written.
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

-- The same insert with one column more.
CREATE FUNCTION try_column(col text, val text) RETURNS SETOF text LANGUAGE plpgsql AS $$
BEGIN
    RETURN NEXT col || ' = ' || val || E'\n  ' || attempt(format(
        'INSERT INTO outbox_route (name, relation, url, enabled, %I) VALUES (''r'', ''app.outbox'', ''http://127.0.0.1:9/'', false, %s)', col, val));
    DELETE FROM outbox_route;
END $$;
CREATE FUNCTION try_row(name text, relation text, url text) RETURNS SETOF text LANGUAGE sql AS $$
    -- The number of a session's temporary schema varies.
    SELECT regexp_replace(attempt(format('INSERT INTO outbox_route (name, relation, url, enabled) VALUES (%L, %L, %L, false)',
        name, relation, url)), 'pg_temp_\d+', 'pg_temp_N')
$$;

\echo names
SELECT try_row(n, 'app.outbox', 'http://127.0.0.1:9/')
    FROM unnest(ARRAY[NULL, '', repeat('n', 64), E'a\nb', E'a\x7fb']) n;

\echo relations
CREATE VIEW app.a_view AS SELECT * FROM app.outbox;
CREATE MATERIALIZED VIEW app.a_matview AS SELECT * FROM app.outbox;
CREATE TABLE app.partitioned (LIKE app.outbox) PARTITION BY LIST (outbox_route);
CREATE TEMP TABLE a_temp (LIKE app.outbox);
CREATE SEQUENCE app.a_sequence;
CREATE FOREIGN DATA WRAPPER nothing;
CREATE SERVER nowhere FOREIGN DATA WRAPPER nothing;
CREATE FOREIGN TABLE app.a_foreign (id uuid) SERVER nowhere;
SELECT try_row('r', n, 'http://127.0.0.1:9/')
    FROM unnest(ARRAY[NULL, '', 'outbox', 'a.b.c', 'app.', '"app.outbox', 'app.missing', 'missing.outbox', 'app.a_view',
        'app.a_matview', 'app.partitioned', 'pg_temp.a_temp', 'app.a_sequence', 'app.outbox_claim_idx',
        'app.a_foreign']) n;

\echo urls
SELECT u || E'\n  ' || try_row('r', 'app.outbox', u)
    FROM unnest(ARRAY['', 'nonsense', 'ftp://example.com/', 'http://', 'http://user:secret@example.com/',
        'http://example.com/{nothing}', 'http://example.com/{event_type', 'http://exa mple.com/']) u;

\echo target functions: exactly one of url and target_function, and nothing that belongs to a request
CREATE FUNCTION app.deliver(event outbox_message) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION app.deliver(jsonb) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION app.counts(event outbox_message) RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION app.many(event outbox_message) RETURNS SETOF void LANGUAGE sql AS '';
CREATE PROCEDURE app.proc(event outbox_message) LANGUAGE sql AS '';
CREATE FUNCTION app."Quoted ""F"""(event outbox_message) RETURNS void LANGUAGE sql AS '';
CREATE FUNCTION try_target(target text, col text DEFAULT 'enabled', val text DEFAULT 'false') RETURNS SETOF text LANGUAGE plpgsql AS $$
BEGIN
    RETURN NEXT COALESCE(target, 'NULL') || ', ' || col || ' = ' || val || E'\n  ' || attempt(format(
        'INSERT INTO outbox_route (name, relation, target_function, %I) VALUES (''r'', ''app.outbox'', %L, %s)', col, target, val));
    DELETE FROM outbox_route;
END $$;
SELECT try_target(f) FROM unnest(ARRAY['app.deliver', 'app."Quoted ""F"""', NULL, '', 'deliver', 'app.deliver(outbox_message)', 'a.b.c',
    'app.missing', 'missing.deliver', 'app.counts', 'app.many', 'app.proc', 'pg_catalog.now']) f;
SELECT try_target('app.deliver', c, v) FROM (VALUES ('url', '''http://127.0.0.1:9/'''), ('method', '''PUT'''), ('envelope', '''{forze}'''),
    ('source', '''/a'''), ('headers', '''{"X-A": "b"}'''), ('fail_statuses', '''{404}'''), ('ca_file', '''/ca.pem'''),
    ('request_timeout', '''5 s'''), ('connect_timeout', '''1 s'''), ('concurrency', '1'), ('max_attempts', '1'), ('ordering', '''none'''),
    ('pass_deadline', '''1 s''')) v (c, v);
\echo what a restore brings is judged for form alone, and a function may be changed later only to one that is there
SELECT attempt('INSERT INTO outbox_route (name, relation, target_function, owner, bound_to) VALUES (''r'', ''app.outbox'', ''app.missing'', current_user, ''1/2/'')');
SELECT attempt('UPDATE outbox_route SET target_function = ''app.other''');
SELECT attempt('UPDATE outbox_route SET target_function = NULL, url = ''http://127.0.0.1:9/''');
SELECT attempt('UPDATE outbox_route SET target_function = ''app.deliver'', url = NULL');
SELECT setting, value, source FROM outbox_route_effective WHERE setting IN ('url', 'target_function');
DELETE FROM outbox_route;
DROP FUNCTION try_target, app.deliver(outbox_message), app.counts, app.many, app."Quoted ""F""";
DROP PROCEDURE app.proc;

\echo words
SELECT try_column('method', v) FROM unnest(ARRAY['''GET''', '''''', 'NULL']) v;
SELECT try_column('storage', v) FROM unnest(ARRAY['''retain''', '''keep''', 'NULL']) v;
SELECT try_column('ordering', v) FROM unnest(ARRAY['''fifo''', '''strict''', '''Key''', 'NULL']) v;
SELECT try_column('envelope', v)
    FROM unnest(ARRAY['''{kafka}''', '''{forze,forze}''', '''{NULL}''', 'NULL']) v;
SELECT try_column('source', v) FROM unnest(ARRAY['''''', '''/a b''', 'E''/a\nb''']) v;

\echo headers
SELECT try_column('headers', v)
    FROM unnest(ARRAY['NULL', '''[]''', '''"x"''', '''{"X-A": 1}''', '''{"X-A": null}''', '''{"X-A": {"b": "c"}}''',
        '''{"": "x"}''', '''{"X A": "x"}''', '''{"X:A": "x"}''', '''{"Content-Type": "text/plain"}''',
        '''{"CE-Id": "x"}''', '''{"forze_key": "x"}''', '''{"Host": "x"}''', '''{"X-A": "x", "x-a": "y"}''',
        '''{"X-A": "a\r\nB: c"}''', '''{"X-A": "caf\u007f"}''', '''{"X-A": "{secret:token}"}''']) v;

\echo numbers
SELECT try_column('fail_statuses', v)
    FROM unnest(ARRAY['NULL', '''{200}''', '''{404,299}''', '''{99}''', '''{600}''', '''{-1}''', '''{NULL}''']) v;
SELECT try_column('max_payload_bytes', v) FROM unnest(ARRAY['NULL', '0', '-1', '268435457']) v;
SELECT try_column(c, v) FROM unnest(ARRAY['max_claim_rows', 'concurrency']) c, unnest(ARRAY['0', '-1', '100001']) v;
SELECT try_column(c, '-1') FROM unnest(ARRAY['max_attempts', 'breaker_threshold']) c;

\echo durations
SELECT try_column(c, v)
    FROM unnest(ARRAY['interval', 'pass_deadline', 'pass_statement_timeout', 'connect_timeout', 'retry_base_delay',
        'retry_max_backoff']) c, unnest(ARRAY['''0''', '''-1 s''']) v;
SELECT try_column(c, v) FROM unnest(ARRAY['pass_deadline', 'pass_statement_timeout', 'request_timeout', 'connect_timeout']) c,
    unnest(ARRAY['''25 h''']) v;
\echo pauses may be longer
SET outbox_relay.retry_max_backoff = '24d';
SELECT try_column(c, v) FROM unnest(ARRAY['interval', 'retry_base_delay', 'retry_max_backoff', 'reclaim_stale_after']) c,
    unnest(ARRAY['''24 days''', '''24 days 1 ms''']) v;
RESET outbox_relay.retry_max_backoff;
SELECT try_column(c, v)
    FROM unnest(ARRAY['request_timeout', 'reclaim_stale_after']) c, unnest(ARRAY['''-1 us''']) v;
SELECT try_column('interval', v) FROM unnest(ARRAY['''1 month''', '''-1 year''', '''2147483647 days''']) v;

\echo contradictions, also with what the configuration says
SELECT try_column('retry_base_delay', '''6 min''');
SELECT try_column('retry_max_backoff', '''500 ms''');
\echo of the two limits of a request the shorter one holds
SELECT try_column('request_timeout', '''1 s''');
SELECT try_column('connect_timeout', '''1 h''');
SELECT attempt('INSERT INTO outbox_route (name, relation, url, connect_timeout, request_timeout) VALUES (''r'', ''app.outbox'', ''http://127.0.0.1:9/'', ''3 s'', ''1 s'')');
SET outbox_relay.request_timeout = '1 s';
SELECT try_column('connect_timeout', '''3 s''');
RESET outbox_relay.request_timeout;

\echo others
SELECT try_column('ca_file', v) FROM unnest(ARRAY['''''', '''ca.pem''', 'E''/a\nb''']) v;
SELECT try_column('bound_to', v) FROM unnest(ARRAY['''''', 'E''a\nb''']) v;
SELECT try_column('owner', '''regress_missing_role''');

\echo columns of the table
CREATE FUNCTION try_table(change text) RETURNS SETOF text LANGUAGE plpgsql AS $$
BEGIN
    CREATE TABLE app.changed (LIKE app.outbox INCLUDING ALL);
    EXECUTE 'ALTER TABLE app.changed ' || change;
    RETURN QUERY SELECT change || E'\n  ' || try_row('r', 'app.changed', 'http://127.0.0.1:9/');
    DELETE FROM outbox_route;
    DROP TABLE app.changed;
END $$;
SELECT try_table('DROP COLUMN ' || c)
    FROM unnest(ARRAY['id', 'outbox_route', 'event_id', 'event_type', 'tenant_id', 'execution_id', 'correlation_id',
        'causation_id', 'occurred_at', 'payload', 'status', 'created_at', 'published_at', 'processing_at', 'last_error',
        'attempts', 'available_at', 'ordering_key']) c;
SELECT try_table('ALTER ' || c) FROM unnest(ARRAY[
    'available_at TYPE timestamp', 'attempts TYPE smallint', 'attempts TYPE bigint', 'status TYPE varchar(6)',
    'status TYPE varchar(7)', 'status TYPE char(10)', 'event_id TYPE text', 'payload TYPE json USING payload::json',
    'event_type TYPE varchar(50)', 'processing_at TYPE date', 'tenant_id TYPE text']) c;
SET client_min_messages = notice;
SELECT try_table('ADD extra int NOT NULL');
SELECT try_table('ADD extra int NOT NULL DEFAULT 1');
SET client_min_messages = warning;
SELECT try_column('propagate_trace', 'true');
ALTER TABLE app.outbox ADD traceparent int;
SELECT try_column('propagate_trace', 'true');
DROP MATERIALIZED VIEW app.a_matview;
DROP VIEW app.a_view;
ALTER TABLE app.outbox DROP processing_at, DROP published_at;
SELECT try_column('reclaim_stale_after', '''1 min''');
SELECT try_column('reclaim_stale_after', '''0''');

\echo nothing of all that is there
SELECT count(*) FROM outbox_route;

DROP FUNCTION attempt, try_column, try_row, try_table;
DROP EXTENSION outbox_relay;
DROP SERVER nowhere CASCADE;
DROP FOREIGN DATA WRAPPER nothing;
DROP SCHEMA app CASCADE;
