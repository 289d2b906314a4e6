-- Depth, undrained, age, requeue: what they count, as whom, and what they touch.
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
INSERT INTO outbox_route (name, relation, url, enabled)
    SELECT n, 'app.outbox', 'http://127.0.0.1:9/', false FROM unnest(ARRAY['r', 's', 'full']) n;
CREATE FUNCTION put(route text, new_status text, age interval, parked interval DEFAULT NULL, tenant int DEFAULT NULL)
    RETURNS uuid LANGUAGE sql AS $$
    INSERT INTO app.outbox (id, outbox_route, event_id, event_type, tenant_id, occurred_at, payload, status,
                            created_at, available_at, attempts, last_error)
    VALUES (gen_random_uuid(), route, gen_random_uuid(), 't', lpad(tenant::text, 32, '0')::uuid, now(), '{}', new_status,
            now() - age, now() + parked, 3, CASE WHEN new_status = 'failed' THEN '500' END)
    RETURNING event_id
$$;
CREATE FUNCTION t(n int) RETURNS uuid LANGUAGE sql AS $$ SELECT lpad(n::text, 32, '0')::uuid $$;

\echo an empty route
SELECT outbox_depth('r'), outbox_has_undrained('r'), outbox_oldest_pending_age('r');

\echo only published and failed rows: drained
SELECT count(put('r', 'published', '1 day')), count(put('r', 'failed', '1 day'));
SELECT outbox_depth('r'), outbox_has_undrained('r'), outbox_oldest_pending_age('r');

\echo processing is undrained and not pending; a parked retry is pending
SELECT count(put('r', 'processing', '1 hour', NULL, 1));
SELECT outbox_depth('r'), outbox_has_undrained('r'), outbox_oldest_pending_age('r');
SELECT count(put('r', 'pending', '90 s', '1 hour', 1));
SELECT * FROM outbox_depth('r');
SELECT outbox_oldest_pending_age('r') BETWEEN '90 s' AND '100 s';
SELECT count(put('r', 'pending', '30 s', NULL, 2)), count(put('r', 'pending', '120 s', NULL, 2));
SELECT outbox_oldest_pending_age('r') BETWEEN '120 s' AND '130 s';

\echo by tenant, and by route
SELECT outbox_depth('r', t(1)), outbox_depth('r', tenant_id => t(2)), outbox_depth('r', t(3)), outbox_depth('s');
SELECT outbox_has_undrained('r', t(1)), outbox_has_undrained('r', t(3)), outbox_has_undrained('s');
SELECT outbox_oldest_pending_age('r', t(1)) BETWEEN '90 s' AND '100 s', outbox_oldest_pending_age('r', t(3));

\echo odd times
SELECT count(put('s', 'pending', '-1 hour'));
SELECT outbox_oldest_pending_age('s');
UPDATE app.outbox SET created_at = '-infinity' WHERE outbox_route = 's';
SELECT outbox_oldest_pending_age('s');
DELETE FROM app.outbox WHERE outbox_route = 's';

\echo read only, and nothing changes
CREATE TEMP TABLE before AS SELECT ctid AS at, xmax::text AS locked FROM app.outbox;
BEGIN READ ONLY;
SELECT outbox_depth('r'), outbox_has_undrained('r'), outbox_oldest_pending_age('r') IS NOT NULL;
SELECT attempt('SELECT outbox_requeue_failed(''r'')');
COMMIT;
SELECT ctid, xmax::text FROM app.outbox EXCEPT SELECT * FROM before;

\echo ten thousand published rows and stale statistics: never read
INSERT INTO app.outbox (id, outbox_route, event_id, event_type, occurred_at, payload, status, created_at)
    SELECT gen_random_uuid(), 'full', gen_random_uuid(), 't', now(), '{}', 'published', now() FROM generate_series(1, 10000);
ANALYZE app.outbox;
SELECT count(put('full', 'pending', '1 s')) FROM generate_series(1, 100);
SELECT pg_stat_force_next_flush();
BEGIN;
SELECT outbox_has_undrained('full');
SELECT seq_scan, COALESCE(idx_tup_fetch, 0) <= 1 FROM pg_stat_xact_user_tables WHERE relid = 'app.outbox'::regclass;
SELECT outbox_depth('full'), outbox_oldest_pending_age('full') IS NOT NULL;
SELECT seq_scan, COALESCE(idx_tup_fetch, 0) <= 300 FROM pg_stat_xact_user_tables WHERE relid = 'app.outbox'::regclass;
COMMIT;

\echo look-alikes in the search path are not called
CREATE SCHEMA evil;
CREATE FUNCTION evil.eq(text, text) RETURNS boolean LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''called''; END';
CREATE OPERATOR evil.= (LEFTARG = text, RIGHTARG = text, FUNCTION = evil.eq);
CREATE FUNCTION evil.count() RETURNS bigint LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''called''; END';
CREATE FUNCTION evil.min(timestamptz) RETURNS timestamptz LANGUAGE plpgsql AS 'BEGIN RAISE EXCEPTION ''called''; END';
SET search_path = evil, pg_catalog, public;
SELECT outbox_depth('r'), outbox_has_undrained('r'), outbox_oldest_pending_age('r') IS NOT NULL;
SELECT outbox_requeue_failed('s');
RESET search_path;

\echo requeue: none, some, of a tenant, all
DELETE FROM app.outbox;
SELECT count(put('r', 'failed', '1 s', '1 hour', n % 2)) FROM generate_series(1, 7) n;
SELECT event_id AS event FROM app.outbox WHERE tenant_id = t(1) LIMIT 1 \gset
SELECT outbox_requeue_failed('r', '{}'), outbox_requeue_failed('s'), outbox_requeue_failed('r', ARRAY[gen_random_uuid()]);
SELECT outbox_requeue_failed('r', ARRAY[:'event', NULL]::uuid[]);
SELECT outbox_requeue_failed('r', tenant_id => t(1));
SELECT status, attempts, last_error, available_at IS NULL, tenant_id = t(1), count(*) FROM app.outbox
    GROUP BY 1, 2, 3, 4, 5 ORDER BY 1, 2, 5;
SELECT outbox_requeue_failed('r');
SELECT outbox_depth('r');
BEGIN;
UPDATE app.outbox SET status = 'failed';
SELECT outbox_requeue_failed('r');
ROLLBACK;
SELECT outbox_depth('r');

\echo on retain storage without the times of before
INSERT INTO outbox_route (name, relation, url, enabled, storage) VALUES ('kept', 'app.outbox', 'http://127.0.0.1:9/', false, 'retain');
SELECT count(put('kept', 'failed', '1 s')), count(put('r', 'failed', '1 s'));
UPDATE app.outbox SET processing_at = now(), published_at = now() WHERE status = 'failed';
SELECT outbox_requeue_failed('kept'), outbox_requeue_failed('r', tenant_id => t(9));
SELECT outbox_route, status, processing_at IS NULL, published_at IS NULL FROM app.outbox WHERE processing_at IS NOT NULL OR outbox_route = 'kept' ORDER BY 1;

\echo errors
SELECT attempt(format('SELECT %s(%L)', f, n))
    FROM unnest(ARRAY['outbox_depth', 'outbox_has_undrained', 'outbox_oldest_pending_age', 'outbox_requeue_failed']) f,
         unnest(ARRAY[NULL, 'unknown']) n;
ALTER TABLE app.outbox RENAME COLUMN available_at TO later;
SELECT attempt('SELECT outbox_depth(''r'')');
DROP TABLE app.outbox;
SELECT attempt('SELECT outbox_depth(''r'')');
CREATE VIEW app.outbox AS SELECT 1;
SELECT attempt('SELECT outbox_has_undrained(''r'')');
SELECT attempt('SELECT outbox_requeue_failed(''r'')');

DROP FUNCTION attempt, put, t;
DROP EXTENSION outbox_relay;
DROP SCHEMA app, evil CASCADE;
