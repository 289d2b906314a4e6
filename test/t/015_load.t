# What went wrong for operators of similar systems, as far as it shows in the loop: one bad row, many workers,
# slow endpoints, routes that share a table, a worker that stops for a while, few file descriptors.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use List::Util qw(max);
use POSIX ();
use Test::More;
use Time::HiRes qw(time);
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;
use OutboxRelay::Oracle;

my $node = new_node('load', conf => "autovacuum = off\noutbox_relay.workers = 4\n");
my $e = OutboxRelay::Endpoint->start;

# Fresh table app.NAME with a route of that name.
sub table_and_route
{
    my ($name, %columns) = @_;
    make_outbox($node, 'postgres', "app.$name");
    create_route($node, $name, "app.$name", delete $columns{url} // $e->url,
        interval => '100ms', retry_base_delay => '50ms', %columns);
    return "app.$name";
}

sub deliveries { return sort { $a->{n} <=> $b->{n} } $e->deliveries; }

# Processor seconds that a process has used. undef where /proc does not say.
sub cpu_seconds
{
    my ($pid) = @_;
    open(my $file, '<', "/proc/$pid/stat") or return;
    my ($fields) = <$file> =~ /\) (.*)/;
    my @fields = split ' ', $fields;
    return ($fields[11] + $fields[12]) / POSIX::sysconf(POSIX::_SC_CLK_TCK());
}

# B-15
subtest 'one row that always times out' => sub {
    my $table = table_and_route('poison', pass_deadline => '400ms', max_attempts => 4, max_claim_rows => 50,
        enabled => 'false');
    my ($bad) = insert_rows($node, $table, 'poison', 1);
    insert_rows($node, $table, 'poison', 300);
    $e->rules({ header => 'Idempotency-Key', value => $bad, step => '/hang' });
    my $started = time();
    $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = 'poison'");
    $e->wait_for_count(300, of => 'acked');
    my $all_good_after = time() - $started;
    wait_empty($node, $table);
    is(value($node, "SELECT event_id, status, attempts FROM $table"), "$bad|failed|3", 'counted each time, then parked');
    is(scalar(grep { $_->{event_id} eq $bad } deliveries()), 4, 'tried four times');
    cmp_ok($all_good_after, '<', 4, 'the good ones did not wait for it');
    my $lane = lane($node, 'poison');
    is_deeply([ @$lane{qw(published retried failed failed_passes)} ], [ 300, 3, 1, 0 ], 'counted so');
    $e->reset;
};

# B-15, the loop alone: a lane with nothing but a row that hangs and one that is not due
subtest 'waiting costs no processor time' => sub {
    my $table = table_and_route('wait', url => $e->url('/hang'), pass_deadline => '500ms', max_attempts => 0);
    my @pids = worker_pids($node, 'postgres');
  SKIP:
    {
        skip 'no /proc here', 1 if !defined cpu_seconds($pids[0]);
        insert_rows($node, $table, 'wait', 1);
        wait_lane($node, 'wait', 'retried >= 1');
        my ($from, $cpu) = (time(), 0);
        $cpu -= cpu_seconds($_) for @pids;
        wait_lane($node, 'wait', 'retried >= 4');
        $cpu += cpu_seconds($_) for @pids;
        cmp_ok($cpu / (time() - $from), '<', 0.2, 'less than a fifth of a core');
    }
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'wait'");
    $e->reset;
};

# B-16
subtest 'four workers retry no faster than one' => sub {
    my $table = table_and_route('paced', url => $e->url('/status/500'), retry_base_delay => '400ms', max_attempts => 4,
        interval => '50ms');
    wait_until(sub { worker_pids($node, 'postgres') == 4 }, what => 'four workers');
    stage($node, 'paced');
    wait_empty($node, $table);
    my @at = map { $_->{answer_at} } deliveries();
    is(scalar(@at), 4, 'four attempts');
    for my $retry (1 .. $#at)
    {
        my ($gap, $least) = ($at[$retry] - $at[ $retry - 1 ], 0.2 * 2**($retry - 1));
        cmp_ok($gap, '>=', $least, sprintf 'attempt %d after %.2f s, at least %.1f', $retry + 1, $gap, $least);
    }
    $e->reset;
};

# B-17
subtest 'requests of a pass go side by side' => sub {
    my $table = table_and_route('wide', url => $e->url('/slow?ms=150'), concurrency => 10);
    my $oracle = OutboxRelay::Oracle->new(node => $node, relation => $table, endpoint => $e, route => 'wide');
    # 100 keys, and one more that five rows share.
    $node->safe_psql('postgres', <<"SQL");
BEGIN;
CREATE TEMP TABLE e ON COMMIT DROP AS SELECT gen_random_uuid() AS id, CASE WHEN g > 100 THEN 'shared' ELSE 'k' || g END AS key, g
    FROM generate_series(1, 105) AS g;
INSERT INTO @{[ $oracle->truth_table ]} (event_id, ordering_key) SELECT id, key FROM e ORDER BY g;
SELECT outbox_stage('wide', 't', '{}', event_id => id, ordering_key => key) FROM (SELECT * FROM e ORDER BY g) AS e;
COMMIT;
SQL
    wait_empty($node, $table, all => 1);
    my @done = deliveries();
    my $took = max(map { $_->{answer_at} } @done) - $done[0]{head_at};
    cmp_ok($took, '<', 5, sprintf '105 requests of 150 ms, ten at a time: %.1f s', $took);
    cmp_ok($took, '>=', 1.5, 'not more than ten at a time');
    $oracle->check_nothing_lost(undef, empty => 1);
    $oracle->check_key_order;
    $e->reset;
};

# B-18, as far as issue A has it: what an endpoint says concerns its own lane
subtest 'routes of one table do not share their fate' => sub {
    make_outbox($node, 'postgres', 'app.fate');
    my %url = (limited => '/status/429?retry_after=60', down => '/status/500', good => '/ok');
    insert_rows($node, 'app.fate', $_, 50) for sort keys %url;
    create_route($node, $_, 'app.fate', $e->url($url{$_}), interval => '100ms', max_attempts => 0) for sort keys %url;
    wait_lane($node, 'good', 'published = 50');
    is(wait_lane($node, 'limited', "state = 'refused'")->{retried}, 0, '429: waits, no attempt counted');
    is(wait_lane($node, 'down', "breaker <> 'closed'")->{published}, 0, '500: its breaker opens');
    is(value($node, "SELECT count(*) FROM app.fate WHERE outbox_route = 'limited' AND status = 'pending' AND attempts = 0"),
        50, 'nothing is lost');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name IN ('limited', 'down')");
    $e->reset;
};

# B-19
subtest 'one broken route among twenty, from the start of the server on' => sub {
    for my $number (1 .. 20)
    {
        my $table = "app.many$number";
        make_outbox($node, 'postgres', $table);
        create_route($node, "many$number", $table, $e->url, interval => '200ms', retry_max_backoff => '1min');
    }
    $node->safe_psql('postgres', 'ALTER TABLE app.many13 ALTER attempts TYPE text');
    $node->restart;
    my @ids = map { (insert_rows($node, "app.many$_", "many$_", 1))[0] } 1 .. 20;
    $e->wait_for_count(19, of => 'acked');
    my %arrived = map { $_->{event_id} => 1 } deliveries();
    is_deeply([ grep { !$arrived{ $ids[ $_ - 1 ] } } 1 .. 20 ], [13], '19 work');
    my $lane = wait_lane($node, 'many13', "state = 'backoff' AND consecutive_failures > 1");
    like($lane->{last_error}, qr/many13.*attempts/, 'the view says which and why');
    cmp_ok($lane->{due_at}, '>', $lane->{last_error_at}, 'when it was, and when it is tried again');
    my @pids = worker_pids($node, 'postgres');
    wait_passes($node, 'many1', 5);
    is_deeply([ grep { my $pid = $_; !grep { $_ == $pid } worker_pids($node, 'postgres') } @pids ], [], 'and none of them dies of it');
    $node->safe_psql('postgres', 'ALTER TABLE app.many13 ALTER attempts DROP DEFAULT, ALTER attempts TYPE int USING attempts::int');
    wait_empty($node, 'app.many13', all => 1);
    pass('repaired, it goes on by itself');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name LIKE 'many%'");
    $e->reset;
};

# B-21 (2,000 rows, stops of some 100 ms)
subtest 'workers that stop for a while deliver nothing twice' => sub {
    my $table = table_and_route('frozen', max_claim_rows => 20);
    create_route($node, 'frozen2', $table, $e->url, interval => '100ms', max_claim_rows => 20);
    my $oracle = OutboxRelay::Oracle->new(node => $node, relation => $table, endpoint => $e, table => 'frozen_truth');
    insert_rows($node, $table, $_, 1000, truth => $oracle->truth_table) for qw(frozen frozen2);
    my @pids = worker_pids($node, 'postgres');
    my $stops = 0;
    wait_until(
        sub {
            my $pid = $pids[ $stops++ % @pids ];
            kill 'STOP', $pid;
            # What the others do meanwhile; a query takes some time too.
            my $left = value($node, "SELECT count(*) FROM $table");
            kill 'CONT', $pid;
            return $left == 0;
        },
        what => 'all to be delivered', timeout => 30, poll_ms => 20);
    note "$stops stops";
    wait_sql($node, 'postgres', q{SELECT sum(published) = 2000 AND sum(failed_passes) = 0 FROM outbox_stat_route
        WHERE route LIKE 'frozen%'});
    $oracle->check_nothing_lost(undef, empty => 1);
    $oracle->check_duplicates_at_most(0);
    is($e->count->{received}, 2000, '2,000 requests');
    $e->reset;
};

# B-30 (concurrency 1,000 is the most that can be set)
subtest 'more requests than file descriptors' => sub {
  SKIP:
    {
        skip 'no prlimit here', 1 if system('prlimit --version >/dev/null 2>&1') != 0;
        my $table = table_and_route('fds', url => $e->url('/slow?ms=50'), concurrency => 1000, max_claim_rows => 1500,
            pass_deadline => '10s', max_attempts => 1, enabled => 'false');
        insert_rows($node, $table, 'fds', 1500);
        wait_until(sub { worker_pids($node, 'postgres') == 4 }, what => 'four workers');
        my @pids = worker_pids($node, 'postgres');
        system("prlimit --pid $_ --nofile=256:256") == 0 or die 'prlimit failed' for @pids;
        $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = 'fds'");
        wait_empty($node, $table, all => 1, timeout => 40, endpoint => $e);
        is($e->count->{acked}, 1500, 'all delivered, each once');
        is(lane($node, 'fds')->{failed_passes}, 0, 'without a failed pass');
        is_deeply([ worker_pids($node, 'postgres') ], \@pids, 'by the same workers');
    }
};

done_testing();
