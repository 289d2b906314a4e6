# Routes with tenants: a lane for each tenant that tenants_function lists, on a shared table or on tables of their own
# (spec.md section 8; the seed, tenants; conformance TEN-01 to TEN-09, BKO-06, LOG-12, LOG-13, SHD-08).

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $node = new_node('tenants', conf => "autovacuum = off\noutbox_relay.interval = '200ms'\noutbox_relay.retry_base_delay = '100ms'\noutbox_relay.retry_max_backoff = '1s'\n");
my $e = OutboxRelay::Endpoint->start;
my @t = map { sprintf '00000000-0000-4000-8000-%012d', $_ } 0 .. 9;

sub sql { return $node->safe_psql('postgres', $_[0]); }

sub error_of
{
    my ($sql) = @_;
    my ($code, $out, $err) = $node->psql('postgres', $sql);
    return $code == 0 ? "no error: $out" : $err;
}

# Whose rows a route's tenants are: a table that the tenants function reads.
sub tenants
{
    my ($name, @tenants) = @_;
    sql(join ";\n", "DROP TABLE IF EXISTS app.${name}_tenants CASCADE", "CREATE TABLE app.${name}_tenants (n serial, tenant uuid)",
        (map { "INSERT INTO app.${name}_tenants (tenant) VALUES ('$_')" } @tenants),
        "CREATE OR REPLACE FUNCTION app.${name}_list() RETURNS SETOF uuid LANGUAGE sql STABLE AS 'SELECT tenant FROM app.${name}_tenants ORDER BY n'");
    return "app.${name}_list";
}

# A route on a table that its tenants share.
sub shared_scene
{
    my ($name, $tenants, %columns) = @_;
    $e->reset;
    make_outbox($node, 'postgres', "app.$name", tenants => 1, %{ delete $columns{table} // {} });
    create_route($node, $name, "app.$name", delete $columns{url} // $e->url, tenants_function => tenants($name, @$tenants), %columns);
    return "app.$name";
}

sub insert_for
{
    my ($table, $route, $tenant, $count, %columns) = @_;
    insert_rows($node, $table, $route, $count, columns => { tenant_id => $tenant, %columns });
    return;
}

sub rows { return sql("SELECT count(*) FROM $_[0]" . ($_[1] ? " WHERE $_[1]" : '')); }
sub relay { my ($route, $tenant, $max) = @_; return sql("SELECT * FROM outbox_relay_pass('$route', " . ($max // 'NULL') . ", " . ($tenant ? "'$tenant'" : 'NULL') . ')'); }
sub lane_of { my ($route, $tenant, $column) = @_; return sql("SELECT $column FROM outbox_stat_route WHERE route = '$route' AND tenant_id " . ($tenant ? "= '$tenant'" : 'IS NULL')); }
sub drop_route { sql("DELETE FROM outbox_route WHERE name = '$_[0]'"); return; }

subtest 'what a route may say' => sub {
    make_outbox($node, 'postgres', 'app.form', tenants => 1);
    tenants('form', $t[0]);
    sql("CREATE FUNCTION app.form_table(uuid) RETURNS text LANGUAGE sql IMMUTABLE AS 'SELECT \$\$app.form\$\$'");
    my $insert = sub { my (%c) = @_; my @n = sort keys %c; return error_of("INSERT INTO outbox_route (name, url, " . join(', ', @n) . ") VALUES ('form', 'http://127.0.0.1:9/', " . join(', ', map { "'$c{$_}'" } @n) . ')'); };
    like(error_of("INSERT INTO outbox_route (name, url) VALUES ('form', 'http://127.0.0.1:9/')"), qr/neither a relation nor a relation_function/, 'no table');
    like($insert->(relation => 'app.form', relation_function => 'app.form_table', tenants_function => 'app.form_list'), qr/has a relation as well/, 'two');
    like($insert->(relation_function => 'app.form_table'), qr/has no tenants_function/, 'a table by tenant, and no tenants');
    like($insert->(relation => 'app.form', tenants_function => 'form_list'), qr/malformed function name/, 'a bare name');
    like($insert->(relation => 'app.form', tenants_function => 'app.no_list'), qr/function app.no_list\(\) does not exist/, 'no such function');
    like($insert->(relation => 'app.form', tenants_function => 'pg_catalog.now'), qr/does not return a set/, 'not a set');
    like($insert->(relation => 'app.form', tenant_isolation => 'rows'), qr/It is none or namespace/, 'no such isolation');
    like($insert->(relation => 'app.form', tenants_function => 'app.form_list', tenant_isolation => 'namespace'), qr/tenants share the route's relation/, 'namespace needs a relation_function');
    like($insert->(relation_function => 'app.form_table', tenants_function => 'app.form_list', tenant_isolation => 'namespace', delivery_log => 'app.form'),
        qr/tenants would share this table/, 'LOG-13: a shared log');
    like($insert->(relation_function => 'app.form_table', tenants_function => 'app.form_list', delivery_log_function => 'app.form_table', storage => 'retain'), qr/storage retain/, 'a log with retain');
    make_outbox($node, 'postgres', 'app.bare');
    like($insert->(relation => 'app.bare', tenants_function => 'app.form_list'), qr/no error/, 'a missing index is for the pass to refuse');
    sql("INSERT INTO app.bare SELECT gen_random_uuid(), 'form', gen_random_uuid(), 'x', '$t[0]', NULL, NULL, NULL, now(), '1', 'pending', now()");
    wait_sql($node, 'postgres', "SELECT EXISTS (SELECT FROM outbox_stat_route WHERE route = 'form' AND tenant_id = '$t[0]' AND last_error LIKE '%has no index on (outbox_route, status, tenant_id, available_at, created_at)%')");
    wait_log($node, qr/a pass of tenant $t[0] of route "form" failed: .*has no index/, 0);
    sql("CREATE INDEX ON app.bare (outbox_route, status, tenant_id, available_at, created_at)");
    sql("UPDATE outbox_route SET url = '" . $e->url . "' WHERE name = 'form'");
    wait_empty($node, 'app.bare');
    drop_route('form');
};

# TEN-03, TEN-08.
subtest 'a table that tenants share' => sub {
    my $table = shared_scene('shared', [ @t[2, 0, 1] ], url => $e->url('/ok?t={tenant_id}'), enabled => 0);
    insert_for($table, 'shared', $t[$_], 3) for 0 .. 3;
    insert_rows($node, $table, 'shared', 1);
    sql("UPDATE outbox_route SET enabled = true WHERE name = 'shared'");
    wait_sql($node, 'postgres', "SELECT count(*) = 4 FROM $table");
    is(rows($table, "tenant_id = '$t[3]' OR tenant_id IS NULL"), 4, 'rows of no listed tenant stay');
    my @order;
    for my $request ($e->requests)
    {
        my ($tenant) = $request->{target} =~ /t=([-0-9a-f]+)/;
        push @order, $tenant if !grep { $_ eq $tenant } @order;
    }
    is_deeply([ sort @order ], [ @t[0 .. 2] ], '{tenant_id} of the url is the row\'s');
    is(lane_of('shared', $t[1], 'published'), 3, 'a lane each');
    is(lane_of('shared', undef, "state <> 'backoff' AND published = 0 AND passes > 0"), 't', 'and one that lists them');

    sql("INSERT INTO app.shared_tenants (tenant) VALUES ('$t[3]'); DELETE FROM app.shared_tenants WHERE tenant = '$t[0]'");
    wait_sql($node, 'postgres', "SELECT count(*) = 1 FROM $table");
    wait_sql($node, 'postgres', "SELECT NOT EXISTS (SELECT FROM outbox_stat_route WHERE route = 'shared' AND tenant_id = '$t[0]')");
    insert_for($table, 'shared', $t[0], 1);
    my $passes = lane_of('shared', undef, 'passes');
    wait_sql($node, 'postgres', "SELECT passes > $passes + 2 FROM outbox_stat_route WHERE route = 'shared' AND tenant_id IS NULL");
    is(rows($table, "tenant_id = '$t[0]'"), 1, 'a tenant that is gone is served no more, a new one is');
    drop_route('shared');
};

subtest 'a wake reaches the tenant\'s lane' => sub {
    my $table = shared_scene('wake', [ @t[0, 1] ], interval => '1h');
    wait_sql($node, 'postgres', "SELECT count(*) = 3 FROM outbox_stat_route WHERE route = 'wake' AND passes > 0 AND state = 'idle'");
    stage($node, 'wake', tenant_id => $t[1]);
    wait_empty($node, $table);
    sql("SET outbox_relay.tenant_id = '$t[0]'; SELECT outbox_stage('wake', 'x', '1')");
    wait_empty($node, $table);
    sql("SELECT outbox_stage_many('wake', '[{\"event_type\":\"a\",\"payload\":1,\"tenant_id\":\"$t[0]\"},{\"event_type\":\"a\",\"payload\":1,\"tenant_id\":\"$t[1]\"}]')");
    wait_empty($node, $table);
    sql("CREATE TRIGGER wake AFTER INSERT ON $table REFERENCING NEW TABLE AS staged FOR EACH STATEMENT EXECUTE FUNCTION outbox_wake()");
    insert_for($table, 'wake', $t[1], 2);
    wait_empty($node, $table);
    sql("DROP TRIGGER wake ON $table; CREATE TRIGGER wake AFTER INSERT ON $table FOR EACH STATEMENT EXECUTE FUNCTION outbox_wake()");
    insert_for($table, 'wake', $t[0], 2);
    wait_empty($node, $table);
    insert_for($table, 'wake', $t[0], 2, status => 'failed');
    is(sql("SELECT outbox_requeue_failed('wake', tenant_id => '$t[1]')"), 0, 'requeue: nothing of the other tenant');
    is(sql("SELECT outbox_requeue_failed('wake', tenant_id => '$t[0]')"), 2, 'but its own');
    wait_empty($node, $table);
    drop_route('wake');
};

# TEN-05, ADM-08.
subtest 'without a tenant' => sub {
    my $table = shared_scene('bound', [ @t[0, 1] ], enabled => 0);
    like(error_of("SELECT outbox_stage('bound', 'x', '1')"), qr/outbox route "bound" needs a tenant.*SET LOCAL outbox_relay.tenant_id/s, 'staging is refused');
    like(error_of("SELECT outbox_stage_many('bound', '[{\"event_type\":\"a\",\"payload\":1}]')"), qr/needs a tenant/, 'of many too');
    like(error_of("SELECT outbox_relay_pass('bound')"), qr/outbox route "bound" needs a tenant/, 'and a pass');
    insert_for($table, 'bound', $t[0], 2);
    insert_for($table, 'bound', $t[1], 3);
    insert_for($table, 'bound', $t[1], 1, status => 'processing', processing_at => \"now() - interval '1 h'");
    is(relay('bound', $t[0]), '2|2|0|0|0|0|0', 'a pass is the tenant\'s alone');
    is(sql("SET outbox_relay.tenant_id = '$t[1]'; SELECT published FROM outbox_relay_pass('bound', 1)"), 1, 'also the session\'s');
    is(sql("SELECT pending, processing FROM outbox_depth('bound', '$t[1]')"), "3|0", 'its pass reclaimed the stale row');
    is(sql("SELECT pending FROM outbox_depth('bound', '$t[0]')"), 0, 'depth is the tenant\'s');
    is(sql("SELECT outbox_has_undrained('bound', '$t[0]'), outbox_has_undrained('bound', '$t[1]'), outbox_has_undrained('bound')"), 'f|t|t', 'so is whether it is drained');
    is(sql("SELECT outbox_oldest_pending_age('bound', '$t[0]') IS NULL, outbox_oldest_pending_age('bound', '$t[1]') IS NULL"), 't|f', 'and the age');
    drop_route('bound');
};

# TEN-04, TEN-06, BKO-06: schema per tenant.
sub own_tables
{
    my ($name, $tenants, %columns) = @_;
    $e->reset;
    my $storage = $columns{storage} // 'consume';
    for my $tenant (@$tenants)
    {
        my ($n) = $tenant =~ /(\d)$/;
        make_outbox($node, 'postgres', "$name$n.outbox");
        sql("CREATE TABLE $name$n.delivered (id uuid, outbox_route text, event_id uuid, tenant_id uuid, published_at timestamptz)");
    }
    sql("CREATE SCHEMA IF NOT EXISTS app");
    sql("CREATE OR REPLACE FUNCTION app.${name}_$_(t uuid) RETURNS text LANGUAGE sql STABLE AS 'SELECT \$\$$name\$\$ || right(t::text, 1) || \$\$.$_\$\$'") for qw(outbox delivered);
    my $list = tenants($name, @$tenants);
    my %row = (name => $name, url => $e->url, tenants_function => $list, relation_function => "app.${name}_outbox", %columns);
    my @names = sort keys %row;
    sql('INSERT INTO outbox_route (' . join(', ', @names) . ') VALUES (' . join(', ', map { sql_literal($row{$_}) } @names) . ')');
    return;
}

for my $storage (qw(consume retain))
{
    subtest "tables of their own, $storage" => sub {
        my $name = "own$storage";
        own_tables($name, [ @t[0 .. 3] ], storage => $storage, tenant_isolation => 'namespace', interval => '300ms',
            $storage eq 'consume' ? (delivery_log_function => "app.${name}_delivered") : ());
        my $left = $storage eq 'consume' ? '' : "status <> 'published'";
        stage($node, $name, tenant_id => $_) for @t[0 .. 3];
        wait_sql($node, 'postgres', "SELECT " . join(' + ', map { "(SELECT count(*) FROM $name$_.outbox" . ($left && " WHERE $left") . ')' } 0 .. 3) . ' = 0');
        is($e->count->{events}, 4, 'each in its own table');
        is(sql("SELECT count(*) FROM ${name}2.delivered WHERE tenant_id = '$t[2]'"), 1, 'LOG-12: and in its own log') if $storage eq 'consume';

        like(error_of("SELECT outbox_depth('$name')"), qr/needs a tenant/, 'a probe without a tenant');
        is(sql("SELECT (outbox_depth('$name', '$t[1]')).pending"), 0, 'and with one');

        # A missing schema, and a table that is gone: these tenants alone.
        sql("DROP SCHEMA ${name}1 CASCADE; ALTER TABLE ${name}2.outbox RENAME TO moved");
        my $offset = log_offset($node);
        stage($node, $name, tenant_id => $_) for @t[0, 3];
        wait_sql($node, 'postgres', "SELECT " . join(' + ', map { "(SELECT count(*) FROM $name$_.outbox" . ($left && " WHERE $left") . ')' } 0, 3) . ' = 0');
        wait_sql($node, 'postgres', "SELECT count(*) = 2 FROM outbox_stat_route WHERE route = '$name' AND state = 'backoff' AND tenant_id IN ('$t[1]', '$t[2]') AND failed_passes > 1");
        is(sql("SELECT count(*) FROM outbox_stat_route WHERE route = '$name' AND failed_passes > 0"), 2, 'BKO-06: only those wait');
        like(lane_of($name, $t[2], 'last_error'), qr/relation ${name}2.outbox does not exist/, 'the error names the tenant\'s table');
        like(error_of("SELECT outbox_stage('$name', 'x', '1', tenant_id => '$t[1]')"), qr/does not exist/, 'staging tells too');
        sql("ALTER TABLE ${name}2.moved RENAME TO outbox");
        stage($node, $name, tenant_id => $t[2]);
        wait_sql($node, 'postgres', "SELECT count(*) = 0 FROM ${name}2.outbox" . ($left && " WHERE $left"));

        # The resolver fails: for one tenant, before anything is sent.
        $e->reset;
        sql("CREATE OR REPLACE FUNCTION app.${name}_outbox(t uuid) RETURNS text LANGUAGE plpgsql AS \$f\$ BEGIN
            IF t = '$t[0]' THEN RAISE EXCEPTION 'no such customer' USING ERRCODE = 'P0042'; END IF;
            IF t = '$t[3]' THEN RETURN NULL; END IF;
            RETURN '$name' || right(t::text, 1) || '.outbox'; END \$f\$");
        insert_rows($node, "$name$_.outbox", $name, 1) for 0, 2, 3;
        wait_sql($node, 'postgres', "SELECT count(*) = 2 FROM outbox_stat_route WHERE route = '$name' AND last_error ~ 'no such customer|gives no table'");
        wait_sql($node, 'postgres', "SELECT count(*) = 0 FROM ${name}2.outbox" . ($left && " WHERE $left"));
        is($e->count->{events}, 1, 'rows of the others stay and are not sent; one without tenant_id is its table\'s');
        like(error_of("SELECT outbox_stage('$name', 'x', '1', tenant_id => '$t[3]')"), qr/relation_function of route "$name" gives no table for tenant $t[3]/, 'NULL');
        drop_route($name);
    };
}

subtest 'LOG-12: the log\'s resolver fails before anything is sent' => sub {
    own_tables('logs', [ @t[0, 1] ], delivery_log_function => 'app.logs_delivered', enabled => 0);
    sql("CREATE OR REPLACE FUNCTION app.logs_delivered(t uuid) RETURNS text LANGUAGE plpgsql AS \$f\$ BEGIN
        IF t = '$t[0]' THEN RAISE EXCEPTION 'no log'; END IF; RETURN 'logs1.delivered'; END \$f\$");
    insert_for("logs$_.outbox", 'logs', $t[$_], 2) for 0, 1;
    like(error_of("SELECT outbox_relay_pass('logs', tenant_id => '$t[0]')"), qr/delivery_log_function of route "logs" failed for tenant $t[0]: no log/, 'an error');
    is($e->count->{events}, 0, 'and no request');
    is(relay('logs', $t[1]), '2|2|0|0|0|0|0', 'the other tenant\'s pass');
    is(rows('logs1.delivered'), 2, 'is logged');
    drop_route('logs');
};

# The functions run as the route's owner, whoever calls.
subtest 'rights' => sub {
    sql("CREATE ROLE keeper; CREATE ROLE stager LOGIN; GRANT CREATE ON DATABASE postgres TO keeper");
    own_tables('mine', [ @t[0, 1] ], enabled => 0);
    sql("CREATE TABLE app.who (what text, who text); GRANT INSERT ON app.who TO keeper; GRANT USAGE ON SCHEMA app TO keeper");
    sql("GRANT USAGE ON SCHEMA mine$_ TO keeper, stager; ALTER TABLE mine$_.outbox OWNER TO keeper; GRANT INSERT ON mine$_.outbox TO stager") for 0, 1;
    sql("CREATE OR REPLACE FUNCTION app.mine_outbox(t uuid) RETURNS text LANGUAGE plpgsql AS \$f\$ BEGIN
        INSERT INTO app.who VALUES ('outbox', current_user); RETURN 'mine' || right(t::text, 1) || '.outbox'; END \$f\$;
        ALTER FUNCTION app.mine_outbox OWNER TO keeper; ALTER FUNCTION app.mine_list OWNER TO keeper; GRANT SELECT ON app.mine_tenants TO keeper;
        REVOKE ALL ON FUNCTION app.mine_outbox, app.mine_list FROM PUBLIC; UPDATE outbox_route SET owner = 'keeper' WHERE name = 'mine'");
    sql("SET ROLE stager; SELECT outbox_stage('mine', 'x', '1', tenant_id => '$t[1]')");
    is(sql('SELECT DISTINCT who FROM app.who'), 'keeper', 'the stager needs no right on the function, its code none of the stager\'s');
    is(rows('mine1.outbox'), 1, 'the row is there');
    sql("UPDATE outbox_route SET enabled = true WHERE name = 'mine'");
    wait_empty($node, 'mine1.outbox');
    sql("CREATE ROLE thief; GRANT CREATE ON SCHEMA app TO thief; GRANT keeper TO thief; ALTER FUNCTION app.mine_list OWNER TO thief; REVOKE keeper FROM thief");
    wait_sql($node, 'postgres', "SELECT last_error LIKE '%may not call function app.mine_list()%' FROM outbox_stat_route WHERE route = 'mine' AND tenant_id IS NULL");
    stage($node, 'mine', tenant_id => $t[0]);
    wait_empty($node, 'mine0.outbox');
    pass('the last list stays');
    sql("ALTER FUNCTION app.mine_list OWNER TO keeper; CREATE OR REPLACE FUNCTION app.mine_list() RETURNS SETOF uuid LANGUAGE sql AS 'SELECT tenant FROM app.mine_tenants, pg_sleep(30)'");
    wait_sql($node, 'postgres', "SELECT last_error LIKE '%statement timeout%' FROM outbox_stat_route WHERE route = 'mine' AND tenant_id IS NULL");
    stage($node, 'mine', tenant_id => $t[1]);
    wait_empty($node, 'mine1.outbox');
    pass('also when the function hangs');
    drop_route('mine');
};

# BKO-06, T-10: one tenant's endpoint fails, the other's does not notice.
subtest 'a tenant\'s endpoint' => sub {
    my $table = shared_scene('apart', [ @t[0, 1] ], url => $e->url('/script/{tenant_id}'), interval => '100ms', breaker_threshold => 2);
    $e->script($t[0], map { '/status/500' } 1 .. 200);
    insert_for($table, 'apart', $t[$_], 5) for 0, 1;
    wait_sql($node, 'postgres', "SELECT count(*) = 0 FROM $table WHERE tenant_id = '$t[1]'");
    wait_sql($node, 'postgres', "SELECT breaker <> 'closed' FROM outbox_stat_route WHERE route = 'apart' AND tenant_id = '$t[0]'");
    insert_for($table, 'apart', $t[1], 5);
    wait_sql($node, 'postgres', "SELECT count(*) = 0 FROM $table WHERE tenant_id = '$t[1]'");
    is(lane_of('apart', $t[1], "breaker = 'closed' AND retried + refused + failed_passes = 0"), 't', 'its breaker is not the other\'s');
    my %connections;
    for my $request ($e->requests)
    {
        my ($tenant) = $request->{target} =~ m{/script/([-0-9a-f]+)};
        $connections{ $request->{connection} }{$tenant} = 1;
    }
    is(scalar(grep { keys %$_ > 1 } values %connections), 0, 'connections of one never serve another');
    drop_route('apart');
};

done_testing();
