# Few slots and many lanes: what is no more gives its slot back, what is in trouble gives way, slow lanes take turns, and
# nobody is forgotten (spec.md section 8; F-83). And what a reload changes for workers that run.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use Time::HiRes qw(sleep time);
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $e = OutboxRelay::Endpoint->start;
my $node = new_node('slots', conf => "outbox_relay.max_lanes = 16\noutbox_relay.interval = '300ms'\noutbox_relay.retry_max_backoff = '20s'\n");
make_outbox($node, 'postgres', 'app.outbox');

sub tenant { return sprintf '00000000-0000-4000-8000-%012d', $_[0]; }

sub afresh
{
    value($node, 'DELETE FROM outbox_route');
    value($node, 'DELETE FROM app.outbox');
    $e->reset;
}

# Seconds until a row of the route, which nobody wakes for, is gone.
sub served_in
{
    my ($route, %columns) = @_;
    my $start = time;
    insert_rows($node, 'app.outbox', $route, 1, columns => \%columns);
    wait_sql($node, 'postgres', "SELECT count(*) = 0 FROM app.outbox WHERE outbox_route = '$route'", timeout => 30);
    return time - $start;
}

for my $away ('DELETE FROM outbox_route', 'UPDATE outbox_route SET enabled = false')
{
    afresh();
    create_route($node, "old$_", 'app.outbox', $e->url) for 1 .. 16;
    wait_sql($node, 'postgres', 'SELECT count(*) FILTER (WHERE passes > 0) = 16 FROM outbox_stat_route');
    value($node, $away);
    create_route($node, 'new', 'app.outbox', $e->url);
    cmp_ok(served_in('new'), '<', 15, "after $away a new route has a slot");
    my $passes = lane($node, 'new')->{passes};
    wait_lane($node, 'new', "passes > $passes + 3");
    pass('and keeps it');
}

subtest 'a counter survives a pause' => sub {
    afresh();
    create_route($node, 'paused', 'app.outbox', $e->url);
    served_in('paused');
    value($node, 'UPDATE outbox_route SET enabled = false');
    create_route($node, 'other', 'app.outbox', $e->url);
    served_in('other');
    is(lane($node, 'paused')->{state}, 'paused', 'paused');
    is(lane($node, 'paused')->{published}, 1, 'what it had done is still there');
};

subtest 'a lane beyond those in trouble' => sub {
    afresh();
    create_route($node, "dead$_", 'app.outbox', 'http://127.0.0.1:9/') for 1 .. 16;
    insert_rows($node, 'app.outbox', "dead$_", 1) for 1 .. 16;
    wait_sql($node, 'postgres', "SELECT count(*) FILTER (WHERE consecutive_failures > 0) = 16 FROM outbox_stat_route");
    create_route($node, 'good', 'app.outbox', $e->url);
    cmp_ok(served_in('good'), '<', 15, 'is served');
};

subtest 'tenants beyond the slots, while routes change' => sub {
    afresh();
    value($node, "CREATE INDEX ON app.outbox (outbox_route, status, tenant_id, available_at, created_at);
        CREATE FUNCTION app.tenants() RETURNS SETOF uuid LANGUAGE sql STABLE AS 'SELECT (''00000000-0000-4000-8000-'' || lpad(g::text, 12, ''0''))::uuid FROM generate_series(1, 40) AS g'");
    create_route($node, 'many', 'app.outbox', $e->url, tenants_function => 'app.tenants');
    create_route($node, 'other', 'app.outbox', $e->url);
    for my $round (1 .. 5)
    {
        value($node, "UPDATE outbox_route SET max_claim_rows = $round + 1 WHERE name = 'other'");
        sleep 0.4;
        insert_rows($node, 'app.outbox', 'many', 1, columns => { tenant_id => tenant($_) }) for 1 .. 40;
        wait_empty($node, 'app.outbox', timeout => 30);
    }
    is($e->count->{events}, 200, 'each is served, each time');
};

subtest 'a table that becomes another one' => sub {
    afresh();
    make_outbox($node, 'postgres', 'app.second');
    value($node, "CREATE TABLE app.place (name text); INSERT INTO app.place VALUES ('app.outbox');
        CREATE FUNCTION app.table_of(tenant uuid) RETURNS text LANGUAGE sql STABLE AS 'SELECT name FROM app.place'");
    create_route($node, 'moved', undef, $e->url, tenants_function => 'app.tenants', relation_function => 'app.table_of');
    insert_rows($node, 'app.outbox', 'moved', 1, columns => { tenant_id => tenant(7) });
    wait_empty($node, 'app.outbox', timeout => 30);
    sleep 2;
    value($node, "UPDATE app.place SET name = 'app.second'");
    insert_rows($node, 'app.second', 'moved', 1, columns => { tenant_id => tenant(7) });
    wait_empty($node, 'app.second', timeout => 30);
    is($e->count->{events}, 2, 'idle lanes follow');
};

# F-83: one lane's backlog of slow requests does not keep the workers from the others.
subtest 'slow lanes take turns' => sub {
    afresh();
    create_route($node, "slow$_", 'app.outbox', $e->url('/slow?ms=400'), pass_deadline => '1s', concurrency => 1, max_claim_rows => 2) for 1, 2;
    insert_rows($node, 'app.outbox', "slow$_", 200) for 1, 2;
    wait_sql($node, 'postgres', "SELECT count(*) = 2 FROM outbox_stat_route WHERE route LIKE 'slow%' AND published > 0");
    create_route($node, 'quick', 'app.outbox', $e->url);
    cmp_ok(served_in('quick'), '<', 8, 'a third lane has its turn') for 1 .. 2;
};

# One worker waits for an endpoint that hangs, the other is kept for lanes that are well, and sleeps meanwhile.
subtest 'the worker that is kept free does not spin' => sub {
    afresh();
    create_route($node, "ill$_", 'app.outbox', $e->url('/hang'), pass_deadline => '6s', retry_base_delay => '1ms', retry_max_backoff => '1ms') for 1, 2;
    insert_rows($node, 'app.outbox', "ill$_", 4) for 1, 2;
    wait_sql($node, 'postgres', "SELECT count(*) = 2 FROM outbox_stat_route WHERE retried >= 4", timeout => 60);
    create_route($node, 'well', 'app.outbox', $e->url);
    served_in('well');
    stage($node, "ill$_") for 1, 2;
    my $ticks = sub { my $sum = 0; for my $pid (worker_pids($node, 'postgres')) { open my $stat, '<', "/proc/$pid/stat" or next; my @f = split ' ', (<$stat> =~ s/^.*\) //r); $sum += $f[11] + $f[12] } return $sum };
    my $before = $ticks->();
    sleep 2;
    cmp_ok($ticks->() - $before, '<', 60, 'workers wait without using the processor');
    cmp_ok(served_in('well'), '<', 5, 'and a lane that is well is served');
    $e->release(100);
};

subtest 'a reload stops and starts what runs' => sub {
    afresh();
    create_route($node, 'main', 'app.outbox', $e->url);
    served_in('main');
    for (['outbox_relay.databases', 'elsewhere'], ['outbox_relay.environment', 'staging'])
    {
        my ($name, $value) = @$_;
        set_conf($node, $name => $value);
        wait_sql($node, 'postgres', "SELECT count(*) = 0 FROM outbox_stat_worker WHERE database = 'postgres'");
        my $before = $e->count->{events};
        stage($node, 'main');
        sleep 1.5;
        is($e->count->{events}, $before, "$name: nothing is sent any more");
        set_conf($node, $name => undef);
        wait_empty($node, 'app.outbox', timeout => 30);
        is($e->count->{events}, $before + 1, 'and again, once it is back');
    }
};

done_testing();
