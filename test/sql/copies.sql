-- outbox_adopt and outbox_secret: bindings, rights, forms.
\set VERBOSITY terse
CREATE EXTENSION outbox_relay;
CREATE SCHEMA app;
SELECT outbox_ddl('app.outbox') \gexec
CREATE ROLE regress_copies_owner;
CREATE ROLE regress_copies_other;
CREATE ROLE regress_copies_admin;
GRANT regress_copies_owner TO regress_copies_admin;
CREATE FUNCTION attempt(sql text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE detail text; hint text; result text;
BEGIN
    EXECUTE sql INTO result;
    RETURN 'no error: ' || coalesce(result, 'NULL');
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
    RETURN concat_ws(E'\n  ', SQLSTATE || ' ' || SQLERRM, nullif(detail, ''), nullif(hint, ''));
END $$;

\echo routes that come out of a dump keep their binding until they are adopted
INSERT INTO outbox_route (name, relation, url, enabled) VALUES ('here', 'app.outbox', 'http://127.0.0.1:9/', false);
INSERT INTO outbox_route (name, relation, url, enabled, owner, bound_to) VALUES
    ('mine', 'app.outbox', 'http://127.0.0.1:9/', false, 'regress_copies_owner', '1/2/'),
    ('theirs', 'app.outbox', 'http://127.0.0.1:9/', false, 'regress_copies_other', '1/2/'),
    ('nobodys', 'app.outbox', 'http://127.0.0.1:9/', false, 'regress_copies_gone', '1/2/');
SELECT attempt('UPDATE outbox_route SET bound_to = ''x'' WHERE name = ''mine''');
GRANT EXECUTE ON FUNCTION outbox_adopt TO regress_copies_admin;
SET ROLE regress_copies_other;
SELECT attempt('SELECT outbox_adopt()');
SET ROLE regress_copies_admin;
SELECT attempt('SELECT outbox_adopt(''theirs'')');
SELECT attempt('SELECT outbox_adopt(''none'')');
SELECT outbox_adopt();
RESET ROLE;
SELECT name, bound_to = (SELECT bound_to FROM outbox_route WHERE name = 'here') AS bound_here FROM outbox_route ORDER BY name;
SELECT outbox_adopt('theirs'), outbox_adopt('theirs');
SELECT outbox_adopt();
SELECT bool_and(bound_to = (SELECT bound_to FROM outbox_route WHERE name = 'here')) AS all_here FROM outbox_route;
BEGIN READ ONLY;
SELECT outbox_adopt();
ROLLBACK;
UPDATE outbox_route SET bound_to = 'x' WHERE name = 'mine';

\echo secrets: form, owners, rights
SELECT attempt(format('INSERT INTO outbox_secret (name, value) VALUES (%s) RETURNING owner = current_user', v)) FROM unnest(ARRAY[
    '''good'', ''canary''', '''good'', ''canary''', ''''', ''canary''', '''a b'', ''canary''', '''a}'', ''canary''',
    'repeat(''x'', 64), ''canary''', '''empty'', ''''', '''long'', repeat(''canary'', 2000)', '''null'', NULL']) v;
SELECT attempt('INSERT INTO outbox_secret VALUES (''lost'', ''regress_copies_gone'', ''canary'')');
SET ROLE regress_copies_admin;
SELECT attempt('SELECT count(*) FROM outbox_secret');
RESET ROLE;
GRANT ALL ON outbox_secret TO regress_copies_admin;
SET ROLE regress_copies_admin;
SELECT attempt('INSERT INTO outbox_secret VALUES (''owned'', ''regress_copies_owner'', ''canary'') RETURNING name');
SELECT attempt('INSERT INTO outbox_secret VALUES (''other'', ''regress_copies_other'', ''canary'')');
SELECT attempt('UPDATE outbox_secret SET value = ''canary 2'' WHERE name = ''owned'' RETURNING name');
SELECT attempt('UPDATE outbox_secret SET owner = ''regress_copies_other'' WHERE name = ''owned'' RETURNING name');
SELECT attempt('UPDATE outbox_secret SET value = ''x'' WHERE name = ''good''');
SELECT attempt('DELETE FROM outbox_secret WHERE name = ''good''');
SELECT attempt('TRUNCATE outbox_secret');
SELECT attempt('DELETE FROM outbox_secret WHERE name = ''owned'' RETURNING name');
RESET ROLE;
SELECT name FROM outbox_secret ORDER BY name;

\echo no dump has them
SELECT c.oid::regclass AS dumped FROM pg_extension e, unnest(extconfig) AS c(oid) WHERE extname = 'outbox_relay';

DROP SCHEMA app CASCADE;
DROP EXTENSION outbox_relay;
DROP ROLE regress_copies_owner, regress_copies_other, regress_copies_admin;
DROP FUNCTION attempt;
