# What a crash costs: the worker is stopped at each place of a pass and killed, or fails there; the oracle compares
# what committed, what the endpoint acknowledged and what the table holds, and counts the repeats.

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

my $events = 5;
my $node = new_node('crash', fsync => 1, conf => "outbox_relay.workers = 1\nautovacuum = off\n");
my $e = OutboxRelay::Endpoint->start;
my $number = 0;

# A fresh table and route with its events, one request at a time; paused until released. What the route relays by.
sub scene
{
    my (%columns) = @_;
    my $route = 'r' . ++$number;
    $e->reset;
    make_outbox($node, 'postgres', "app.$route");
    create_route($node, $route, "app.$route", $e->url, interval => '200ms', retry_base_delay => '100ms', retry_max_backoff => '400ms', concurrency => 1,
        enabled => 'false', %columns);
    my @ids = stage_many($node, $route, $events);
    my $oracle = OutboxRelay::Oracle->new(node => $node, relation => "app.$route", endpoint => $e, truth => \@ids);
    return ($route, $oracle);
}

sub release { return $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = '$_[0]'"); }

# Lets the lane come to the point and stop there.
sub stop_at
{
    my ($route, $point) = @_;
    my $offset = log_offset($node);
    set_conf($node, 'outbox_relay.fault_point' => "$point=wait");
    release($route);
    my ($name) = $point =~ /^(\w+)/;
    wait_log($node, qr/fault point $name reached: wait/, $offset);
    return;
}

# The server after a crash: it has kept its configuration, the fault point too.
sub comes_back
{
    wait_for_server($node);
    set_conf($node, 'outbox_relay.fault_point' => undef);
    return;
}

# All is relayed again, nothing was lost, and so many events came twice.
sub judge
{
    my ($route, $oracle, $duplicates, $name) = @_;
    wait_empty($node, "app.$route", endpoint => $e);
    $oracle->check_nothing_lost("$name: nothing lost", empty => 1);
    $oracle->check_nothing_invented("$name: nothing invented");
    my $repeated = 0;
    $repeated += $_ for values %{ $oracle->compare->{duplicates} };
    is($repeated, $duplicates, "$name: $duplicates repeats");
    return;
}

my @points = (
    # point              acknowledged before it, so repeated after a kill
    ['after_claim',      0],
    ['after_publish:3',  3],
    ['before_settle',    $events],
    ['in_settle',        $events],
    ['before_commit',    $events],
    ['after_commit',     0]);

# F-03 to F-09
for (@points)
{
    my ($point, $repeats) = @$_;
    my ($route, $oracle) = scene();
    stop_at($route, $point);
    kill_worker($node, 'postgres', 'KILL');
    comes_back();
    # No wake and no interval: the lane is due when the server is back.
    judge($route, $oracle, $repeats, "killed at $point");
}

# F-19, CON-04: an error in the pass undoes it, and what was acknowledged is settled without a second request.
for my $action (qw(error fatal))
{
    for (@points)
    {
        my ($point) = @$_;
        my ($route, $oracle) = scene();
        my $offset = log_offset($node);
        set_conf($node, 'outbox_relay.fault_point' => "$point=$action");
        release($route);
        my ($name) = $point =~ /^(\w+)/;
        wait_log($node, qr/fault point $name reached: $action/, $offset);
        set_conf($node, 'outbox_relay.fault_point' => undef);
        judge($route, $oracle, 0, "$action at $point");
    }
}

# B-04: an unrelated backend is killed; F-12: immediate shutdown; F-11: the postmaster is killed.
subtest 'others are killed while the pass publishes' => sub {
    my %blow = (
        'another backend' => sub {
            my $other = $node->background_psql('postgres');
            my $pid = $other->query_safe('SELECT pg_backend_pid()');
            kill 'KILL', $pid;
            eval { $other->quit };
        },
        'immediate shutdown' => sub { $node->stop('immediate'); $node->start; },
        'the postmaster' => sub {
            my $pid = worker_pid($node, 'postgres');
            $node->kill9;
            wait_until(sub { !kill 0, $pid }, what => 'the worker to follow its postmaster', timeout => 2);
            # The other children follow as well; as long as one is there, the new server does not start.
            wait_until(sub { $node->start(fail_ok => 1) }, what => 'the new server', poll_ms => 100);
        });
    for my $name (sort keys %blow)
    {
        my ($route, $oracle) = scene(pass_deadline => '20s');
        $node->safe_psql('postgres', "UPDATE outbox_route SET url = '" . $e->url('/script/blow') . "' WHERE name = '$route'");
        $e->script('blow', '/ok', '/ok', '/hang', '/ok');
        release($route);
        $e->wait_for_count(2, of => 'acked');
        $e->wait_for_inflight;
        $blow{$name}->();
        comes_back();
        # Two acknowledged, and the third was taken in whole without an answer.
        judge($route, $oracle, 3, $name);
    }
};

# F-13: a fast shutdown stops publishing, gives what is in flight a second, settles and commits.
subtest 'fast shutdown in the middle of a pass' => sub {
    my ($route, $oracle) = scene(pass_deadline => '20s');
    $node->safe_psql('postgres', "UPDATE outbox_route SET url = '" . $e->url('/script/fast') . "' WHERE name = '$route'");
    $e->script('fast', '/ok', '/ok', '/hang', '/ok');
    release($route);
    $e->wait_for_count(2, of => 'acked');
    $e->wait_for_inflight;
    $node->stop('fast');
    is($e->count->{received}, 3, 'no request was started after the signal');
    $node->append_conf('postgresql.conf', 'outbox_relay.enabled = off');
    $node->start;
    is(value($node, "SELECT count(*) || '/' || sum(attempts) FROM app.$route"), '3/0',
        'what was acknowledged is settled, the rest is as it was');
    $node->append_conf('postgresql.conf', 'outbox_relay.enabled = on');
    $node->reload;
    judge($route, $oracle, 1, 'after the shutdown');
};

$node->stop;
done_testing();
