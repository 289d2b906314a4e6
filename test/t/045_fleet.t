# A fleet: relays of other kinds (test/relays) work on the route's rows at the same time as ours, while sessions go on
# staging; one of them dies in the middle; and a table moves from retain to consume storage with all of it running, down to
# the columns that are dropped in the end.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use IPC::Run ();
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;
use OutboxRelay::Wait;

my $events = $ENV{FLEET_EVENTS} || 1500;
my $node = new_node('fleet', conf => "autovacuum = off\n");
my $e = OutboxRelay::Endpoint->start;
my $file = $node->basedir . '/published_elsewhere';
value($node, 'CREATE SCHEMA app; CREATE TABLE app.truth (event_id uuid PRIMARY KEY)');
$node->safe_psql('postgres', 'SET search_path = app; ' . PostgreSQL::Test::Utils::slurp_file("$FindBin::Bin/../relays/others.sql"));
# Two events a transaction, every tenth rolled back; slow enough for all relays to get some.
value($node, <<'SQL');
CREATE PROCEDURE app.stage_load(route text, count int) LANGUAGE plpgsql AS $$
BEGIN
    FOR i IN 1 .. count / 2 LOOP
        WITH staged AS (SELECT outbox_stage(route, 'load', jsonb_build_object('n', i)) AS event_id FROM generate_series(1, 2))
            INSERT INTO app.truth SELECT event_id FROM staged;
        IF i % 10 = 0 THEN ROLLBACK; ELSE COMMIT; END IF;
        PERFORM pg_sleep(0.002);
    END LOOP;
END $$;
SQL

sub table_and_route
{
    my ($name, %columns) = @_;
    $e->reset;
    unlink $file;
    make_outbox($node, 'postgres', "app.$name");
    value($node, 'TRUNCATE app.truth, app.relays_may_run; INSERT INTO app.relays_may_run VALUES (true)');
    create_route($node, $name, "app.$name", $e->url, interval => '50ms', concurrency => 8, max_claim_rows => 50,
        retry_base_delay => '20ms', retry_max_backoff => '200ms', reclaim_stale_after => '1min', %columns);
    return "app.$name";
}

# A psql that runs SQL beside this process; with its output for the case that it fails.
sub run_sql
{
    my ($sql) = @_;
    my $output = '';
    my $run = IPC::Run::start([ 'psql', '-XAtq', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr('postgres'), '-c', 'SET search_path = app, public', '-c', $sql ],
        '<', \undef, '>', \$output, '2>', \$output);
    return { run => $run, output => \$output };
}

sub ends_well
{
    my ($what, @runs) = @_;
    for my $run (@runs)
    {
        $run->{run}->finish or fail($what), diag(${ $run->{output} });
    }
    return;
}

# How often each event was published: by ours, and elsewhere.
sub published
{
    my (%ours, %theirs);
    $ours{ $_->{event_id} }++ for grep { $_->{acked} && $_->{complete} } $e->deliveries;
    if (-e $file) { $theirs{$_}++ for split /\n/, PostgreSQL::Test::Utils::slurp_file($file); }
    return (\%ours, \%theirs);
}

# Nothing lost, nothing invented, and so many published more than once; both kinds did some of the work.
sub judge
{
    my ($what, $most) = @_;
    my ($ours, $theirs) = published();
    my @truth = split /\n/, value($node, 'SELECT event_id FROM app.truth');
    my %known = map { $_ => 1 } @truth;
    my @lost = grep { !$ours->{$_} && !$theirs->{$_} } @truth;
    my @invented = grep { !$known{$_} } keys %$ours, keys %$theirs;
    my $repeats = 0;
    $repeats += ($ours->{$_} // 0) + ($theirs->{$_} // 0) - 1 for grep { $ours->{$_} || $theirs->{$_} } @truth;
    cmp_ok(scalar(@truth), '>', 0, "$what: events committed: " . @truth);
    is_deeply([ \@lost, \@invented ], [ [], [] ], "$what: nothing is lost, nothing invented");
    cmp_ok($repeats, '<=', $most, "$what: $repeats published more than once, of at most $most");
    cmp_ok(scalar(keys %$_), '>', 0, "$what: a share of the work: " . keys %$_) for $ours, $theirs;
    return;
}

sub stop_others { return value($node, 'DELETE FROM app.relays_may_run'); }

# CLM-13, MIG-05: exactly once each, since nobody dies and nobody reclaims what lives.
for my $storage (qw(consume retain))
{
    subtest "ours of $storage beside both kinds" => sub {
        my $table = table_and_route("beside_$storage", storage => $storage);
        my @relays = (
            run_sql("CALL relay_retain('$table', '$file', '1min')"),
            run_sql("CALL relay_consume('$table', '$file')"));
        my @stagers = map { run_sql("CALL stage_load('beside_$storage', $events / 2)") } 1, 2;
        ends_well('staging', @stagers);
        wait_empty($node, $table, endpoint => $e);
        stop_others();
        ends_well('the other relays', @relays);
        judge($storage, 0);
        is(value($node, "SELECT count(*) FROM $table WHERE status NOT IN ('published')"), 0, 'what is left is published');
        value($node, "UPDATE outbox_route SET enabled = false WHERE name = 'beside_$storage'");
    };
}

# A relay of the retain kind that dies between its claim and its marks: ours brings its rows back.
subtest 'another relay dies' => sub {
    my $table = table_and_route('dying', reclaim_stale_after => '300ms', storage => 'retain');
    my $stager = run_sql("CALL stage_load('dying', $events)");
    for my $round (1 .. 4)
    {
        # Slow between publishing and marking, so that it dies there.
        my $relay = run_sql("CALL relay_retain('$table', '$file', '1min', batch => 20, pause => 0.2)");
        wait_sql($node, 'postgres', "SELECT count(*) > 0 FROM pg_stat_activity WHERE query LIKE 'CALL relay_retain%' AND wait_event = 'PgSleep' AND state = 'active'");
        value($node, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'CALL relay_retain%' AND pid <> pg_backend_pid()");
        $relay->{run}->finish;
    }
    ends_well('staging', $stager);
    wait_empty($node, $table, endpoint => $e);
    # It had published at most its batch when it died.
    judge('dying', 4 * 20);
    cmp_ok(lane($node, 'dying')->{reclaimed}, '>', 0, 'rows of the dead were reclaimed');
    value($node, "UPDATE outbox_route SET enabled = false WHERE name = 'dying'");
};

# MIG-01 to MIG-05, in the seed's three steps, under load all the time.
subtest 'a live table moves from retain to consume' => sub {
    my $table = table_and_route('moving', storage => 'retain', reclaim_stale_after => '1s');
    my $old = run_sql("CALL relay_retain('$table', '$file', '1min', pause => 0.02)");
    my $stager = run_sql("CALL stage_load('moving', 4 * $events)");
    wait_sql($node, 'postgres', "SELECT count(*) > 200 FROM $table WHERE status = 'published'");
    cmp_ok(value($node, "SELECT count(*) FROM $table"), '>', 0, 'retain at work');

    # 1. Ours turns to consume; the old relay goes on for a while, then it is killed in the middle.
    value($node, "UPDATE outbox_route SET storage = 'consume' WHERE name = 'moving'");
    my $before = lane($node, 'moving')->{published};
    wait_lane($node, 'moving', "published > $before + 100");
    wait_sql($node, 'postgres', "SELECT count(*) > 0 FROM $table WHERE status = 'processing'");
    value($node, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE query LIKE 'CALL relay_retain%' AND pid <> pg_backend_pid()");
    $old->{run}->finish;
    my $killed_at = value($node, 'SELECT clock_timestamp()');
    # 2. The retention job goes on; 3. no processing row is left: reclaim off, and when no published row is, the columns go.
    wait_sql($node, 'postgres', "WITH gone AS (DELETE FROM $table WHERE status = 'published' AND published_at < '$killed_at' RETURNING 1)
        SELECT NOT EXISTS (SELECT FROM $table WHERE status IN ('processing', 'published')) AND NOT EXISTS (SELECT FROM gone)");
    value($node, "UPDATE outbox_route SET reclaim_stale_after = '0' WHERE name = 'moving'");
    is(value($node, "SELECT count(*) FROM pg_stat_activity WHERE query LIKE 'CALL stage_load%' AND pid <> pg_backend_pid()"), 1, 'events are still being staged');
    wait_until(
        sub { (eval { value($node, "SET lock_timeout = '200ms'; ALTER TABLE $table DROP COLUMN processing_at, DROP COLUMN published_at; SELECT 'done'") } // '') eq 'done' },
        what => 'the columns to be dropped');
    my $at_drop = value($node, 'SELECT count(*) FROM app.truth');
    wait_sql($node, 'postgres', "SELECT count(*) > $at_drop + 100 FROM app.truth");
    ends_well('staging', $stager);
    wait_empty($node, $table, endpoint => $e);
    is(value($node, "SELECT count(*) FROM $table"), 0, 'nothing is left, and none has failed');
    # The old relay had published at most a chunk when it was killed.
    judge('moving', 32);
    is(lane($node, 'moving')->{failed_passes}, 0, 'no pass of ours failed');
};

done_testing();
