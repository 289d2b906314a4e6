# A wake reaches the lanes that have rows, whatever happened to them between staging and COMMIT, and no others. Polls
# are an hour apart: what no wake tells of waits for the test to fail.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $node = new_node('wakes', conf => "autovacuum = off\noutbox_relay.interval = '1h'\n");
my $e = OutboxRelay::Endpoint->start;
my $trigger = 'FOR EACH STATEMENT EXECUTE FUNCTION outbox_wake()';

sub sql { return $node->safe_psql('postgres', $_[0]); }

sub tenant { return sprintf '00000000-0000-4000-8000-%012d', $_[0]; }

# A function that lists the first so many tenants.
sub tenants
{
    my ($count) = @_;
    sql("CREATE OR REPLACE FUNCTION app.tenants_$count() RETURNS SETOF uuid LANGUAGE sql STABLE AS \$\$ SELECT ('00000000-0000-4000-8000-' || lpad(g::text, 12, '0'))::uuid FROM generate_series(1, $count) AS g \$\$");
    return "app.tenants_$count";
}

# All lanes of the route have had their first pass.
sub wait_idle
{
    my ($route, $lanes) = @_;
    wait_sql($node, 'postgres', "SELECT count(*) = $lanes AND bool_and(state = 'idle' AND passes > 0) FROM outbox_stat_route WHERE route = '$route'");
    return;
}

sub passes { return sql("SELECT sum(passes + failed_passes) FROM outbox_stat_route WHERE route = '$_[0]'"); }

subtest 'a route that changes while rows of it are not committed' => sub {
    make_outbox($node, 'postgres', 'app.changed');
    create_route($node, 'changed', 'app.changed', $e->url);
    wait_idle('changed', 1);
    my $stager = hold_session($node, "BEGIN; SELECT outbox_stage('changed', 't', '{}')");
    my $before = passes('changed');
    sql("UPDATE outbox_route SET max_claim_rows = 7 WHERE name = 'changed'");
    wait_sql($node, 'postgres', "SELECT passes > $before AND state = 'idle' FROM outbox_stat_route WHERE route = 'changed'");
    $stager->query_safe('COMMIT');
    wait_empty($node, 'app.changed', timeout => 10);
    $stager->quit;
    pass('its row goes out');
};

subtest 'a lane that comes while its first rows are not committed' => sub {
    make_outbox($node, 'postgres', 'app.coming');
    set_conf($node, 'outbox_relay.enabled' => 'off');
    wait_sql($node, 'postgres', "SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker'");
    create_route($node, 'coming', 'app.coming', $e->url);
    my $stager = hold_session($node, "BEGIN; SELECT outbox_stage('coming', 't', '{}')");
    set_conf($node, 'outbox_relay.enabled' => 'on');
    wait_idle('coming', 1);
    $stager->query_safe('COMMIT');
    wait_empty($node, 'app.coming', timeout => 10);
    $stager->quit;
    pass('its row goes out');
};

subtest 'without a transition table the lanes of the table are woken, and no others' => sub {
    make_outbox($node, 'postgres', 'app.many', tenants => 1);
    make_outbox($node, 'postgres', 'app.plain');
    create_route($node, 'many', 'app.many', $e->url, tenants_function => tenants(80));
    create_route($node, 'plain', 'app.plain', $e->url);
    wait_idle('many', 81);
    wait_idle('plain', 1);
    sql("CREATE TRIGGER wake AFTER INSERT ON app.$_ $trigger") for qw(many plain);
    my $before = passes('many');
    for (1 .. 5)
    {
        insert_rows($node, 'app.plain', 'plain', 1);
        wait_empty($node, 'app.plain', timeout => 10);
    }
    is(passes('many'), $before, 'a route on another table has no pass');
    insert_rows($node, 'app.many', 'many', 1, columns => { tenant_id => tenant(40) });
    wait_empty($node, 'app.many', timeout => 10);
    pass('one on this has');
};

subtest 'a statement, and a transaction, for more tenants than are told apart' => sub {
    make_outbox($node, 'postgres', 'app.few', tenants => 1);
    create_route($node, 'few', 'app.few', $e->url, tenants_function => tenants(3));
    wait_idle('few', 4);
    wait_idle('many', 81);
    sql("DROP TRIGGER wake ON app.many; CREATE TRIGGER wake AFTER INSERT ON app.many REFERENCING NEW TABLE AS staged $trigger");
    my $before = passes('few');
    insert_rows($node, 'app.many', 'many', 80, columns => { tenant_id => \q{('00000000-0000-4000-8000-' || lpad(g::text, 12, '0'))::uuid} });
    wait_empty($node, 'app.many', timeout => 20);
    sql("DROP TRIGGER wake ON app.many; SELECT count(outbox_stage('many', 't', '{}', tenant_id => t)) FROM app.tenants_80() AS t");
    wait_empty($node, 'app.many', timeout => 20);
    pass('all go out');
    is(passes('few'), $before, 'another route has no pass');
};

subtest 'rows without a tenant' => sub {
    make_outbox($node, 'postgres', "app.own_$_") for 1 .. 2;
    sql(q{CREATE FUNCTION app.own(uuid) RETURNS text LANGUAGE sql STABLE AS $$ SELECT 'app.own_' || right($1::text, 1) $$});
    sql("INSERT INTO outbox_route (name, url, relation_function, tenants_function) VALUES ('own', '" . $e->url . "', 'app.own', '" . tenants(2) . "')");
    wait_idle('own', 3);
    sql("CREATE TRIGGER wake AFTER INSERT ON app.own_2 REFERENCING NEW TABLE AS staged $trigger");
    insert_rows($node, 'app.own_2', 'own', 1);
    wait_empty($node, 'app.own_2', timeout => 10);
    pass('in a tenant\'s own table they go out');
    my $before = passes('few');
    sql("CREATE TRIGGER wake AFTER INSERT ON app.few REFERENCING NEW TABLE AS staged $trigger");
    insert_rows($node, 'app.few', 'few', 2);
    insert_rows($node, 'app.few', 'few', 1, columns => { tenant_id => tenant(1) });
    wait_sql($node, 'postgres', 'SELECT count(*) = 2 FROM app.few', timeout => 10);
    cmp_ok(passes('few') - $before, '<=', 2, 'in a shared one they wake nobody');
};

$node->stop;
done_testing();
