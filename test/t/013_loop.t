# The loop: when lanes run, how they are woken, how they back off, what stops and starts them, and what the
# statistics say of it.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use List::Util qw(min max sum);
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $node = new_node('loop', conf => "autovacuum = off\noutbox_relay.workers = 1\n");
my $e = OutboxRelay::Endpoint->start;

# Fresh table app.NAME with a route of that name.
sub table_and_route
{
    my ($name, %columns) = @_;
    make_outbox($node, 'postgres', "app.$name");
    create_route($node, $name, "app.$name", delete $columns{url} // $e->url, retry_base_delay => '50ms', %columns);
    return "app.$name";
}

sub deliveries { return sort { $a->{n} <=> $b->{n} } $e->deliveries; }

sub wait_for_event
{
    my ($id) = @_;
    return $e->wait_until(sub { (grep { $_->{acked} && $_->{event_id} eq $id } deliveries())[0] }, what => "event $id");
}

# Seconds from just before the commit of one event to its arrival.
sub latency
{
    my ($route) = @_;
    my ($id, $at) = split /\n/, $node->safe_psql('postgres',
        "BEGIN; SELECT outbox_stage('$route', 't', '{}'); SELECT extract(epoch FROM clock_timestamp()); COMMIT;");
    return wait_for_event($id)->{head_at} - $at;
}

# Makes each pass that has published something fail in its settling, and note the time in the server log.
sub break_settling
{
    my ($table) = @_;
    $node->safe_psql('postgres', <<"SQL");
CREATE FUNCTION ${table}_fail() RETURNS trigger LANGUAGE plpgsql AS \$\$ BEGIN
    RAISE LOG 'settling of % at %', TG_TABLE_NAME, extract(epoch FROM clock_timestamp());
    RAISE EXCEPTION 'broken on purpose';
END \$\$;
CREATE TRIGGER broken BEFORE DELETE ON $table FOR EACH STATEMENT EXECUTE FUNCTION ${table}_fail();
SQL
    return;
}

# The times of the settlings that failed in the log since an offset, once there are `count`.
sub settlings
{
    my ($table, $offset, $count) = @_;
    my $name = $table =~ s/.*\.//r;
    my @at;
    wait_until(sub { @at = log_since($node, $offset) =~ /settling of $name at ([\d.]+)$/mg; @at >= $count },
        what => "$count failed passes of $table", diag => sub { log_tail($node) });
    return @at[ 0 .. $count - 1 ];
}

# LOOP-07; an idle lane's latency
subtest 'a commit wakes its lane' => sub {
    table_and_route('wake', interval => '1h');
    wait_lane($node, 'wake', "passes > 0 AND state = 'idle'");
    my @latency = sort { $a <=> $b } map { latency('wake') } 1 .. 20;
    note sprintf 'latency p50 %.1f ms, worst %.1f ms', 1000 * $latency[10], 1000 * $latency[19];
    cmp_ok($latency[19], '<', 0.2, 'within 200 ms at an interval of an hour');
};

# LOOP-02, LOOP-03
subtest 'a tick goes on until a short claim, at most max_batches_per_tick' => sub {
    my $table = table_and_route('batches', interval => '1h', max_claim_rows => 10);
    my $before = wait_lane($node, 'batches', "passes > 0 AND state = 'idle'");
    stage_many($node, 'batches', 33);
    my $after = wait_lane($node, 'batches', "published = 33 AND state = 'idle'");
    is($after->{passes} - $before->{passes}, 4, '33 rows, 10 a pass: four claims');
    set_conf($node, 'outbox_relay.max_batches_per_tick' => 5);
    table_and_route('other', url => $e->url('/ok?other'), interval => '1h', max_claim_rows => 10);
    wait_lane($node, 'other', "passes > 0 AND state = 'idle'");
    $e->reset;
    $node->safe_psql('postgres', join ';', 'BEGIN', (map { "SELECT outbox_stage('$_', 't', '{}') FROM generate_series(1, 100)" }
            qw(batches other)), 'COMMIT');
    $e->wait_for_count(200);
    my @runs;
    for my $request (sort { $a->{n} <=> $b->{n} } $e->requests)
    {
        push @runs, [ $request->{target}, 0 ] if !@runs || $runs[-1][0] ne $request->{target};
        $runs[-1][1]++;
    }
    is(join(' ', map { $_->[1] } @runs), '50 50 50 50', 'a full tick of five passes, then the other lane');
    set_conf($node, 'outbox_relay.max_batches_per_tick' => undef);
};

# LOOP-06
subtest 'ticks are jittered' => sub {
    table_and_route('jitter', interval => '200ms');
    my ($passes, @waits) = (0);
    for (1 .. 20)
    {
        my $lane = wait_lane($node, 'jitter', "passes > $passes AND state = 'idle'");
        $passes = $lane->{passes};
        push @waits, $lane->{due_at} - $lane->{last_pass_at};
    }
    cmp_ok(min(@waits), '>=', 0.155, 'not before 80 %');
    cmp_ok(max(@waits), '<=', 0.250, 'not after 120 %');
    cmp_ok(max(@waits) - min(@waits), '>', 0.01, 'and not always the same');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'jitter'");
};

# BKO-01, BKO-02, BKO-04, BKO-05, BKO-07
subtest 'a failing lane backs off, and no wake shortens it' => sub {
    my $table = table_and_route('broken', interval => '150ms', retry_max_backoff => '600ms', max_claim_rows => 2);
    break_settling($table);
    my $offset = log_offset($node);
    stage_many($node, 'broken', 4);
    my @other;
    for my $count (1 .. 5)
    {
        settlings($table, $offset, $count);
        stage($node, 'broken');
        push @other, latency('wake');
    }
    my @at = settlings($table, $offset, 6);
    my @expected = (0.15, 0.3, 0.6, 0.6, 0.6);
    for my $i (0 .. $#expected)
    {
        my $gap = $at[ $i + 1 ] - $at[$i];
        cmp_ok($gap, '>=', $expected[$i], sprintf 'failure %d: waits %.2f s, %.3f in fact', $i + 1, $expected[$i], $gap);
        cmp_ok($gap, '<', $expected[$i] + 0.25, 'no longer');
    }
    cmp_ok(max(@other), '<', 0.2, 'another lane keeps its latency meanwhile');
    my $lane = wait_lane($node, 'broken', "state = 'backoff' AND consecutive_failures >= 6");
    cmp_ok($lane->{backoff_until}, '>', $lane->{last_pass_at}, 'the view shows until when');
    is($lane->{due_at}, $lane->{backoff_until}, 'which is when it is due');
    like($lane->{last_error}, qr/broken on purpose/, 'and why');
    is_deeply([ @$lane{qw(passes published)} ], [ 1, 0 ], 'nothing counts as done');

    # BKO-03
    $node->safe_psql('postgres', "ALTER TABLE $table DISABLE TRIGGER broken");
    wait_empty($node, $table, all => 1);
    is(wait_lane($node, 'broken', "state = 'idle'")->{consecutive_failures}, 0, 'a good pass resets it');
    $node->safe_psql('postgres', "ALTER TABLE $table ENABLE TRIGGER broken");
    $offset = log_offset($node);
    stage($node, 'broken');
    @at = settlings($table, $offset, 2);
    cmp_ok(abs($at[1] - $at[0] - 0.27), '<', 0.125, 'and the next failure waits one interval again');
    $node->safe_psql('postgres', "DROP TRIGGER broken ON $table; DELETE FROM outbox_route WHERE name = 'broken'");
};

# BKO-02 where the interval is the larger of the two, BKO-09
subtest 'backoff outlives the worker' => sub {
    my $table = table_and_route('outlives', interval => '1500ms', retry_max_backoff => '100ms');
    break_settling($table);
    my $offset = log_offset($node);
    stage($node, 'outlives');
    settlings($table, $offset, 1);
    wait_lane($node, 'outlives', "state = 'backoff'");
    my $pid = kill_worker($node, 'postgres', 'TERM');
    wait_for_worker($node, 'postgres', not => $pid);
    my @at = settlings($table, $offset, 3);
    for my $gap ($at[1] - $at[0], $at[2] - $at[1])
    {
        cmp_ok($gap, '>=', 1.5, 'an interval');
        cmp_ok($gap, '<', 2.3, 'and no more, though a worker went and another came');
    }
    $node->safe_psql('postgres', "DROP TRIGGER broken ON $table");
    wait_empty($node, $table, all => 1);
    is(lane($node, 'outlives')->{failed_passes}, 3, 'the failures are still counted');
};

# LOOP-05
subtest 'no error ends the loop' => sub {
    my $table = table_and_route('alive', interval => '20ms', retry_base_delay => '20ms', retry_max_backoff => '20ms');
    my $pid = wait_for_worker($node, 'postgres');
    my @codes = (qw(57014 57P01 57P05 25P03 40001 40P01 53200 53100 55P03 08006 XX000 XX001 XX002 0A000 P0001 22P05),
        map { sprintf 'T%04d', $_ } 1 .. 84);
    my $codes = sql_literal(\@codes);
    $node->safe_psql('postgres', <<"SQL");
CREATE SEQUENCE app.errors;
CREATE FUNCTION app.fail() RETURNS trigger LANGUAGE plpgsql AS \$\$ DECLARE n int := nextval('app.errors'); BEGIN
    IF n <= 100 THEN RAISE EXCEPTION 'error %', n USING ERRCODE = (${codes}::text[])[n]; END IF;
    RETURN NULL;
END \$\$;
CREATE TRIGGER fail BEFORE DELETE ON $table FOR EACH STATEMENT EXECUTE FUNCTION app.fail();
SQL
    stage($node, 'alive');
    wait_empty($node, $table, all => 1);
    is(lane($node, 'alive')->{failed_passes}, 100, 'a hundred errors');
    for my $point (qw(after_begin after_claim after_publish before_settle in_settle before_commit))
    {
        my $offset = log_offset($node);
        set_conf($node, 'outbox_relay.fault_point' => "$point=error");
        stage($node, 'alive');
        wait_log($node, qr/fault point $point reached/, $offset);
        set_conf($node, 'outbox_relay.fault_point' => undef);
        wait_empty($node, $table, all => 1);
        pass("an error at $point");
    }
    my %harm = (
        "ALTER TABLE $table RENAME TO moved" => 'ALTER TABLE app.moved RENAME TO alive',
        "ALTER TABLE $table RENAME status TO state" => "ALTER TABLE $table RENAME state TO status",
        "ALTER TABLE $table ALTER attempts TYPE text" => "ALTER TABLE $table ALTER attempts TYPE int USING attempts::int");
    for my $harm (sort keys %harm)
    {
        my $before = lane($node, 'alive')->{failed_passes};
        $node->safe_psql('postgres', $harm);
        wait_lane($node, 'alive', "failed_passes >= $before + 2 AND last_error IS NOT NULL", what => $harm);
        $node->safe_psql('postgres', $harm{$harm});
        wait_for_event(stage($node, 'alive'));
        pass($harm);
    }
    is(worker_pid($node, 'postgres'), $pid, 'one and the same worker all along');
    $node->safe_psql('postgres', "UPDATE outbox_route SET \"interval\" = '1h' WHERE name = 'alive'");
};

# LOOP-08
subtest 'routes are paused, resumed, changed and deleted; the server switch' => sub {
    my $table = table_and_route('switched', interval => '100ms');
    my $set = sub { $node->safe_psql('postgres', "UPDATE outbox_route SET $_[0] WHERE name = 'switched'") };
    $set->('enabled = false');
    wait_lane($node, 'switched', "state = 'paused'");
    my $id = stage($node, 'switched');
    latency('wake') for 1 .. 2;
    is(value($node, "SELECT count(*) FROM $table"), 1, 'paused: the row stays');
    $set->('enabled = true');
    wait_for_event($id);
    pass('resumed: it goes out');
    $set->('url = ' . sql_literal($e->url('/ok?changed')));
    stage($node, 'switched');
    $e->wait_until(sub { (grep { $_->{target} eq '/ok?changed' } $e->requests)[0] }, what => 'the new url');
    pass('a changed url holds from the next pass on');
    my $pid = worker_pid($node, 'postgres');
    set_conf($node, 'outbox_relay.enabled' => 'off');
    wait_until(sub { !worker_pids($node, 'postgres') }, what => 'the workers to go');
    $id = stage($node, 'switched');
    set_conf($node, 'outbox_relay.enabled' => undef);
    wait_for_event($id);
    isnt(wait_for_worker($node, 'postgres'), $pid, 'off and on again');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'switched'");
    my ($left) = insert_rows($node, $table, 'switched', 1);
    wait_sql($node, 'postgres', "SELECT NOT EXISTS (SELECT FROM outbox_stat_route WHERE route = 'switched')");
    latency('wake') for 1 .. 2;
    is(value($node, "SELECT event_id || status FROM $table"), "${left}pending", 'a deleted route touches nothing');
};

# LOOP-09
subtest 'settings follow a reload; the number of workers' => sub {
    table_and_route('reload');
    my $lane = wait_lane($node, 'reload', "passes > 0 AND state = 'idle'");
    cmp_ok($lane->{due_at} - $lane->{now}, '>', 2, 'the default interval');
    set_conf($node, 'outbox_relay.interval' => '50ms');
    wait_passes($node, 'reload', 5, timeout => 15);
    pass('a shorter one holds after a reload');
    set_conf($node, 'outbox_relay.interval' => undef);
    $node->reload for 1 .. 3;
    $node->safe_psql('postgres', 'UPDATE outbox_route SET enabled = enabled') for 1 .. 3;
    latency('wake') for 1 .. 2;
    is(scalar(worker_pids($node, 'postgres')), 1, 'being told again and again makes no second worker');
    set_conf($node, 'outbox_relay.workers' => 3);
    wait_until(sub { worker_pids($node, 'postgres') == 3 }, what => 'three workers');
    pass('three when asked for');
    set_conf($node, 'outbox_relay.workers' => undef);
    wait_until(sub { worker_pids($node, 'postgres') == 1 }, what => 'one worker again');
    cmp_ok(latency('wake'), '<', 0.2, 'and one again, which wakes as before');
};

# outbox_stat_route and outbox_stat_worker tell the truth
subtest 'statistics' => sub {
    my $table = table_and_route('seen', url => $e->url('/hang'), interval => '1h', pass_deadline => '30s');
    wait_lane($node, 'seen', "passes = 1 AND state = 'idle'");
    stage_many($node, 'seen', 3);
    $e->wait_for_count(3, of => 'inflight');
    my $lane = wait_lane($node, 'seen', "state = 'running' AND in_flight = 3");
    my ($worker) = value($node, "SELECT pid, database, phase, since > now() - interval '10 s' FROM outbox_stat_worker WHERE route = 'seen'");
    like($worker, qr/^\d+\|postgres\|publish\|t$/, 'who works on it and how far it is');
    my ($pid) = $worker =~ /^(\d+)/;
    is(value($node, "SELECT backend_type || ' ' || query FROM pg_stat_activity WHERE pid = $pid"),
        'outbox_relay worker outbox_relay: publish', 'pg_stat_activity says the same');
    # Before 17 an extension has no names for its waits.
    my $waits = $node->pg_version >= 17 ? 'OutboxRelayPublish' : 'Extension';
    wait_sql($node, 'postgres', "SELECT wait_event_type = 'Extension' AND wait_event = '$waits' FROM pg_stat_activity WHERE pid = $pid");
    pass('and what it waits for');
    is(value($node, "SELECT count(*) FROM outbox_stat_worker w JOIN pg_stat_activity a USING (pid)
        WHERE a.backend_type = CASE WHEN phase = 'launcher' THEN 'outbox_relay launcher' ELSE 'outbox_relay worker' END"),
        2, 'launcher and worker are listed');
    $e->release;
    $lane = wait_lane($node, 'seen', "state = 'idle' AND published = 3");
    is_deeply([ @$lane{qw(passes failed_passes claimed failed retried refused in_flight breaker)} ],
        [ 2, 0, 3, 0, 0, 0, 0, 'closed' ], 'counters');
    is($lane->{bytes_published}, sum(map { length '{"n": 1}' } 1 .. 3), 'bytes of the bodies');
    is(sum(@{ $lane->{latency_buckets} }), 3, 'three requests in the histogram');
    cmp_ok($lane->{latency_p50_ms}, '<=', $lane->{latency_p99_ms}, 'quantiles');
    # A quantile is as exact as its bucket is wide: a factor of 2^(1/3).
    cmp_ok($lane->{latency_p50_ms}, '<=', 1.26 * ($lane->{last_pass_ms} + 1), 'within the pass');
    cmp_ok(abs($lane->{now} - $lane->{last_pass_at}), '<', 10, 'the time of the pass');
    is($lane->{last_error}, undef, 'no error');
    $node->safe_psql('postgres', 'SELECT outbox_stat_reset()');
    is_deeply([ @{ lane($node, 'seen') }{qw(passes claimed published bytes_published)} ], [ 0, 0, 0, 0 ], 'reset');
};

subtest 'ALTER DATABASE reaches the workers' => sub {
    make_outbox($node, 'postgres', 'app.altered');
    create_route($node, 'altered', 'app.altered', $e->url, interval => '100ms');
    wait_for_worker($node, 'postgres');
    $node->safe_psql('postgres', 'ALTER DATABASE postgres SET outbox_relay.max_claim_rows = 3');
    wait_until(
        sub {
            insert_rows($node, 'app.altered', 'altered', 12);
            my $before = lane($node, 'altered');
            wait_empty($node, 'app.altered', all => 1);
            my $after = lane($node, 'altered');
            my $passes = $after->{passes} - $before->{passes};
            $passes >= 4;
        },
        what => 'passes of three rows', timeout => 20);
    pass('without a restart of the server');
    $node->safe_psql('postgres', 'ALTER DATABASE postgres RESET outbox_relay.max_claim_rows');
};

# LOOP-01, LOOP-10
subtest 'stop and start of the server' => sub {
    my $table = table_and_route('restart', url => $e->url('/script/restart'), interval => '1h', concurrency => 1,
        max_claim_rows => 10, pass_deadline => '30s', enabled => 'false');
    insert_rows($node, $table, 'restart', 30);
    $e->reset;
    $e->script('restart', { hang => 1, status => 200 });
    $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = 'restart'");
    $e->wait_for_inflight;
    $node->append_conf('postgresql.conf', 'outbox_relay.enabled = off');
    $node->stop('fast');
    is($e->count->{received}, 1, 'stopped in the first batch: no request is begun, no batch opened');
    $node->start;
    is(value($node, "SELECT count(*), sum(attempts), count(available_at) FROM $table"), '30|0|0', 'every row as it was');
    my $start = value($node, 'SELECT extract(epoch FROM clock_timestamp())');
    $node->adjust_conf('postgresql.conf', 'outbox_relay.enabled', 'on');
    $node->restart;
    wait_empty($node, $table, all => 1);
    my ($first) = grep { $_->{acked} } deliveries();
    cmp_ok($first->{head_at} - $start, '<', 15, 'the first tick comes at the start, not after an interval');
};

done_testing();
