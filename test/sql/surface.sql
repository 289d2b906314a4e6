-- The surface: every function, column, view, trigger and parameter, each with its comment; where the
-- extension can live and what it refuses to adopt.
SET client_min_messages = warning;
CREATE EXTENSION outbox_relay;
\pset format unaligned
\pset tuples_only on

CREATE TEMP VIEW member AS
    SELECT d.classid, d.objid FROM pg_depend d
    WHERE d.refclassid = 'pg_extension'::regclass AND d.deptype = 'e'
      AND d.refobjid = (SELECT oid FROM pg_extension WHERE extname = 'outbox_relay');

\echo functions
SELECT p.proname || '(' || pg_get_function_arguments(p.oid) || ') ' || pg_get_function_result(p.oid) || ' '
       || p.provolatile::text || p.proparallel::text || CASE WHEN p.proisstrict THEN ' strict' ELSE '' END
       || CASE WHEN p.prosecdef THEN ' security definer' ELSE '' END
FROM member m JOIN pg_proc p ON m.classid = 'pg_proc'::regclass AND m.objid = p.oid ORDER BY 1;

\echo columns
SELECT c.relname || '.' || a.attname || ' ' || format_type(a.atttypid, a.atttypmod)
       || CASE WHEN a.attnotnull THEN ' not null' ELSE '' END
       || COALESCE(' default ' || pg_get_expr(d.adbin, d.adrelid), '')
FROM member m JOIN pg_class c ON m.classid = 'pg_class'::regclass AND m.objid = c.oid
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0 AND NOT a.attisdropped
LEFT JOIN pg_attrdef d ON d.adrelid = c.oid AND d.adnum = a.attnum
ORDER BY c.relname, a.attnum;

\echo the type of a message
SELECT attname || ' ' || format_type(atttypid, atttypmod) FROM pg_attribute
WHERE attrelid = 'outbox_message'::regclass AND attnum > 0 AND NOT attisdropped AND col_description(attrelid, attnum) IS NOT NULL
ORDER BY attnum;

\echo triggers, all of them always
SELECT tgname || ' ' || tgenabled::text FROM pg_trigger WHERE tgrelid = 'outbox_route'::regclass ORDER BY 1;

\echo parameters
SELECT name || ' ' || context || ' ' || COALESCE(boot_val, '') || COALESCE(unit, '')
       || COALESCE(' ' || min_val || '..' || max_val, '')
FROM pg_settings WHERE name LIKE 'outbox\_relay.%' AND name NOT IN ('outbox_relay.max_lanes', 'outbox_relay.fault_point')
ORDER BY name COLLATE "C";

\echo without a comment
SELECT pg_describe_object(m.classid, m.objid, 0) FROM member m
WHERE obj_description(m.objid, (SELECT relname FROM pg_class WHERE oid = m.classid)::name) IS NULL
  AND m.classid <> 'pg_type'::regclass;
SELECT c.relname || '.' || a.attname
FROM member m JOIN pg_class c ON m.classid = 'pg_class'::regclass AND m.objid = c.oid
JOIN pg_attribute a ON a.attrelid = c.oid AND a.attnum > 0
WHERE col_description(c.oid, a.attnum) IS NULL;
SELECT tgname FROM pg_trigger
WHERE tgrelid = 'outbox_route'::regclass AND obj_description(oid, 'pg_trigger') IS NULL;
SELECT name FROM pg_settings WHERE name LIKE 'outbox\_relay.%' AND short_desc = '';

\echo in dumps
SELECT extconfig::regclass[] FROM pg_extension WHERE extname = 'outbox_relay';

\echo not relocatable
ALTER EXTENSION outbox_relay SET SCHEMA pg_temp;
DROP VIEW member;
DROP EXTENSION outbox_relay;

\echo in a schema that needs quotes
CREATE SCHEMA "Some $chema";
CREATE EXTENSION outbox_relay SCHEMA "Some $chema";
SELECT count(*) FROM "Some $chema".outbox_stat_route;
SELECT count(*) FROM "Some $chema".outbox_route_effective;
SELECT "Some $chema".outbox_depth('nobody');
DROP EXTENSION outbox_relay;
DROP SCHEMA "Some $chema";

\echo what lies in the way is not adopted
CREATE SCHEMA planted;
-- 18 adds the statement of the script.
\set SHOW_CONTEXT never
CREATE TABLE planted.outbox_route (name text);
CREATE EXTENSION outbox_relay SCHEMA planted;
DROP TABLE planted.outbox_route;
CREATE FUNCTION planted.outbox_depth(route text, tenant_id uuid) RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE EXTENSION outbox_relay SCHEMA planted;
DROP FUNCTION planted.outbox_depth;
CREATE VIEW planted.outbox_stat_route AS SELECT 1;
CREATE EXTENSION outbox_relay SCHEMA planted;
DROP SCHEMA planted CASCADE;
