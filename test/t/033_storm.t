# The relay through an endpoint that drops, resets, delays and answers 5xx and 429 at random, while workers are killed,
# evicted and cancelled: every committed event is acknowledged or in the table, and repeats come only from crashes and
# from requests whose fate nobody can know. STORM_EVENTS (3000) makes it longer, STORM_SEED repeats one.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use Time::HiRes qw(time);
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;
use OutboxRelay::Oracle;

my $events = $ENV{STORM_EVENTS} // 3000;
my $seed = $ENV{STORM_SEED} // time();
srand $seed;
diag("STORM_SEED=$seed");

my $batch = 100;
my $node = new_node('storm', fsync => 1, conf => "outbox_relay.workers = 2\n");
my $e = OutboxRelay::Endpoint->start;
my @lanes = qw(one two three);
$e->script('storm', map { random_step() } 1 .. 2 * $events);

sub random_step
{
    my $dice = rand 100;
    return $dice < 80 ? '/ok'
      : $dice < 85 ? '/status/500'
      : $dice < 88 ? '/drop'
      : $dice < 90 ? '/rst'
      : $dice < 92 ? '/rst-head'
      : $dice < 95 ? { delay_ms => 30, status => 200 }
      : $dice < 97 ? '/garbage'
      : $dice < 98 ? '/early?status=200'
      : $dice < 99 ? '/half-headers'
      : '/status/429?retry_after=0';
}

make_outbox($node, 'postgres', 'app.outbox');
create_route($node, $_, 'app.outbox', $e->url('/script/storm'), interval => '200ms', retry_base_delay => '50ms',
    retry_max_backoff => '400ms', max_claim_rows => $batch, max_attempts => 0, breaker_threshold => 0) for @lanes;
my $oracle = OutboxRelay::Oracle->new(node => $node, relation => 'app.outbox', endpoint => $e);

# Rounds of staging, each with one blow.
my $rounds = 12;
my %blows = (kill => 0, evict => 0, cancel => 0);
for my $round (1 .. $rounds)
{
    for my $lane (@lanes)
    {
        stage_many($node, $lane, int($events / $rounds / @lanes), keys => 20, truth => $oracle->truth_table);
        stage_many($node, $lane, 5, rollback => 1);
    }
    my $until = time() + rand 0.5;
    wait_until(sub { time() > $until }, what => 'a moment');
    my $blow = (qw(kill evict cancel))[ $round % 3 ];
    if ($blow eq 'kill')
    {
        my $pid = worker_pid($node, 'postgres') // next;
        kill 'KILL', $pid;
        wait_for_server($node);
    }
    else
    {
        my $function = $blow eq 'evict' ? 'pg_terminate_backend' : 'pg_cancel_backend';
        $node->safe_psql('postgres', "SELECT $function(pid) FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker'");
    }
    $blows{$blow}++;
}
wait_empty($node, 'app.outbox', endpoint => $e, timeout => 60 + $events / 50);

$oracle->check_nothing_lost('nothing lost', empty => 1);
$oracle->check_nothing_invented('nothing that was rolled back');

# Whole requests without an answer, or with one that broke off: their fate is not known to the relay.
my $unknown = grep { $_->{complete} && !$_->{acked} } $e->deliveries;
# A kill costs what two workers had sent in their passes; an eviction or a cancel what was in flight.
my $allowed = $unknown + $blows{kill} * 2 * $batch + ($blows{evict} + $blows{cancel}) * 2 * 32;
$oracle->check_duplicates_at_most($allowed, "repeats within what the faults allow ($unknown unknown, $blows{kill} kills)");
is(value($node, 'SELECT count(*) FROM outbox_stat_route WHERE set_aside > 0'), 0, 'no row was blamed');

$node->stop;
done_testing();
