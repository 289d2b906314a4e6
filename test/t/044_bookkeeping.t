# Bookkeeping under bad conditions: marks that are slow, fail or wait for locks, a log that changes under load, partition
# DDL that queues in front of the log's inserts, other relays that reclaim what is still being sent.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;
use OutboxRelay::Oracle;
use OutboxRelay::Wait;

my $node = new_node('bookkeeping', conf => "autovacuum = off\n");
my $e = OutboxRelay::Endpoint->start;
value($node, 'CREATE SCHEMA app');

sub table_and_route
{
    my ($name, %columns) = @_;
    $e->reset;
    make_outbox($node, 'postgres', "app.$name");
    create_route($node, $name, "app.$name", delete $columns{url} // $e->url, interval => '100ms', retry_base_delay => '50ms', retry_max_backoff => '400ms', %columns);
    return "app.$name";
}

# The table and the log that outbox_ddl gives, the days from yesterday on attached.
sub make_log
{
    my ($name, @days) = @_;
    value($node, "DO \$\$ DECLARE s text; BEGIN FOR s IN SELECT d FROM outbox_ddl('app.unused', delivery_log => 'app.$name') d WHERE d LIKE '%$name%' LOOP EXECUTE s; END LOOP; END \$\$");
    for my $day (@days)
    {
        value($node, "CREATE TABLE app.${name}_$day (LIKE app.$name)");
        my $bounds = value($node, "SELECT format('FROM (%L) TO (%L)', d, d + interval '1 day') FROM (SELECT date_trunc('day', now()) + interval '1 day' * ($day - 100)) AS s (d)");
        value($node, "ALTER TABLE app.$name ATTACH PARTITION app.${name}_$day FOR VALUES $bounds");
    }
    return "app.$name";
}

sub oracle
{
    my ($table, @ids) = @_;
    return OutboxRelay::Oracle->new(node => $node, relation => $table, endpoint => $e, truth => \@ids);
}

sub pause_route { return value($node, "UPDATE outbox_route SET enabled = false WHERE name = '$_[0]'"); }

# B-10
subtest 'marks slower than pass_statement_timeout allows for 32 rows, a reclaim sooner than a pass ends' => sub {
    my $table = table_and_route('slow_marks', storage => 'retain', reclaim_stale_after => '500ms', enabled => 0);
    value($node, "CREATE FUNCTION app.slow() RETURNS trigger LANGUAGE plpgsql AS \$\$ BEGIN PERFORM pg_sleep(0.05); RETURN NEW; END \$\$;
        CREATE TRIGGER slow BEFORE UPDATE ON $table FOR EACH ROW WHEN (NEW.status = 'published') EXECUTE FUNCTION app.slow()");
    my @ids = stage_many($node, 'slow_marks', 120);
    value($node, "UPDATE outbox_route SET enabled = true WHERE name = 'slow_marks'");
    # Passes on demand, which reclaim as well, take nothing of what the live pass holds.
    wait_sql($node, 'postgres', "SELECT count(*) > 0 FROM $table WHERE status = 'processing' AND processing_at < now() - interval '1 s'");
    is(value($node, "SELECT reclaimed FROM outbox_relay_pass('slow_marks', 1)"), 0, 'rows of the live pass are not stale');
    wait_empty($node, $table, endpoint => $e);
    is(value($node, "SELECT count(*) FROM $table WHERE status = 'published'"), 120, 'all are published');
    my $oracle = oracle($table, @ids);
    $oracle->check_nothing_lost;
    $oracle->check_duplicates_at_most(0);
    my $lane = lane($node, 'slow_marks');
    is_deeply([ @$lane{qw(reclaimed failed_passes)} ], [ 0, 0 ], 'nothing was rescued, and no pass failed');
};

subtest 'one row that can not be marked costs no other its mark' => sub {
    my $table = table_and_route('one_bad', storage => 'retain', interval => '1h', concurrency => 1, enabled => 0);
    my @ids = stage_many($node, 'one_bad', 50);
    value($node, "ALTER TABLE $table ADD CONSTRAINT not_this CHECK (status <> 'published' OR event_id <> '$ids[20]');
        UPDATE outbox_route SET enabled = true WHERE name = 'one_bad'");
    my $lane = wait_lane($node, 'one_bad', 'failed_passes = 1');
    like($lane->{last_error}, qr/not_this/, 'the error is shown');
    is(value($node, "SELECT string_agg(status || ' ' || n, ', ' ORDER BY status) FROM (SELECT status, count(*) AS n FROM $table GROUP BY 1) s"),
        'processing 1, published 49', 'the others have their marks');

    # The same of retries: the mark of one fails, the others keep their attempt.
    my $failing = table_and_route('one_bad_retry', storage => 'retain', interval => '1h', url => $e->url('/status/500'), breaker_threshold => 0, retry_base_delay => '1h', retry_max_backoff => '1h', enabled => 0);
    @ids = stage_many($node, 'one_bad_retry', 9);
    value($node, "ALTER TABLE $failing ADD CONSTRAINT not_this CHECK (attempts = 0 OR event_id <> '$ids[4]');
        UPDATE outbox_route SET enabled = true WHERE name = 'one_bad_retry'");
    wait_lane($node, 'one_bad_retry', 'failed_passes = 1');
    is(value($node, "SELECT string_agg(status || ' ' || attempts || ' ' || n, ', ' ORDER BY status) FROM (SELECT status, attempts, count(*) AS n FROM $failing GROUP BY 1, 2) s"),
        'pending 1 8, processing 0 1', 'the others are rescheduled');
};

# What was sent and could not be marked is marked as soon as that is possible, and not sent again.
subtest 'a lock on the table while marks are due' => sub {
    my $table = table_and_route('locked', storage => 'retain', url => $e->url('/hang'), pass_statement_timeout => '200ms', pass_deadline => '60s');
    my @ids = stage_many($node, 'locked', 12);
    $e->wait_for_count(12, of => 'inflight');
    my $session = hold_session($node, "BEGIN; LOCK TABLE $table IN SHARE ROW EXCLUSIVE MODE");
    $e->release(1);
    my $lane = wait_lane($node, 'locked', 'failed_passes >= 2');
    like($lane->{last_error}, qr/timeout/, 'passes fail');
    $session->quit;
    wait_empty($node, $table, endpoint => $e);
    $lane = wait_lane($node, 'locked', 'published = 12');
    is($lane->{duplicates_avoided}, 12, 'all twelve are counted as settled without a second request');
    my $oracle = oracle($table, @ids);
    $oracle->check_nothing_lost;
    $oracle->check_duplicates_at_most(0);
};

# CON-19
subtest 'a closing statement that fails is not tried again by its pass' => sub {
    my $table = table_and_route('closed_once', interval => '1h');
    value($node, "CREATE SEQUENCE app.closings; CREATE FUNCTION app.no_closing() RETURNS trigger LANGUAGE plpgsql AS \$\$
        BEGIN PERFORM nextval('app.closings'); RAISE 'no closing'; END \$\$;
        CREATE TRIGGER no_closing BEFORE DELETE ON $table FOR EACH STATEMENT EXECUTE FUNCTION app.no_closing()");
    stage_many($node, 'closed_once', 40);
    my $lane = wait_lane($node, 'closed_once', 'failed_passes > 0');
    is(value($node, 'SELECT last_value FROM app.closings'), $lane->{failed_passes}, 'one statement a pass');
    pause_route('closed_once');
};

# B-11: ours sends for longer than another relay thinks that a live relay may take.
subtest 'another relay reclaims what ours is still sending' => sub {
    my $table = table_and_route('impatient', storage => 'retain', url => $e->url('/hang'), pass_deadline => '60s', pass_statement_timeout => '1s');
    my @ids = stage_many($node, 'impatient', 5);
    $e->wait_for_count(5, of => 'inflight');
    # The other relay's reclaim, claim, publish and mark.
    value($node, "UPDATE $table SET status = 'pending', processing_at = NULL WHERE status = 'processing' AND processing_at < now();
        UPDATE $table SET status = 'processing', processing_at = clock_timestamp() WHERE status = 'pending';
        UPDATE $table SET status = 'published', published_at = '2026-01-01' WHERE status = 'processing' AND event_id <> '$ids[0]'");
    # Ours is told to leave in the middle of it, as in a restart.
    my $pid = $node->safe_psql('postgres', "SELECT pid FROM outbox_stat_worker WHERE route = 'impatient'");
    value($node, "UPDATE outbox_route SET url = '" . $e->url . "' WHERE name = 'impatient'; SELECT pg_terminate_backend($pid)");
    wait_until(sub { !kill 0, $pid }, what => 'the worker to leave');
    is(value($node, "SELECT string_agg(status, ' ' ORDER BY id) FROM $table"), 'processing published published published published', 'the other\'s states stay');
    value($node, "UPDATE $table SET status = 'published', published_at = '2026-01-01' WHERE status = 'processing'");
    wait_passes($node, 'impatient', 2);
    is(value($node, "SELECT count(*) FROM $table WHERE published_at = '2026-01-01' AND attempts = 0 AND last_error IS NULL"), 5, 'each is published once, none failed');
    oracle($table, @ids)->check_duplicates_at_most(5, undef, per_event => 1);
};

# B-22
subtest 'the log gets a column that nobody fills' => sub {
    my $log = make_log('drifting', 100);
    my $table = table_and_route('drift', delivery_log => $log);
    my @ids = stage_many($node, 'drift', 200);
    wait_sql($node, 'postgres', "SELECT count(*) > 0 FROM $log");
    value($node, "ALTER TABLE $log ADD COLUMN region text NOT NULL DEFAULT 'x'; ALTER TABLE $log ALTER COLUMN region DROP DEFAULT");
    push @ids, stage_many($node, 'drift', 20) for 1 .. 5;
    my $lane = wait_lane($node, 'drift', 'consecutive_failures >= 3');
    like($lane->{last_error}, qr/column "region" of delivery log app.drifting is NOT NULL and has no default/, 'the error names the log and the column');
    wait_sql($node, 'postgres', "SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker' AND state = 'active'");
    pass('no session piles up');
    value($node, "ALTER TABLE $log DROP COLUMN region");
    wait_empty($node, $table, all => 1, endpoint => $e);
    my $oracle = oracle($table, @ids);
    $oracle->check_nothing_lost;
    # The column may come between a pass's look and its insert: then its rows are remembered, not sent again.
    $oracle->check_duplicates_at_most(0);
    is(value($node, "SELECT count(*) || ' ' || count(DISTINCT event_id) FROM $log"), '300 300', 'each is logged once');

    # What no look finds: the insert itself fails.
    value($node, "ALTER TABLE $log ADD CONSTRAINT nothing_more CHECK (outbox_route <> 'drift') NOT VALID");
    my @more = stage_many($node, 'drift', 10);
    $lane = wait_lane($node, 'drift', 'consecutive_failures >= 3');
    like($lane->{last_error}, qr/"drifting_100" violates check constraint "nothing_more"/, 'the error names partition and constraint');
    value($node, "ALTER TABLE $log DROP CONSTRAINT nothing_more");
    wait_empty($node, $table, all => 1, endpoint => $e);
    $oracle = oracle($table, @ids, @more);
    $oracle->check_nothing_lost;
    $oracle->check_duplicates_at_most(0);
    is(value($node, "SELECT count(*) || ' ' || count(DISTINCT event_id) FROM $log"), '310 310', 'each is logged once');
};

# B-27, LOG-10
subtest 'DDL that waits for a lock on the log holds up that route alone' => sub {
    my $log = make_log('queued', 99, 100, 101);
    my $table = table_and_route('queued_route', delivery_log => $log, pass_statement_timeout => '300ms');
    my $other = table_and_route('not_queued', pass_statement_timeout => '300ms');
    my $reader = hold_session($node, "BEGIN; SELECT count(*) FROM (SELECT 1 FROM $log LIMIT 1) s");
    my $dropper = $node->background_psql('postgres', on_error_stop => 0);
    $dropper->query_until(qr/^going$/m, "\\echo going\nDROP TABLE app.queued_99;\n");
    wait_sql($node, 'postgres', "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted AND relation = '$log'::regclass");
    my @ids = stage_many($node, 'queued_route', 100);
    stage_many($node, 'not_queued', 10);
    my $lane = wait_lane($node, 'queued_route', 'consecutive_failures >= 2');
    like($lane->{last_error}, qr/timeout while waiting for a lock on app\.queued/, 'the lane says what it waits for');
    wait_empty($node, $other, all => 1);
    is(lane($node, 'not_queued')->{failed_passes}, 0, 'the other route goes on');
    is(value($node, "SELECT count(*) FROM $table WHERE attempts = 0 AND status = 'pending'"), 100, 'no row has changed');
    $reader->quit;
    wait_empty($node, $table, all => 1);
    $dropper->quit;
    my $oracle = oracle($table, @ids);
    $oracle->check_nothing_lost;
    $oracle->check_duplicates_at_most(0);
    is(value($node, "SELECT to_regclass('app.queued_99') IS NULL"), 't', 'the partition is gone');

    for my $ddl ("CREATE TABLE app.queued_new PARTITION OF $log FOR VALUES FROM ('2099-01-01') TO ('2099-01-02')",
        "ALTER TABLE $log DETACH PARTITION app.queued_101", 'DROP TABLE app.queued_101')
    {
        my ($what) = $ddl =~ /^(\w+ \w+).*?(?:PARTITION|$)/;
        my $before = lane($node, 'queued_route')->{failed_passes};
        my $session = hold_session($node, "BEGIN; $ddl");
        stage($node, 'queued_route');
        wait_lane($node, 'queued_route', "failed_passes > $before");
        $session->quit;
        wait_empty($node, $table, all => 1);
        pass("$ddl, held for long, fails passes; then all flows");
    }
    is($e->count->{complete}, 113, 'nothing was sent twice');
};

# LOG-15: what is settled after a boundary goes to the partition of its own time, which is looked for before.
subtest 'a boundary in the middle of a pass' => sub {
    my $log = make_log('edge');
    my $at = value($node, "SELECT now() + interval '3 s'");
    value($node, "DROP TABLE app.edge_default;
        CREATE TABLE app.edge_before PARTITION OF $log FOR VALUES FROM (MINVALUE) TO ('$at');
        CREATE TABLE app.edge_after PARTITION OF $log FOR VALUES FROM ('$at') TO (MAXVALUE)");
    my $table = table_and_route('edge_route', delivery_log => $log, url => $e->url('/hang'), pass_deadline => '30s');
    stage_many($node, 'edge_route', 3);
    $e->wait_for_count(3, of => 'inflight');
    wait_sql($node, 'postgres', "SELECT clock_timestamp() > '$at'");
    $e->release(1);
    wait_empty($node, $table, all => 1);
    is(value($node, "SELECT string_agg(tableoid::regclass::text, ' ') FROM $log"), 'app.edge_after app.edge_after app.edge_after', 'the time of the settling decides');

    pause_route('edge_route');
    $at = value($node, "SELECT now() + interval '20 s'");
    value($node, "DROP TABLE app.edge_after; TRUNCATE app.edge_before; ALTER TABLE $log DETACH PARTITION app.edge_before;
        ALTER TABLE $log ATTACH PARTITION app.edge_before FOR VALUES FROM (MINVALUE) TO ('$at')");
    $e->reset;
    stage_many($node, 'edge_route', 3);
    value($node, "UPDATE outbox_route SET enabled = true, url = '" . $e->url . "' WHERE name = 'edge_route'");
    like(wait_lane($node, 'edge_route', 'failed_passes > 0')->{last_error}, qr/has no partition for/, 'a pass that could end beyond the last partition does not begin');
    is($e->count->{received}, 0, 'nothing was sent');
    value($node, "CREATE TABLE app.edge_rest PARTITION OF $log DEFAULT");
    wait_empty($node, $table, all => 1);
};

done_testing();
