# Databases that somebody wants, or that are not to be served any more, whatever the workers are at: in functions of
# routes that take long, in a COMMIT that waits for a standby that is gone (spec.md section 8; F-25, F-38, F-39).

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use Time::HiRes qw(time);
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $e = OutboxRelay::Endpoint->start;
my $node = new_node('wanted', conf => "outbox_relay.interval = '2s'\noutbox_relay.pass_statement_timeout = '1s'\n", init => { allows_streaming => 1 });

# Seconds that a statement takes; no number when it fails.
sub takes
{
    my ($sql, $db) = @_;
    my $start = time;
    my ($status, undef, $said) = $node->psql($db // 'postgres', "SET synchronous_commit = local;\n$sql");
    diag($said) if $status != 0;
    return $status == 0 ? time - $start : 'inf';
}

# Many idle lanes whose table a function names, each time after 0.9 seconds.
sub slow_tables
{
    my ($db, %columns) = @_;
    $node->safe_psql('postgres', "CREATE DATABASE $db");
    $node->safe_psql($db, 'CREATE EXTENSION outbox_relay');
    make_outbox($node, $db, 'app.outbox');
    $node->safe_psql($db, q{CREATE FUNCTION app.tenants() RETURNS SETOF uuid LANGUAGE sql STABLE AS
        $$SELECT ('00000000-0000-4000-8000-' || lpad(g::text, 12, '0'))::uuid FROM generate_series(1, 200) g$$});
    my $names = 'CREATE OR REPLACE FUNCTION app.table_of(uuid) RETURNS text LANGUAGE plpgsql AS $$ BEGIN %s RETURN \'app.outbox\'; END $$';
    $node->safe_psql($db, sprintf $names, '');
    create_route($node, 'slow', undef, $e->url, db => $db, tenants_function => 'app.tenants', relation_function => 'app.table_of', %columns);
    wait_sql($node, $db, 'SELECT count(*) FILTER (WHERE passes > 1) = 201 FROM outbox_stat_route');
    $node->safe_psql($db, sprintf $names, 'PERFORM pg_sleep(0.9);');
    wait_sql($node, $db, "SELECT count(*) = 2 FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker' AND datname = '$db' AND wait_event = 'PgSleep'");
    return;
}

subtest 'functions that take long' => sub {
    slow_tables('slow');
    cmp_ok(takes('DROP DATABASE slow'), '<', 3, 'a database is dropped while its workers look for rows');
    slow_tables('slower', drain_on_shutdown => 1);
    cmp_ok(takes('DROP DATABASE slower WITH (FORCE)'), '<', 3, 'by force too, where a shutdown would drain');
    slow_tables('slowest', drain_on_shutdown => 1);
    my $start = time;
    $node->stop('fast');
    cmp_ok(time - $start, '<', 8, 'a drain ends in its time');
    $node->append_conf('postgresql.conf', "outbox_relay.databases = 'postgres, other, served, renamed'\n");
    $node->start;
};

# F-25: who drops a database waits for every process to answer.
subtest 'a COMMIT that waits for a standby that is gone' => sub {
    $node->safe_psql('postgres', 'CREATE DATABASE other');
    $node->safe_psql('postgres', 'CREATE DATABASE served');
    $node->safe_psql('served', 'CREATE EXTENSION outbox_relay');
    make_outbox($node, 'served', 'app.outbox');
    create_route($node, 'orders', 'app.outbox', $e->url, db => 'served');
    wait_lane($node, 'orders', 'passes > 0', db => 'served');
    set_conf($node, synchronous_standby_names => 'gone');
    my $waits = sub {
        cmp_ok(takes(q{SELECT outbox_stage('orders', 't', '{}')}, 'served'), '<', 5, 'staged');
        wait_sql($node, 'postgres', "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker' AND wait_event = 'SyncRep')");
    };
    $waits->();
    cmp_ok(takes('DROP DATABASE other'), '<', 4, 'another database is dropped');
    $waits->();
    cmp_ok(takes('ALTER DATABASE served RENAME TO renamed'), '<', 5, 'its own is renamed');
    set_conf($node, synchronous_standby_names => undef);
    wait_empty($node, 'app.outbox', db => 'renamed', all => 1);
    is($e->count->{acked}, 2, 'each event went out once');
    $e->reset;
};

subtest 'a database that becomes a template, or takes no connections' => sub {
    my $workers = "SELECT count(*) FROM outbox_stat_worker WHERE database = 'renamed'";
    wait_sql($node, 'postgres', "SELECT ($workers) = 2");
    # An error of its past, which the reason stands in front of.
    $e->script('once', '/status/500');
    value($node, q{UPDATE outbox_route SET retry_base_delay = '100ms', url = '} . $e->url('/script/once') . q{'}, 'renamed');
    $node->safe_psql('renamed', q{SELECT outbox_stage('orders', 't', '{}')});
    wait_empty($node, 'app.outbox', db => 'renamed', all => 1);
    like(lane($node, 'orders', 'renamed')->{last_error}, qr/HTTP 500/, 'a lane with an error');
    $node->safe_psql('postgres', 'ALTER DATABASE renamed IS_TEMPLATE true');
    wait_sql($node, 'postgres', "SELECT ($workers) = 0");
    $node->safe_psql('renamed', q{SELECT outbox_stage('orders', 't', '{}')});
    my $lane = lane($node, 'orders', 'renamed');
    is($lane->{state}, 'broken', 'its routes say that they are not served');
    like($lane->{last_error}, qr/is a template/, 'and why');
    $node->safe_psql('postgres', 'ALTER DATABASE renamed IS_TEMPLATE false');
    wait_empty($node, 'app.outbox', db => 'renamed', all => 1);
    $node->safe_psql('postgres', 'ALTER DATABASE renamed ALLOW_CONNECTIONS false');
    wait_sql($node, 'postgres', "SELECT ($workers) = 0");
    pass('nobody stays');
};

$node->stop;
done_testing();
