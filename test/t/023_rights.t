# Passes run as the route's owner, restricted: code of the table's owner gains nothing, leaves nothing behind, and
# what the owner may not do fails that route alone.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $node = new_node('rights', conf => "autovacuum = off\noutbox_relay.workers = 1\n");
my $e = OutboxRelay::Endpoint->start;
$node->safe_psql('postgres', <<'SQL');
CREATE ROLE app_owner;
CREATE ROLE other_owner;
CREATE TABLE public.seen (who text, what text);
GRANT INSERT ON public.seen TO PUBLIC;
SQL

my %fast = (interval => '100ms', retry_base_delay => '100ms', retry_max_backoff => '200ms');

# A table of app_owner with a route of the same name.
sub owned
{
    my ($name, %columns) = @_;
    make_outbox($node, 'postgres', "app.$name", owner => 'app_owner');
    create_route($node, $name, "app.$name", delete $columns{url} // $e->url, owner => 'app_owner', %fast, %columns);
    return;
}

sub trigger
{
    my ($name, $timing, $statements, $more) = @_;
    $node->safe_psql('postgres', <<"SQL");
SET ROLE app_owner;
CREATE FUNCTION app.${name}_f() RETURNS trigger LANGUAGE plpgsql AS \$\$ BEGIN $statements; RETURN OLD; END \$\$;
CREATE @{[ $more // '' ]} TRIGGER t $timing ON app.$name @{[ $more ? 'DEFERRABLE INITIALLY DEFERRED' : '' ]} FOR EACH ROW
    EXECUTE FUNCTION app.${name}_f();
SQL
    return;
}

$node->safe_psql('postgres', 'CREATE SCHEMA app; ALTER SCHEMA app OWNER TO app_owner; GRANT USAGE ON SCHEMA app TO PUBLIC');

# T-02
subtest 'a trigger is the owner and no more' => sub {
    my %vectors = (
        superuser => 'ALTER ROLE app_owner SUPERUSER',
        set_role => 'SET ROLE postgres',
        session => 'SET SESSION AUTHORIZATION postgres',
        temporary => 'CREATE TEMP TABLE mine (a int)',
        program => q{COPY public.seen TO PROGRAM 'true'});
    for my $name (sort keys %vectors)
    {
        owned($name);
        trigger($name, 'BEFORE DELETE', $vectors{$name});
        insert_rows($node, "app.$name", $name, 1);
        my $lane = wait_lane($node, $name, 'failed_passes > 0');
        like($lane->{last_error}, qr/permission|must be superuser|cannot|security-restricted/i, "$name: $lane->{last_error}");
        is(value($node, "SELECT count(*) FROM app.$name"), 1, "$name: the row is still there");
        $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = '$name'");
    }
    is(value($node, "SELECT rolsuper FROM pg_roles WHERE rolname = 'app_owner'"), 'f', 'nobody became a superuser');
};

subtest 'a setting of the owner does not outlive its statement' => sub {
    owned('settings');
    trigger('settings', 'BEFORE DELETE', <<'SQL');
        INSERT INTO public.seen VALUES (current_user, concat_ws('|', current_setting('search_path'), current_setting('lock_timeout')));
        SET search_path = app; SET lock_timeout = 0; SET row_security = off
SQL
    insert_rows($node, 'app.settings', 'settings', 1);
    wait_empty($node, 'app.settings', all => 1);
    insert_rows($node, 'app.settings', 'settings', 1);
    wait_empty($node, 'app.settings', all => 1);
    is(value($node, 'SELECT DISTINCT who || what FROM public.seen'), 'app_ownerpg_catalog, pg_temp|1s',
        'each time as the owner, with our search_path and limit');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'settings'");
};

# T-03
subtest 'a deferred trigger runs as the owner, not at COMMIT as somebody else' => sub {
    $node->safe_psql('postgres', 'TRUNCATE public.seen');
    owned('deferred');
    trigger('deferred', 'AFTER DELETE', 'INSERT INTO public.seen VALUES (current_user, NULL)', 'CONSTRAINT');
    insert_rows($node, 'app.deferred', 'deferred', 1);
    wait_empty($node, 'app.deferred', all => 1);
    is(value($node, 'SELECT who FROM public.seen'), 'app_owner', 'as the owner');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'deferred'");
};

# T-04
subtest 'look-alikes are never called' => sub {
    my $note = q{INSERT INTO public.seen SELECT backend_type, '%s' FROM pg_catalog.pg_stat_activity
        WHERE pid OPERATOR(pg_catalog.=) pg_catalog.pg_backend_pid()};
    $node->safe_psql('postgres', join ";\n", 'TRUNCATE public.seen',
        'CREATE FUNCTION public.evil(text, text) RETURNS boolean LANGUAGE plpgsql AS $$ BEGIN ' . sprintf($note, 'eq') . '; RETURN true; END $$',
        'CREATE OPERATOR public.= (LEFTARG = text, RIGHTARG = text, FUNCTION = public.evil)',
        'CREATE FUNCTION public.now() RETURNS timestamptz LANGUAGE plpgsql AS $$ BEGIN ' . sprintf($note, 'now') . q{; RETURN '-infinity'; END $$},
        'CREATE FUNCTION public.unnest(tid[]) RETURNS SETOF tid LANGUAGE plpgsql AS $$ BEGIN ' . sprintf($note, 'unnest') . '; END $$',
        'ALTER DATABASE postgres SET search_path = public, pg_catalog');
    owned('planted', url => $e->url('/status/500'), max_attempts => 1);
    stage($node, 'planted');
    wait_lane($node, 'planted', 'failed OPERATOR(pg_catalog.=) 1');
    is(value($node, q{SELECT pg_catalog.count(*) FROM public.seen WHERE who OPERATOR(pg_catalog.<>) 'client backend'}), 0,
        'not by the worker');
    $node->safe_psql('postgres', 'TRUNCATE public.seen');
    $node->safe_psql('postgres', "SELECT outbox_depth('planted'), outbox_has_undrained('planted'), outbox_requeue_failed('planted'),"
          . q{outbox_stage('planted', 't', '1'), outbox_stage_many('planted', '[{"event_type": "t", "payload": 1}]')});
    is(value($node, 'SELECT pg_catalog.count(*) FROM public.seen'), 0, 'not by a function');
    $node->safe_psql('postgres', <<'SQL');
ALTER DATABASE postgres RESET search_path;
DELETE FROM outbox_route;
DROP OPERATOR public.= (text, text); DROP FUNCTION public.evil, public.now(), public.unnest(tid[]);
SQL
};

subtest 'whose table a route may be on' => sub {
    make_outbox($node, 'postgres', 'app.theirs', owner => 'app_owner');
    $e->reset;
    # A superuser is its own route's owner here: code of app_owner would run as the superuser.
    create_route($node, 'su', 'app.theirs', $e->url, owner => 'postgres', %fast);
    insert_rows($node, 'app.theirs', 'su', 1);
    my $lane = wait_lane($node, 'su', 'failed_passes > 0');
    like($lane->{last_error}, qr/route "su".*app\.theirs|app\.theirs.*"su"/, 'refused, naming route and table');
    is($e->count->{received}, 0, 'nothing was sent for it');
    $node->safe_psql('postgres', "UPDATE outbox_route SET owner = 'app_owner' WHERE name = 'su'");
    wait_empty($node, 'app.theirs', all => 1);

    $node->safe_psql('postgres', 'REVOKE DELETE ON app.theirs FROM app_owner');
    owned('neighbour');
    insert_rows($node, 'app.theirs', 'su', 1);
    insert_rows($node, 'app.neighbour', 'neighbour', 1);
    $lane = wait_lane($node, 'su', 'failed_passes > 0');
    wait_empty($node, 'app.neighbour', all => 1);
    wait_lane($node, 'su', q{last_error ~ 'app.theirs|theirs'});
    pass('a revoked right fails that route alone');
    $node->safe_psql('postgres', 'GRANT DELETE ON app.theirs TO app_owner');
    wait_empty($node, 'app.theirs', all => 1);
};

# spec.md, section 4, step 2
subtest 'missing rights are found before anything is sent' => sub {
    $e->reset;
    make_outbox($node, 'postgres', 'app.granted');
    $node->safe_psql('postgres', 'CREATE TABLE app.granted_log (id uuid, outbox_route text, event_id uuid, tenant_id uuid, published_at timestamptz);'
          . 'GRANT SELECT, UPDATE ON app.granted TO app_owner; GRANT EXECUTE ON FUNCTION outbox_relay_pass TO app_owner');
    create_route($node, 'granted', 'app.granted', $e->url, owner => 'app_owner', delivery_log => 'app.granted_log', %fast);
    insert_rows($node, 'app.granted', 'granted', 50);
    my $read = 'id, outbox_route, event_id, event_type, tenant_id, execution_id, correlation_id, causation_id, occurred_at, payload, status,'
      . 'created_at, attempts, available_at, ordering_key, ctid, tableoid, xmin';
    my @steps = (
        [ 'DELETE', 'table app.granted', 'GRANT DELETE ON app.granted TO app_owner; REVOKE SELECT, UPDATE ON app.granted FROM app_owner;'
              . "GRANT SELECT ($read), UPDATE (status, attempts, available_at) ON app.granted TO app_owner" ],
        [ 'SELECT, UPDATE', 'table app.granted', 'GRANT SELECT (processing_at), UPDATE (processing_at) ON app.granted TO app_owner' ],
        [ 'UPDATE', 'table app.granted', 'GRANT UPDATE (last_error) ON app.granted TO app_owner' ],
        [ 'INSERT', 'delivery log app.granted_log', 'GRANT INSERT (id, outbox_route, event_id, tenant_id) ON app.granted_log TO app_owner' ],
        [ 'INSERT', 'delivery log app.granted_log', 'GRANT INSERT (published_at) ON app.granted_log TO app_owner' ]);
    for my $step (@steps)
    {
        my ($right, $what, $sql) = @$step;
        wait_lane($node, 'granted', 'position(' . sql_literal("lacks $right on $what") . ' IN last_error) > 0');
        my ($code, $out, $error) = $node->psql('postgres', "\\set VERBOSITY verbose\nSELECT outbox_relay_pass('granted')");
        my ($name) = $what =~ /(\S+)$/;
        like($error, qr/42501: route "granted" cannot be relayed: role "app_owner" lacks $right on $what.*HINT:  GRANT $right ON $name TO app_owner;/s, "$right on $what");
        is($e->count->{received}, 0, 'nothing was sent');
        $node->safe_psql('postgres', $sql);
    }
    wait_empty($node, 'app.granted', all => 1);
    is(value($node, 'SELECT count(*) FROM app.granted_log'), 50, 'rights on columns are enough');
    is($e->count->{received}, 50, 'each sent once');
};

# A view has no ctid that one could have rights on.
subtest 'what is no table is called so, whatever the rights' => sub {
    $node->safe_psql('postgres', 'ALTER TABLE app.granted RENAME TO moved; CREATE VIEW app.granted AS SELECT * FROM app.moved');
    my ($code, $out, $error) = $node->psql('postgres', "\\set VERBOSITY verbose\nSELECT outbox_relay_pass('granted')");
    like($error, qr/42809: .*app\.granted is a view/, 'a view of another owner');
    $node->safe_psql('postgres', "DROP VIEW app.granted; ALTER TABLE app.moved RENAME TO granted; DELETE FROM outbox_route WHERE name = 'granted'");
};

subtest 'a missing owner idles the route' => sub {
    make_outbox($node, 'postgres', 'app.gone', owner => 'other_owner');
    create_route($node, 'gone', 'app.gone', $e->url, owner => 'other_owner', %fast);
    $node->safe_psql('postgres', 'ALTER TABLE app.gone OWNER TO postgres; GRANT ALL ON app.gone TO PUBLIC;'
          . 'REASSIGN OWNED BY other_owner TO postgres; DROP OWNED BY other_owner; DROP ROLE other_owner');
    insert_rows($node, 'app.gone', 'gone', 1);
    my $lane = wait_lane($node, 'gone', 'failed_passes > 0');
    like($lane->{last_error}, qr/owner "other_owner" of route "gone" does not exist/, 'and says so');
    is(lane($node, 'gone')->{state}, 'broken', 'and is shown so');
    is(value($node, 'SELECT count(*) FROM app.gone'), 1, 'the row waits');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'gone'");
};

# T-11 reduced
subtest 'row security holds, and follows its policies' => sub {
    owned('rls');
    $node->safe_psql('postgres', <<'SQL');
ALTER TABLE app.rls ENABLE ROW LEVEL SECURITY;
ALTER TABLE app.rls FORCE ROW LEVEL SECURITY;
CREATE POLICY p ON app.rls USING (event_type = 'a');
SQL
    insert_rows($node, 'app.rls', 'rls', 3, type => 'a');
    insert_rows($node, 'app.rls', 'rls', 2, type => 'b');
    wait_sql($node, 'postgres', "SELECT count(*) = 2 FROM app.rls");
    wait_passes($node, 'rls', 2);
    is(value($node, "SELECT string_agg(event_type, ',') FROM app.rls"), 'b,b', 'what the owner may not see stays');
    $node->safe_psql('postgres', "ALTER POLICY p ON app.rls USING (true)");
    wait_empty($node, 'app.rls', all => 1);
};

$node->stop;
done_testing();
