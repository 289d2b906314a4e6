# The shutdown of the server: without a drain what is in flight gets a second, with one the rest goes out, in time.
# Evictions, which never drain, and the ends of workers that wait for a lock.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use IPC::Run ();
use Time::HiRes qw(time);
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $node = new_node('stopping', conf => "outbox_relay.interval = '1h'\nmax_prepared_transactions = 2\n");
my $e = OutboxRelay::Endpoint->start;

sub table_and_route
{
    my ($name, %columns) = @_;
    make_outbox($node, 'postgres', "app.$name");
    create_route($node, $name, "app.$name", delete $columns{url} // $e->url, %columns);
    wait_lane($node, $name, 'passes > 0');
    return "app.$name";
}

# Rows that no wake tells of, as those staged after a lane's last turn.
sub leave { my ($name, $n, %columns) = @_; return insert_rows($node, "app.$name", $name, $n, columns => \%columns) }

# Stops the server (fast) and starts it with nothing relaying; how long the stop took.
sub stop_and_look
{
    my ($mode) = @_;
    my $began = time();
    $node->stop($mode // 'fast');
    my $took = time() - $began;
    $node->append_conf('postgresql.conf', "outbox_relay.enabled = off\n");
    $node->start;
    return $took;
}

# The routes go first: what a stopped lane has left would go out, and be counted, once relaying is on again.
sub go_on
{
    value($node, 'DELETE FROM outbox_route');
    $node->append_conf('postgresql.conf', "outbox_relay.enabled = on\n");
    $node->reload;
    $e->reset;
}

# SHD-01, SHD-02
for my $drain (0, 1)
{
    subtest $drain ? 'with a drain the rest goes out' : 'without a drain the rest stays' => sub {
        for my $storage (qw(consume retain))
        {
            my $name = "rest_${storage}_$drain";
            my $table = table_and_route($name, drain_on_shutdown => $drain, storage => $storage, max_claim_rows => 10);
            leave($name, 25);
        }
        stop_and_look();
        for my $storage (qw(consume retain))
        {
            is(value($node, "SELECT count(*) FROM app.rest_${storage}_$drain WHERE status <> 'published'"), $drain ? 0 : 25, $storage);
        }
        is($e->count->{acked}, $drain ? 50 : 0, 'arrived');
        go_on();
    };
}

# SHD-03, SHD-04
subtest 'one attempt a row, and the first pass that reschedules one ends the drain' => sub {
    $e->script('second', ('/ok') x 5, { status => 500 }, ('/ok') x 20);
    my $table = table_and_route('failing', drain_on_shutdown => 1, max_claim_rows => 5, concurrency => 1, url => $e->url('/script/second'), retry_base_delay => '1ms');
    leave('failing', 15);
    stop_and_look();
    is($e->count->{received}, 10, 'two passes of three');
    is(value($node, "SELECT string_agg(status || ' ' || attempts, ', ' ORDER BY attempts DESC) FROM (SELECT status, attempts FROM $table GROUP BY 1, 2) s"), 'pending 1, pending 0', 'the failed row has one attempt');
    is(value($node, "SELECT count(*) FROM $table"), 6, 'the rest is pending');
    go_on();
};

# SHD-05, SHD-08's half: other lanes go on
subtest 'a failing pass ends the drain of its lane alone' => sub {
    my $table = table_and_route('broken', drain_on_shutdown => 1, max_claim_rows => 5);
    my $good = table_and_route('good', drain_on_shutdown => 1);
    value($node, "CREATE FUNCTION app.no() RETURNS trigger LANGUAGE plpgsql AS \$\$ BEGIN RAISE EXCEPTION 'no'; END \$\$; CREATE TRIGGER no BEFORE DELETE ON $table FOR EACH ROW EXECUTE FUNCTION app.no()");
    leave('broken', 20);
    leave('good', 20);
    stop_and_look();
    is(value($node, "SELECT count(*) FROM $table"), 20, 'nothing is settled');
    is(value($node, "SELECT count(*) FROM $good"), 0, 'the other lane is drained');
    is($e->count->{received}, 25, 'one pass was tried');
    go_on();
};

# SHD-06, SHD-14
subtest 'bounded by the batches of a tick; rows that back off are not waited for' => sub {
    $node->append_conf('postgresql.conf', "outbox_relay.max_batches_per_tick = 3\n");
    $node->reload;
    my $table = table_and_route('many', drain_on_shutdown => 1, max_claim_rows => 5);
    my $later = table_and_route('later', drain_on_shutdown => 1);
    leave('many', 50);
    leave('later', 1, available_at => \q{now() + interval '3 s'});
    my $took = stop_and_look();
    is(value($node, "SELECT count(*) FROM $table"), 35, 'three passes of five');
    is(value($node, "SELECT count(*) FROM $later"), 1, 'the row that waits stays');
    cmp_ok($took, '<', 3, sprintf('the stop took %.1f s', $took));
    $node->append_conf('postgresql.conf', "outbox_relay.max_batches_per_tick = 100\n");
    go_on();
};

# SHD-10, SHD-11
subtest 'a slow endpoint: publishing stops in time to commit' => sub {
    $node->append_conf('postgresql.conf', "outbox_relay.shutdown_drain_timeout = '2500ms'\noutbox_relay.pass_statement_timeout = '500ms'\n");
    $node->reload;
    my $table = table_and_route('slow', drain_on_shutdown => 1, concurrency => 1, url => $e->url('/slow?ms=200'), max_claim_rows => 100);
    leave('slow', 60);
    my $took = stop_and_look();
    my $left = value($node, "SELECT count(*) FROM $table");
    my $acked = $e->count->{acked};
    cmp_ok($left, '<', 60, "some went out: $acked");
    cmp_ok($left, '>', 40, "and the rest, $left, stays");
    is(60 - $left, $acked, 'what was acknowledged is settled: nothing was rolled back');
    cmp_ok($took, '<', 4, sprintf('the stop took %.1f s', $took));
    go_on();
};

# SHD-12
subtest 'a closing statement that waits beyond the end is cut' => sub {
    my $table = table_and_route('locked', drain_on_shutdown => 1, max_claim_rows => 10);
    value($node, "CREATE FUNCTION app.wait() RETURNS trigger LANGUAGE plpgsql AS \$\$ BEGIN PERFORM pg_sleep(10); RETURN OLD; END \$\$; CREATE TRIGGER wait BEFORE DELETE ON $table FOR EACH ROW EXECUTE FUNCTION app.wait()");
    leave('locked', 5);
    my $took = stop_and_look();
    is(value($node, "SELECT count(*) FROM $table WHERE attempts = 0"), 5, 'its pass is rolled back');
    cmp_ok($took, '<', 4, sprintf('the stop took %.1f s', $took));
    go_on();
};

# SHD-07
subtest 'an empty route costs one claim, and no reclaim' => sub {
    my $table = table_and_route('empty', drain_on_shutdown => 1, reclaim_stale_after => '1s');
    my $scans = "SELECT sum(idx_scan) FROM pg_stat_user_indexes WHERE relid = '$table'::regclass";
    wait_sql($node, 'postgres', "SELECT ($scans) > 0");
    my $first = value($node, $scans);
    leave('empty', 1, status => 'processing', processing_at => \q{now() - interval '1 h'});
    my $before = value($node, $scans);
    stop_and_look();
    is(value($node, "SELECT status FROM $table"), 'processing', 'what another relay left stays');
    my $cost = value($node, $scans) - $before;
    cmp_ok($cost, '>', 0, 'it was looked at');
    cmp_ok($cost, '<', $first, "once: $cost index scans, $first in a pass that reclaims");
    go_on();
};

my $evict = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker'";

# Evicts the workers and waits until they are gone; how long that took.
sub evict
{
    my @pids = worker_pids($node, 'postgres');
    my $began = time();
    value($node, $evict);
    wait_until(sub { my %now = map { $_ => 1 } worker_pids($node, 'postgres'); !grep { $now{$_} } @pids }, what => 'the workers to be gone');
    return time() - $began;
}

# SHD-15
subtest 'an eviction never drains' => sub {
    my $table = table_and_route('evicted', drain_on_shutdown => 1);
    leave('evicted', 5);
    my $passes = lane($node, 'evicted')->{passes};
    cmp_ok(evict(), '<', 3, 'the workers go at once');
    is($e->count->{received}, 0, 'and send nothing');
    is(lane($node, 'evicted')->{passes}, $passes, 'they did not even look');
    is(value($node, "SELECT count(*) FROM $table"), 5, 'the rows stay');
    go_on();
};

subtest 'nor does one in the middle of a pass' => sub {
    my $table = table_and_route('amid', drain_on_shutdown => 1, concurrency => 1, url => $e->url('/slow?ms=300'));
    stage_many($node, 'amid', 20);
    $e->wait_for_count(2, of => 'received');
    # Nobody comes back, and a pass that is under way sees no new setting.
    set_conf($node, 'outbox_relay.enabled' => 'off');
    my $before = $e->count->{received};
    cmp_ok(evict(), '<', 3, 'the worker goes at once');
    cmp_ok($e->count->{received} - $before, '<=', 1, 'and sends no more');
    is(value($node, "SELECT count(*) FROM $table"), 20 - $e->count->{acked}, 'what was acknowledged is settled');
    value($node, 'DELETE FROM outbox_route');
    set_conf($node, 'outbox_relay.enabled' => undef);
    $e->reset;
};

# SHD-09
subtest 'a second SIGTERM changes nothing' => sub {
    my $table = table_and_route('twice', drain_on_shutdown => 1, concurrency => 1, url => $e->url('/slow?ms=100'), max_claim_rows => 2);
    leave('twice', 8);
    my @pids = worker_pids($node, 'postgres');
    my $stop = IPC::Run::start([ 'pg_ctl', '-D', $node->data_dir, '-m', 'fast', '-w', 'stop' ], '<', \undef, '>&', \my $said);
    for my $count (1, 4)
    {
        $e->wait_for_count($count, of => 'received');
        kill TERM => @pids;
    }
    ok($stop->finish, 'the server stops');
    $node->{_pid} = undef;
    is($e->count->{received}, 8, 'each row goes out, once');
    $node->append_conf('postgresql.conf', "outbox_relay.enabled = off\n");
    $node->start;
    is(value($node, "SELECT count(*) FROM $table"), 0, 'and is settled');
    go_on();
};

# A smart shutdown with a client that stays: an eviction meanwhile is none of the server's end, which comes with the
# client's.
for my $drain (0, 1)
{
    subtest 'a smart shutdown ' . ($drain ? 'drains' : 'without a drain') . ', an eviction before its end does not' => sub {
        my $name = "smart_$drain";
        my $table = table_and_route($name, drain_on_shutdown => $drain);
        my $client = hold_session($node, 'SELECT 1');
        leave($name, 5);
        my $offset = log_offset($node);
        my $stop = IPC::Run::start([ 'pg_ctl', '-D', $node->data_dir, '-m', 'smart', '-w', 'stop' ], '<', \undef, '>&', \my $said);
        wait_log($node, qr/received smart shutdown request/, $offset);
        my $pids = "SELECT coalesce(string_agg(pid::text, ' '), '') FROM outbox_stat_worker WHERE phase = 'idle'";
        my %old = map { $_ => 1 } split / /, $client->query_safe($pids);
        $client->query_safe($evict);
        wait_until(sub { my @now = split / /, $client->query_safe($pids); @now && !grep { $old{$_} } @now }, what => 'other workers');
        is($e->count->{received}, 0, 'workers that are evicted send nothing');
        $client->quit;
        ok($stop->finish, 'the client leaves, and the server stops');
        $node->{_pid} = undef;
        $node->append_conf('postgresql.conf', "outbox_relay.enabled = off\n");
        $node->start;
        is(value($node, "SELECT count(*) FROM $table"), $drain ? 0 : 5, $drain ? 'the rows went out' : 'the rows stay');
        go_on();
    };
}

# F-13: what is in flight gets a second, and no attempt is counted for what does not make it
subtest 'in flight at a fast shutdown, without a drain' => sub {
    my $table = table_and_route('flying', url => $e->url('/hang'), concurrency => 4, pass_deadline => '30s');
    stage_many($node, 'flying', 10);
    $e->wait_for_count(4, of => 'inflight');
    my $took = stop_and_look();
    cmp_ok($took, '<', 5, sprintf('the stop took %.1f s', $took));
    is(value($node, "SELECT count(*) || ' ' || sum(attempts) FROM $table"), '10 0', 'all rows are pending, without an attempt');
    is($e->count->{received}, 4, 'no request was started after the signal');
    go_on();
};

# F-15
subtest 'a smart shutdown waits for clients, and relays meanwhile' => sub {
    my $table = table_and_route('smart', interval => '100ms');
    my ($in, $out) = ('', '');
    my $client = IPC::Run::start([ 'psql', '-XAtq', '-d', $node->connstr('postgres') ], '<', \$in, '>&', \$out);
    $in .= "SELECT 'connected';\n";
    $client->pump until $out =~ /connected/;
    my $stop = IPC::Run::start([ 'pg_ctl', '-D', $node->data_dir, '-m', 'smart', '-w', 'stop' ], '<', \undef, '>&', \my $said);
    wait_log($node, qr/received smart shutdown request/, 0);
    $in .= "SELECT outbox_stage('smart', 't', '{}');\n";
    $client->pump_nb while !$e->count->{acked} && $client->pumpable && !select undef, undef, undef, 0.05;
    is($e->count->{acked}, 1, 'an event staged after the request goes out');
    $in .= "\\q\n";
    $client->finish;
    ok($stop->finish, 'then the server stops');
    $node->{_pid} = undef;
    $node->start;
};

# What waits for a lock on outbox_route or on the extension has nothing to finish, and somebody may hold it for ever.
subtest 'a lock that nobody gives back does not hold up an end' => sub {
    my $table = table_and_route('behind_lock');
    my $holder = hold_session($node, 'BEGIN; LOCK TABLE outbox_route IN ACCESS EXCLUSIVE MODE');
    my $waiting = "SELECT count(*) > 0 FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker' AND wait_event_type = 'Lock'";
    value($node, $evict);
    wait_sql($node, 'postgres', $waiting);
    cmp_ok(evict(), '<', 3, 'an eviction');
    $holder->query_safe("PREPARE TRANSACTION 'routes'");
    $holder->quit;
    wait_sql($node, 'postgres', $waiting);
    cmp_ok(stop_and_look(), '<', 4, 'a fast shutdown, outbox_route locked by a prepared transaction');
    value($node, "ROLLBACK PREPARED 'routes'");
    go_on();

    table_and_route('behind_drop', drain_on_shutdown => 1, interval => '100ms');
    value($node, "BEGIN; DROP EXTENSION outbox_relay; PREPARE TRANSACTION 'drop'");
    wait_sql($node, 'postgres', $waiting);
    cmp_ok(stop_and_look(), '<', 5, 'and the extension, with a route to drain');
    value($node, "ROLLBACK PREPARED 'drop'");
    go_on();
};

# SCH-15
subtest 'a drain that leaves its last pass no time is called out' => sub {
    my $offset = log_offset($node);
    set_conf($node, 'outbox_relay.shutdown_drain_timeout' => '4s', 'outbox_relay.pass_statement_timeout' => '1s');
    wait_log($node, qr/WARNING:.*shutdown_drain_timeout is below five times/, $offset);
    pass('a WARNING at load');
};

# SHD-08 beyond max_lanes: of two workers one drains what has no slot, a route's rows and a tenant's alike, each once.
subtest 'lanes without a slot' => sub {
    set_conf($node, 'outbox_relay.max_lanes' => 16, 'outbox_relay.shutdown_drain_timeout' => '30s', 'outbox_relay.pass_statement_timeout' => undef);
    $node->restart;
    make_outbox($node, 'postgres', 'app.several', tenants => 1);
    $node->safe_psql('postgres', q{CREATE FUNCTION app.thirty() RETURNS SETOF uuid LANGUAGE sql STABLE AS
        $$SELECT ('00000000-0000-4000-8000-' || lpad(g::text, 12, '0'))::uuid FROM generate_series(1, 30) g$$});
    create_route($node, 'tenants', 'app.several', $e->url, tenants_function => 'app.thirty', drain_on_shutdown => 1);
    wait_sql($node, 'postgres', 'SELECT passes > 0 FROM outbox_stat_route WHERE tenant_id IS NULL');
    make_outbox($node, 'postgres', 'app.routes');
    create_route($node, "route$_", 'app.routes', $e->url, drain_on_shutdown => 1) for 1 .. 30;
    wait_log($node, qr/max_lanes is used up/, 0);
    # Nobody wakes for these, and the next turns are within the hour.
    insert_rows($node, 'app.routes', "route$_", 2) for 1 .. 30;
    $node->safe_psql('postgres', q{INSERT INTO app.several (id, outbox_route, event_id, event_type, payload, occurred_at, created_at, status, attempts, tenant_id)
        SELECT gen_random_uuid(), 'tenants', gen_random_uuid(), 't', '{}', now(), now(), 'pending', 0, t FROM app.thirty() t, generate_series(1, 2)});
    my $left = value($node, 'SELECT (SELECT count(*) FROM app.several) + (SELECT count(*) FROM app.routes)');
    cmp_ok($left, '>', 60, "$left rows wait for the stop");
    stop_and_look();
    is(value($node, 'SELECT count(*) FROM app.routes'), 0, 'the rows of every route went out');
    is(value($node, 'SELECT count(*) FROM app.several'), 0, 'and those of every tenant');
    is($e->count->{received}, 120, 'each once');
    go_on();
};

done_testing();
