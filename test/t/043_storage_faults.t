# Faults at each step of a retain pass and of a consume pass with a delivery log: the worker is killed there, fails
# there, or is told to leave. What arrives twice is counted exactly, and the log holds the committed deletions, no more.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;
use OutboxRelay::Oracle;

my $events = 40;
my $rounds = $ENV{STORAGE_CLAIM_KILLS} || 8;
my $node = new_node('storage_faults', fsync => 1, conf => "outbox_relay.workers = 1\nautovacuum = off\n");
my $e = OutboxRelay::Endpoint->start;
my $number = 0;

# A fresh table and route with its events, one request at a time; paused. The route, what it relays by, its events.
sub scene
{
    my (%columns) = @_;
    my $route = 's' . ++$number;
    $e->reset;
    make_outbox($node, 'postgres', "app.$route");
    if (delete $columns{log})
    {
        make_log("app.${route}_log");
        $columns{delivery_log} = "app.${route}_log";
    }
    create_route($node, $route, "app.$route", delete $columns{url} // $e->url, interval => '100ms', retry_base_delay => '100ms', retry_max_backoff => '400ms',
        concurrency => 1, reclaim_stale_after => '500ms', enabled => 'false', %columns);
    my @ids = stage_many($node, $route, $events);
    return ($route, OutboxRelay::Oracle->new(node => $node, relation => "app.$route", endpoint => $e, truth => \@ids));
}

sub make_log
{
    my ($log) = @_;
    value($node, "CREATE TABLE $log (id uuid NOT NULL, outbox_route text NOT NULL, event_id uuid NOT NULL, tenant_id uuid, published_at timestamptz NOT NULL)");
    return;
}

sub release_route { return value($node, "UPDATE outbox_route SET enabled = true WHERE name = '$_[0]'"); }

# Lets the lane come to the point, where it does ACTION.
sub run_to
{
    my ($route, $point, $action) = @_;
    my $offset = log_offset($node);
    set_conf($node, 'outbox_relay.fault_point' => "$point=$action");
    release_route($route);
    my ($name) = $point =~ /^(\w+)/;
    wait_log($node, qr/fault point $name reached: $action/, $offset);
    return;
}

# The server after a crash: it has kept its configuration, the fault point too.
sub comes_back
{
    wait_for_server($node);
    set_conf($node, 'outbox_relay.fault_point' => undef);
    return;
}

sub kill_at
{
    my ($route, $point) = @_;
    run_to($route, $point, 'wait');
    kill_worker($node, 'postgres', 'KILL');
    comes_back();
    return;
}

# All is relayed, nothing was lost, so many events came twice, and the log, if there is one, is exact.
sub judge
{
    my ($route, $oracle, $repeats, $name) = @_;
    wait_empty($node, "app.$route", endpoint => $e);
    my $found = $oracle->compare;
    my $repeated = 0;
    $repeated += $_ for values %{ $found->{duplicates} };
    my ($log) = value($node, "SELECT delivery_log FROM outbox_route WHERE name = '$route'");
    my $kept = value($node, "SELECT count(*) FROM app.$route WHERE status = 'published'");
    my $logged = $log eq '' ? 'none' : value($node, "SELECT count(*) || ' ' || count(DISTINCT event_id) FROM $log");
    my $retains = value($node, "SELECT storage = 'retain' FROM outbox_route WHERE name = '$route'") eq 't';
    is_deeply(
        { acknowledged => $found->{acknowledged}, lost => $found->{lost}, invented => $found->{invented}, repeated => $repeated, kept => $kept, log => $logged },
        { acknowledged => $events, lost => [], invented => [], repeated => $repeats, kept => $retains ? $events : 0, log => $log eq '' ? 'none' : "$events $events" },
        "$name: $repeats repeats")
      or diag($e->summary);
    value($node, "UPDATE outbox_route SET enabled = false WHERE name = '$route'");
    return;
}

# F-10. Chunks of 32 are marked while publishing goes on: a crash repeats what was acknowledged and not marked.
my @retain = (
    # point               repeated after a kill
    ['in_claim',          0],
    ['after_claim',       0],
    ['after_publish:20', 20],
    ['after_publish:32', 32],
    ['in_settle:32',      0],
    ['after_publish:33',  1],
    ['before_settle',     8],
    ['before_commit',     0],
    ['after_commit',      0]);
subtest 'retain, killed' => sub {
    for (@retain)
    {
        my ($point, $repeats) = @$_;
        my ($route, $oracle) = scene(storage => 'retain');
        kill_at($route, $point);
        judge($route, $oracle, $repeats, "killed at $point");
    }
};

# An error, or the end of the worker alone, repeats nothing: what was acknowledged is remembered and marked.
subtest 'retain, failing' => sub {
    for my $action (qw(error fatal))
    {
        for (@retain)
        {
            my ($route, $oracle) = scene(storage => 'retain');
            run_to($route, $_->[0], $action);
            set_conf($node, 'outbox_relay.fault_point' => undef);
            judge($route, $oracle, 0, "$action at $_->[0]");
        }
    }
    # What a pass holds for its session ends with the process, wherever that was.
    wait_sql($node, 'postgres', "SELECT count(*) = 0 FROM pg_locks WHERE classid = 'pg_extension'::regclass");
    unlike(log_since($node, 0), qr/is already held/, 'nobody holds the extension any more, or held it from a process before');
};

# What the relay was told to leave behind goes back at once, not after reclaim_stale_after.
subtest 'retain, evicted while requests are out' => sub {
    my ($route, $oracle) = scene(storage => 'retain', url => $e->url('/hang'), concurrency => 3, reclaim_stale_after => '1h', pass_deadline => '60s');
    release_route($route);
    $e->wait_for_count(3, of => 'inflight');
    is(value($node, "SELECT count(*) FROM app.$route WHERE status = 'processing'"), $events, 'all are processing');
    my $pid = worker_pid($node, 'postgres');
    value($node, "UPDATE outbox_route SET url = '" . $e->url . "' WHERE name = '$route'; SELECT pg_terminate_backend($pid)");
    wait_for_worker($node, 'postgres', not => $pid);
    wait_empty($node, "app.$route", endpoint => $e);
    is(value($node, "SELECT count(*) FROM app.$route WHERE status = 'published' AND attempts = 0"), $events, 'they went back, and no attempt is counted');
    $oracle->check_nothing_lost;
};

my @logged = (
    # point           repeated after a kill
    ['after_claim',        0],
    ['after_publish:20',  20],
    ['before_settle', $events],
    ['in_settle',     $events],
    ['before_commit', $events],
    ['after_commit',       0]);
subtest 'consume with a log' => sub {
    for (@logged)
    {
        my ($point, $repeats) = @$_;
        my ($route, $oracle) = scene(log => 1);
        kill_at($route, $point);
        judge($route, $oracle, $repeats, "killed at $point");
    }
    for my $action (qw(error fatal))
    {
        for (@logged)
        {
            my ($route, $oracle) = scene(log => 1);
            run_to($route, $_->[0], $action);
            set_conf($node, 'outbox_relay.fault_point' => undef);
            judge($route, $oracle, 0, "$action at $_->[0]");
        }
    }
};

# Inside the statement that deletes and logs: once, a trigger of the log ends the process, or raises, at its 20th row.
subtest 'in the log insert' => sub {
    my $once = $node->basedir . '/fail_once';
    value($node, <<"SQL");
CREATE SEQUENCE app.log_rows;
CREATE FUNCTION app.fail_at_20() RETURNS trigger LANGUAGE plpgsql AS \$\$
BEGIN
    IF nextval('app.log_rows') % 20 = 0 AND (pg_stat_file('$once', true)).size IS NOT NULL THEN
        IF TG_ARGV[0] = 'kill' THEN
            COPY (SELECT) TO PROGRAM 'rm $once; kill -9 \$PPID';
        END IF;
        COPY (SELECT) TO PROGRAM 'rm $once';
        RAISE 'the log fails';
    END IF;
    RETURN NEW;
END \$\$;
SQL
    for ([ 'kill', $events ], [ 'error', 0 ])
    {
        my ($how, $repeats) = @$_;
        my ($route, $oracle) = scene(log => 1);
        PostgreSQL::Test::Utils::append_to_file($once, 'x');
        value($node, "CREATE TRIGGER fail BEFORE INSERT ON app.${route}_log FOR EACH ROW EXECUTE FUNCTION app.fail_at_20('$how')");
        my $offset = log_offset($node);
        release_route($route);
        wait_log($node, $how eq 'kill' ? qr/was terminated by signal 9/ : qr/the log fails/, $offset);
        comes_back();
        judge($route, $oracle, $repeats, "$how at the 20th row");
    }
};

# B-09: killed again and again between the claim and the first request, while the route drains.
for my $storage (qw(retain consume))
{
    subtest "B-09: $storage, killed $rounds times after the claim" => sub {
        my ($route, $oracle) = scene(storage => $storage, max_claim_rows => 5, reclaim_stale_after => '300ms');
        release_route($route);
        for my $round (1 .. $rounds)
        {
            my $point = $storage eq 'retain' && $round % 2 ? 'in_claim' : 'after_claim';
            # A worker that already runs may be there as soon as the point is set.
            my $offset = log_offset($node);
            set_conf($node, 'outbox_relay.fault_point' => "$point=wait");
            $oracle->committed(stage_many($node, $route, 10));
            wait_log($node, qr/fault point $point reached: wait/, $offset);
            is(value($node, "SELECT count(*) FROM app.$route WHERE status = 'processing'"), 0, 'no row is processing to others')
              if $storage eq 'consume' && $round == 1;
            kill_worker($node, 'postgres', 'KILL');
            comes_back();
        }
        wait_empty($node, "app.$route", endpoint => $e);
        is(value($node, "SELECT count(*) FROM app.$route WHERE status = 'processing'"), 0, 'none is stuck in processing');
        $oracle->check_nothing_lost;
        $oracle->check_duplicates_at_most(5 * $rounds);
        value($node, "UPDATE outbox_route SET enabled = false WHERE name = '$route'");
    };
}

done_testing();
