-- The hybrid logical clock: conversions, stamps, merges. The clock is the server's own, so values are compared.
\set VERBOSITY terse
CREATE EXTENSION outbox_relay;
CREATE SCHEMA app;
CREATE FUNCTION attempt(sql text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE detail text; hint text; result text;
BEGIN
    EXECUTE sql INTO result;
    RETURN 'no error: ' || coalesce(result, 'NULL');
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
    RETURN concat_ws(E'\n  ', SQLSTATE || ' ' || SQLERRM, nullif(detail, ''), nullif(hint, ''));
END $$;

\echo parts, packed and back (HLC-01)
SELECT ms, logical, hlc_pack(ms, logical) AS packed, hlc_physical_ms(hlc_pack(ms, logical)) = ms
       AND hlc_logical(hlc_pack(ms, logical)) = logical AS inverts, hlc_encode(hlc_pack(ms, logical)) AS encoded,
       hlc_parse(hlc_encode(hlc_pack(ms, logical))) = hlc_pack(ms, logical) AS parses
    FROM (VALUES (0::bigint, 0), (0, 1), (9000, 7), (1796000000000, 65535), (140737488355327, 65535)) AS v(ms, logical);
SELECT hlc_timestamp(hlc_pack(1796000000123, 4)) AT TIME ZONE 'UTC' AS at,
       hlc_timestamp(hlc_pack(140737488355327, 0)) AT TIME ZONE 'UTC' AS last;

\echo packed and encoded sort alike (HLC-02, HLC-03)
WITH stamps AS (
    SELECT hlc_pack((random() * 10 ^ (n % 14))::bigint, n % 65536) AS s FROM generate_series(1, 5000) n)
SELECT bool_and(by_value = by_text) AND bool_and(by_value = by_parts) AS alike FROM (
    SELECT rank() OVER (ORDER BY s) AS by_value, rank() OVER (ORDER BY hlc_encode(s) COLLATE "C") AS by_text,
           rank() OVER (ORDER BY hlc_physical_ms(s), hlc_logical(s)) AS by_parts FROM stamps) AS r;

\echo what is no stamp (HLC-04, HLC-05)
SELECT attempt(format('SELECT %s', call)) FROM unnest(ARRAY[
    'hlc_pack(-1, 0)', 'hlc_pack(0, -1)', 'hlc_pack(0, 65536)', 'hlc_pack(140737488355328, 0)',
    'hlc_pack(9223372036854775807, 0)', 'hlc_physical_ms(-1)', 'hlc_logical(-9223372036854775808)',
    'hlc_timestamp(-1)', 'hlc_encode(-1)', 'hlc_update(-1)', 'hlc_parse('''')', 'hlc_parse(''123'')',
    'hlc_parse(''000000000009000.0007'')', 'hlc_parse(''000000000009000.65536'')',
    'hlc_parse(''-00000000009000.00007'')', 'hlc_parse(repeat(''9'', 1000))']) AS call;

\echo NULL in, NULL out; volatility
SELECT hlc_pack(NULL, 1) IS NULL AND hlc_encode(NULL) IS NULL AND hlc_parse(NULL) IS NULL AND hlc_update(NULL) IS NULL
       AND hlc_observe(NULL) IS NULL AND hlc_timestamp(NULL) IS NULL AS all_null;
SELECT proname, provolatile, proisstrict, proparallel FROM pg_proc WHERE proname LIKE 'hlc\_%' ORDER BY proname;

\echo stamps rise, close to the wall clock (HLC-06, HLC-09)
SELECT count(DISTINCT s) AS unique, bool_and(s > before) AS rising FROM (
    SELECT s, lag(s, 1, 0::bigint) OVER (ORDER BY n) AS before
        FROM (SELECT n, hlc_now() AS s FROM generate_series(1, 10000) n OFFSET 0) AS a) AS b;
SELECT hlc_last() = hlc_last() AS peek_gives_none,
       hlc_timestamp(hlc_now()) - clock_timestamp() BETWEEN '-10 s' AND '10 s' AS close;

\echo merging (HLC-11, HLC-15): within the drift the next is above it, beyond it nothing changes
SELECT hlc_update(ahead) = ahead + 1 AS above, hlc_last() = ahead + 1 AS kept FROM (
    SELECT hlc_pack(hlc_physical_ms(hlc_now()) + 60000, 7) AS ahead) AS a;
SELECT hlc_observe(hlc_encode(ahead)) = ahead + 1 AS above FROM (
    SELECT hlc_pack(hlc_physical_ms(hlc_last()) + 60000, 7) AS ahead) AS a;
SELECT hlc_now() > hlc_pack(hlc_physical_ms(hlc_last()), 0) AS still_above;
SELECT hlc_last() AS before \gset
SELECT hlc_observe(hlc_encode(hlc_pack((extract(epoch FROM clock_timestamp()) * 1000)::bigint + 301000, 0))) IS NULL AS refused;
SELECT regexp_replace(attempt(format('SELECT hlc_update(%s)',
    hlc_pack((extract(epoch FROM clock_timestamp()) * 1000)::bigint + 301000, 0))), '[0-9]{15}\.[0-9]{5}', 'STAMP');
SELECT hlc_last() = :before AS unchanged;

\echo a header of a stranger changes nothing and is no error (HLC-17)
SELECT header, hlc_observe(header) FROM (VALUES (''), ('x'), ('123'), ('999999999999999.99999'), ('140737488355327.65535'),
    ('-00000000009000.00007'), ('000000000009000.00007 '), ('0000000000090000.00007'), (E'000000000009000\n00007'),
    ('٠٠٠٠٠٠٠٠٠٠٠٩٠٠٠.٠٠٠٠٧')) AS v(header);
SELECT count(hlc_observe(repeat('9', n))) AS merged FROM generate_series(0, 2000) n;
SELECT count(hlc_observe(translate(substr(md5(n::text) || md5((-n)::text), 1, 15 + n % 8), 'abcdef', '.9123'))) AS merged
    FROM generate_series(1, 20000) n;
SELECT hlc_last() = :before AS unchanged;

\echo the drift is a setting (HLC-16)
-- The message of 17 names the unit of the bounds.
\set VERBOSITY sqlstate
SET outbox_relay.hlc_max_drift = '-1s';
\set VERBOSITY terse
SET outbox_relay.hlc_max_drift = '10min';
SELECT hlc_observe(hlc_encode(hlc_pack((extract(epoch FROM clock_timestamp()) * 1000)::bigint + 401000, 0))) IS NOT NULL AS accepted;
RESET outbox_relay.hlc_max_drift;

\echo staged rows of one call ascend in call order (HLC-21, STG-23); off: the column is not written (HLC-22, SCH-08)
SELECT outbox_ddl('app.outbox', hlc => true, trace => true) \gexec
INSERT INTO outbox_route (name, relation, url, enabled, hlc_ordering, propagate_trace) VALUES
    ('both', 'app.outbox', 'http://127.0.0.1:9/', false, true, true),
    ('hlc', 'app.outbox', 'http://127.0.0.1:9/', false, true, false),
    ('trace', 'app.outbox', 'http://127.0.0.1:9/', false, false, true),
    ('neither', 'app.outbox', 'http://127.0.0.1:9/', false, false, false);
SET outbox_relay.traceparent = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01';
SELECT outbox_stage(name, 'one', '{}') IS NOT NULL AS staged FROM outbox_route ORDER BY name;
SELECT outbox_route, hlc IS NOT NULL AS hlc, traceparent FROM app.outbox ORDER BY 1;
SELECT outbox_stage_many(name, '[{"event_type":"a","payload":1},{"event_type":"b","payload":2},{"event_type":"c","payload":3}]')
    FROM outbox_route ORDER BY name;
SELECT outbox_route, string_agg(event_type, '' ORDER BY hlc) AS by_hlc, count(DISTINCT created_at) AS instants,
       min(hlc) > (SELECT max(hlc) FROM app.outbox o WHERE event_type = 'one') AS after_the_first
    FROM app.outbox WHERE event_type <> 'one' AND hlc IS NOT NULL GROUP BY 1 ORDER BY 1;
SELECT outbox_stage_many('hlc', '[]');

\echo without the column (SCH-06)
ALTER TABLE app.outbox DROP COLUMN hlc;
SELECT attempt($$SELECT outbox_stage('hlc', 't', '{}')$$);
SELECT outbox_stage('neither', 't', '{}') IS NOT NULL AS others_go_on;
SELECT attempt($$INSERT INTO outbox_route (name, relation, url, hlc_ordering) VALUES ('more', 'app.outbox', 'http://127.0.0.1:9/', true)$$);
ALTER TABLE app.outbox ADD COLUMN hlc numeric;
SELECT attempt($$INSERT INTO outbox_route (name, relation, url, hlc_ordering) VALUES ('more', 'app.outbox', 'http://127.0.0.1:9/', true)$$);

DROP SCHEMA app CASCADE;
DROP EXTENSION outbox_relay;
DROP FUNCTION attempt;
