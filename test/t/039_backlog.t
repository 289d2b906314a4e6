# What has piled up: a backlog after an outage (BACKLOG_EVENTS, 30000), rows in front of the claim that nobody is to send
# (PARKED_ROWS, 100000 of each kind), and the dead rows that relaying leaves for autovacuum (VACUUM_EVENTS, 20000).

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use List::Util qw(max sum0);
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $claim = 100;
my $node = new_node('backlog', conf => "outbox_relay.workers = 1\nautovacuum_naptime = 1s\nmax_wal_size = 4GB\n"
      . "outbox_relay.max_claim_rows = $claim\n");

sub sql { return $node->safe_psql('postgres', $_[0]); }

# COUNT rows by one statement, without giving their ids back: there may be millions. Older than what is staged.
sub fill
{
    my ($table, $route, $count, %columns) = @_;
    my %row = (id => \'gen_random_uuid()', outbox_route => $route, event_id => \'gen_random_uuid()', event_type => 'test.event',
        occurred_at => \'now()', payload => \q{jsonb_build_object('n', g)}, status => 'pending',
        created_at => \q{now() - interval '1 day' + g * interval '1 microsecond'}, %columns);
    my @names = sort keys %row;
    sql("INSERT INTO $table (" . join(', ', @names) . ') SELECT ' . join(', ', map { sql_literal($row{$_}) } @names)
          . " FROM generate_series(1, $count) AS g");
    return;
}

# What the server's statistics say of a table.
sub counted
{
    my ($table, $column) = @_;
    return value($node, "SELECT $column FROM pg_stat_user_tables WHERE relid = '$table'::regclass");
}

sub wait_counted
{
    my ($table, $condition, %opts) = @_;
    return wait_sql($node, 'postgres', "SELECT $condition FROM pg_stat_user_tables WHERE relid = '$table'::regclass", timeout => 120,
        diag => sub { value($node, "SELECT s FROM pg_stat_user_tables AS s WHERE relid = '$table'::regclass") }, %opts);
}

# What a process has for itself, in kB.
sub memory { return PostgreSQL::Test::Utils::slurp_file("/proc/$_[0]/status") =~ /^RssAnon:\s+(\d+)/m ? $1 : 0; }

# The most requests that were under way at once, by the endpoint's clock. An answer is noted just after it was sent, when
# the next request may be there already: those of one connection do not overlap, so a little earlier counts for the end.
sub most_at_once
{
    my (@deliveries) = @_;
    my @steps = sort { $a->[0] <=> $b->[0] || $a->[1] <=> $b->[1] } map { ([ $_->{head_at}, 1 ], [ $_->{answer_at}, -1 ]) } @deliveries;
    my ($now, $most) = (0, 0);
    $most = max($most, $now += $_->[1]) for @steps;
    return $most;
}

# F-34: the worker never ends, so it has to report what it did while it runs.
subtest 'autovacuum sees what the relay deletes' => sub {
    my $events = $ENV{VACUUM_EVENTS} // 20_000;
    my $half = int($events / 2);
    my $e = OutboxRelay::Endpoint->start;
    my $table = 'app.vacuumed';
    make_outbox($node, 'postgres', $table);
    sql("ALTER TABLE $table SET (autovacuum_enabled = off)");
    create_route($node, 'vacuumed', $table, $e->url, interval => '200ms');
    my $worker = wait_for_worker($node, 'postgres');
    fill($table, 'vacuumed', $half);
    wait_counted($table, 'n_tup_del > 0 AND n_dead_tup > 0');
    my ($deleted, $left) = (counted($table, 'n_tup_del'), value($node, "SELECT count(*) FROM $table"));
    cmp_ok($left, '>', 0, "$deleted deletions are counted while $left rows wait");
    wait_counted($table, "n_tup_del = $half", what => 'each deletion to be counted');
    cmp_ok(counted($table, 'n_dead_tup'), '>', $half / 2, 'and the dead rows are');
    is(counted($table, 'autovacuum_count'), 0, 'nobody has cleaned up yet');
    # By its deletions alone: insertions do not make it due, nor is a share of the table asked for.
    sql("ALTER TABLE $table SET (autovacuum_enabled = on, autovacuum_vacuum_threshold = 500, autovacuum_vacuum_scale_factor = 0,
        autovacuum_vacuum_insert_threshold = -1, autovacuum_vacuum_cost_delay = 0)");
    fill($table, 'vacuumed', $events - $half);
    wait_counted($table, 'autovacuum_count > 0', what => 'autovacuum to come');
    my $times = counted($table, 'autovacuum_count');
    wait_counted($table, "n_tup_del = $events");
    wait_counted($table, "autovacuum_count > $times AND n_dead_tup < 500", what => 'autovacuum to come for the last deletions too');
    is(wait_for_worker($node, 'postgres'), $worker, 'all by one worker, which is still there');
    is($e->count->{events}, $events, 'each event arrived');
    diag "$events events: autovacuum came " . counted($table, 'autovacuum_count') . ' times';
    sql("DELETE FROM outbox_route WHERE name = 'vacuumed'");
};

# F-84
subtest 'a backlog after an outage' => sub {
    my $events = $ENV{BACKLOG_EVENTS} // 30_000;
    my $concurrency = 16;
    my $e = OutboxRelay::Endpoint->start(max_seconds => 7200);
    my $port = $e->port;
    my $table = 'app.backlog';
    make_outbox($node, 'postgres', $table);
    # One row a pass: how many it settled, in the order of the passes.
    sql(<<"SQL");
CREATE TABLE app.passes (seq bigserial PRIMARY KEY, settled int, at timestamptz DEFAULT clock_timestamp());
CREATE FUNCTION app.passes() RETURNS trigger LANGUAGE plpgsql AS
    \$\$ BEGIN INSERT INTO app.passes (settled) SELECT count(*) FROM gone; RETURN NULL; END \$\$;
CREATE TRIGGER passes AFTER DELETE ON $table REFERENCING OLD TABLE AS gone FOR EACH STATEMENT EXECUTE FUNCTION app.passes();
SQL
    create_route($node, 'backlog', $table, $e->url('/slow?ms=2'), interval => '300ms', retry_base_delay => '100ms', retry_max_backoff => '600ms', concurrency => $concurrency,
        pass_deadline => '30s');
    wait_lane($node, 'backlog', 'passes > 0');
    $e->stop;
    fill($table, 'backlog', $events);
    my $lane = wait_lane($node, 'backlog', "state = 'refused' AND consecutive_failures >= 3");
    cmp_ok($lane->{refused}, '<=', $concurrency * ($lane->{consecutive_failures} + 1), 'a step costs no more requests than go at once, whatever waits');
    # And passes that fail: what comes back comes back slowly.
    sql("ALTER TABLE $table RENAME attempts TO tries");
    wait_lane($node, 'backlog', 'failed_passes >= 2', timeout => 60);
    sql("ALTER TABLE $table RENAME tries TO attempts");
    wait_lane($node, 'backlog', "state = 'refused'");
    is(value($node, "SELECT count(*) FROM $table WHERE attempts > 0 OR status <> 'pending'"), 0, 'no row lost an attempt');
    my $worker = wait_for_worker($node, 'postgres');
    my $before = memory($worker);

    my $back = OutboxRelay::Endpoint->start(port => $port, max_seconds => 7200);
    $back->wait_for_count(1000, of => 'acked');
    my @first = $back->deliveries;
    $lane = lane($node, 'backlog');
    my ($most, $peak, $warm, $in_flight) = (0, 0, 0, 0);
    $back->wait_until(
        sub {
            my $count = $back->count;
            $in_flight = max($in_flight, $count->{inflight});
            $peak = max($peak, memory($worker));
            $warm ||= $count->{acked} > $events / 5 ? memory($worker) : 0;
            $count->{acked} >= $events;
        },
        what => 'the backlog to drain', timeout => 60 + $events / 200, poll_ms => 50);
    wait_lane($node, 'backlog', "published = $events AND state = 'idle'");
    my $end = memory($worker);

    my @settled = split /\n/, sql('SELECT settled FROM app.passes ORDER BY seq');
    is_deeply([ @settled[ 0 .. 7 ] ], [ 1, 2, 4, 8, 16, 32, 64, $claim ], 'the first passes take one row, two, four, ...');
    is(max(@settled), $claim, 'and never more than max_claim_rows');
    is(sum0(@settled), $events, 'all of them together');
    my $rest = $events - 127;
    is(scalar @settled, 7 + int(($rest + $claim - 1) / $claim), 'each of the others is full: it drains steadily');
    cmp_ok(most_at_once(@first), '>', 1, 'requests go side by side');
    cmp_ok(most_at_once(@first), '<=', $concurrency, scalar(@first) . " requests, no more than $concurrency at once");
    cmp_ok($in_flight, '<=', $concurrency, "nor later: $in_flight");
    my $now = lane($node, 'backlog');
    is_deeply([ @$now{qw(failed_passes refused retried failed)} ], [ @$lane{qw(failed_passes refused)}, 0, 0 ], 'nothing fails on the way');
    is($back->count->{received}, $events, 'each event was sent once');
    my $pause = value($node, 'SELECT max(extract(epoch FROM pause)) FROM (SELECT at - lag(at) OVER (ORDER BY seq) AS pause FROM app.passes) AS p');
    diag sprintf '%d events: backlog drained with %d at once; longest time between two passes %.2f s; worker %d kB before, %d at a fifth, %d at most, %d at the end',
      $events, most_at_once(@first), $pause, $before, $warm, $peak, $end;
    is(wait_for_worker($node, 'postgres'), $worker, 'by the same worker');
    cmp_ok($peak - $warm, '<', 4096, 'whose memory has not grown by 4 MB since the first fifth');
    cmp_ok($peak - $before, '<', 16_384, 'nor by 16 MB since the outage');
    sql("DELETE FROM outbox_route WHERE name = 'backlog'");
};

# F-85
subtest 'rows that nobody is to send stand before those that are' => sub {
    my $rows = $ENV{PARKED_ROWS} // 100_000;
    my $e = OutboxRelay::Endpoint->start;
    my $table = 'app.parked';
    make_outbox($node, 'postgres', $table);
    sql("ALTER TABLE $table SET (autovacuum_enabled = off)");
    # The route's statements are made while the table is empty, as on a table that has filled up since.
    create_route($node, 'parked', $table, $e->url, interval => '200ms');
    wait_passes($node, 'parked', 2);
    fill($table, 'parked', $rows, status => 'failed', attempts => 20, last_error => 'HTTP 500');
    fill($table, 'parked', $rows, attempts => 3, available_at => \q{now() + interval '1 day'});
    fill($table, 'nobodys', $rows);

    # Nothing here may look at the table itself: whose scan it was is not in the statistics.
    my $deliver = sub {
        my ($when) = @_;
        my ($events, $scans, $published) = (200, counted($table, 'seq_scan'), lane($node, 'parked')->{published});
        my $blocks = 'SELECT heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read FROM pg_statio_user_tables WHERE relid = '
          . "'$table'::regclass";
        my ($deleted, $read) = (counted($table, 'n_tup_del'), value($node, $blocks));
        stage($node, 'parked') for 1 .. 3;
        sql("SELECT count(outbox_stage('parked', 'test.event', jsonb_build_object('n', g))) FROM generate_series(4, $events) AS g");
        my $lane = wait_lane($node, 'parked', "published = $published + $events AND state = 'idle'", timeout => 60);
        # The worker reports its scans with its deletions.
        wait_counted($table, "n_tup_del = $deleted + $events");
        is(counted($table, 'seq_scan'), $scans, "$when: no scan of the whole table");
        $read = value($node, $blocks) - $read;
        cmp_ok($read, '<', 10_000, "$when: $read blocks are read for $events events");
        cmp_ok($lane->{last_pass_ms}, '<', 1000, "$when: a pass takes $lane->{last_pass_ms} ms");
        is($lane->{failed_passes}, 0, "$when: none fails");
    };
    $deliver->('without statistics');
    sql("ANALYZE $table");
    $deliver->('with statistics');
    # Where nobody looks after it, the table's front is full of dead rows too.
    $deliver->('once more');

    my $scans = counted($table, 'seq_scan');
    is(sql("SELECT * FROM outbox_depth('parked')"), "$rows|0|$rows", 'outbox_depth counts right');
    is(sql("SELECT outbox_has_undrained('parked')"), 't', 'outbox_has_undrained');
    is(sql("SELECT outbox_oldest_pending_age('parked') > '23 h'"), 't', 'outbox_oldest_pending_age');
    stage($node, 'parked');
    wait_lane($node, 'parked', 'published = 601');
    wait_counted($table, 'n_tup_del = 601');
    is(counted($table, 'seq_scan'), $scans, 'by the index, they too');
    is($e->count->{received}, 601, 'nothing else was sent');
    is(value($node, "SELECT count(*) FROM $table"), 3 * $rows, 'and every row that waits is there');
};

$node->stop;
done_testing();
