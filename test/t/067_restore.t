# A server that was restored to a point in the past (F-42): rows that were delivered since are there again. Whether they
# go out once more is the operator's choice, made before the restored server sends anything.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $e = OutboxRelay::Endpoint->start;
my $node = new_node('origin', init => { allows_streaming => 1, has_archiving => 1 },
    conf => "autovacuum = off\noutbox_relay.interval = '1h'\n");
make_outbox($node, 'postgres', 'app.outbox');
create_route($node, 'orders', 'app.outbox', $e->url);
wait_lane($node, 'orders', "passes > 0 AND state = 'idle'");
$node->backup('base');

# Nobody wakes the lane for rows that are inserted, so at the point they are there and not sent. Then a staged one wakes it.
my @again = sort(insert_rows($node, 'app.outbox', 'orders', 5));
$node->safe_psql('postgres', "SELECT pg_create_restore_point('before')");
my $after = stage($node, 'orders');
wait_empty($node, 'app.outbox', all => 1);
is($e->count->{events}, 6, 'all were delivered');
my $segment = value($node, 'SELECT pg_walfile_name(pg_switch_wal())');
wait_sql($node, 'postgres', "SELECT last_archived_wal >= '$segment' FROM pg_stat_archiver");
$node->stop;

# A server as it was at the point, with these settings from its start on.
sub restore
{
    my ($name, $conf) = @_;
    my $copy = PostgreSQL::Test::Cluster->new($name);
    $copy->init_from_backup($node, 'base', has_restoring => 1, standby => 0);
    $copy->append_conf('postgresql.conf', "recovery_target_name = 'before'\nrecovery_target_action = promote\narchive_mode = off\n$conf");
    $copy->start;
    wait_sql($copy, 'postgres', 'SELECT NOT pg_is_in_recovery()');
    return $copy;
}

sub rows_are_back
{
    my ($copy) = @_;
    is(join("\n", sort split /\n/, $copy->safe_psql('postgres', "SELECT event_id FROM app.outbox WHERE status = 'pending'")),
        join("\n", @again), 'the rows are back, those that came later are not');
    return;
}

# How often each of the rows has arrived.
sub arrivals
{
    my %times = map { $_ => 0 } @again, $after;
    $times{ $_->{event_id} }++ for grep { $_->{acked} && exists $times{ $_->{event_id} } } $e->deliveries;
    return \%times;
}

sub sent_again
{
    my ($copy, $times) = @_;
    wait_empty($copy, 'app.outbox', all => 1, endpoint => $e);
    is_deeply(arrivals(), { (map { $_ => $times } @again), $after => 1 }, 'they go out once more, each once');
    stage($copy, 'orders');
    wait_empty($copy, 'app.outbox', all => 1);
    pass('and relaying goes on');
    return;
}

my $once = { map { $_ => 1 } @again, $after };

subtest 'started with relaying off' => sub {
    my $copy = restore('off', "outbox_relay.enabled = off\n");
    rows_are_back($copy);
    wait_sql($copy, 'postgres', "SELECT count(*) = 1 FROM outbox_stat_worker WHERE phase = 'launcher'");
    is(value($copy, "SELECT state FROM outbox_stat_route WHERE route = 'orders'"), 'idle', 'the route is this server\'s');
    # A wake that would have it sent.
    my $woken = stage($copy, 'orders');
    is(value($copy, "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker'"), 0, 'there is no worker');
    is($copy->safe_psql('postgres', "DELETE FROM app.outbox WHERE event_id = '$woken' RETURNING 1"), 1, 'nothing is taken');
    is_deeply(arrivals(), $once, 'nothing is sent');
    set_conf($copy, 'outbox_relay.enabled' => 'on');
    sent_again($copy, 2);
    $copy->stop;
};

subtest 'started as another environment' => sub {
    my $copy = restore('elsewhere', "outbox_relay.environment = 'restored'\n");
    rows_are_back($copy);
    wait_log($copy, qr/WARNING:.*route "orders" is bound to another database/, 0);
    my $woken = stage($copy, 'orders');
    is(value($copy, "SELECT state FROM outbox_stat_route WHERE route = 'orders'"), 'foreign', 'the route is foreign');
    # A change has a worker look at the routes once more.
    my $offset = log_offset($copy);
    $copy->safe_psql('postgres', 'UPDATE outbox_route SET max_claim_rows = 10');
    wait_log($copy, qr/outbox_relay worker" \(PID \d+\) exited/, $offset);
    is($copy->safe_psql('postgres', "DELETE FROM app.outbox WHERE event_id = '$woken' RETURNING 1"), 1, 'nothing is taken');
    is(scalar(grep { $_->{event_id} eq $woken } $e->deliveries), 0, 'nothing is sent');
    my $before = arrivals();
    is($copy->safe_psql('postgres', 'SELECT outbox_adopt()'), 1, 'the operator has it relay here');
    sent_again($copy, 1 + $before->{ $again[0] });
    $copy->stop;
};

# What the two are for: without either it takes itself for the server that it is a copy of.
subtest 'started with neither' => sub {
    my $before = arrivals();
    my $copy = restore('neither', '');
    sent_again($copy, 1 + $before->{ $again[0] });
    $copy->stop;
};

done_testing();
