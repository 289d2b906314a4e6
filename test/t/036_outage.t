# What lasts: an endpoint that is away under load, and a fault of the table that every pass meets. OUTAGE_SECONDS and
# FAULT_SECONDS (12 each, so that the check stays short) say for how long.

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

my $node = new_node('outage', conf => "outbox_relay.workers = 2\n");
my $step = 4;
my %pace = (interval => '500ms', retry_base_delay => '200ms', retry_max_backoff => "${step}s", max_attempts => 3);

# Stages a few events every 20 ms until CODE is true.
sub under_load
{
    my ($route, $oracle, $until) = @_;
    my $seconds = time() + 600;
    until ($until->())
    {
        die 'this load never ends' if time() > $seconds;
        stage_many($node, $route, 5, keys => 3, truth => $oracle->truth_table);
    }
    return;
}

sub for_seconds
{
    my ($seconds) = @_;
    my $end = time() + $seconds;
    return sub { time() > $end };
}

subtest 'the endpoint is away' => sub {
    my $seconds = $ENV{OUTAGE_SECONDS} // 12;
    my $e = OutboxRelay::Endpoint->start;
    my $port = $e->port;
    make_outbox($node, 'postgres', 'app.away');
    create_route($node, 'away', 'app.away', $e->url, %pace, concurrency => 4);
    my $oracle = OutboxRelay::Oracle->new(node => $node, relation => 'app.away', endpoint => $e, table => 'truth_away');
    under_load('away', $oracle, for_seconds(1));
    # Those whose answers are cut are attempts, no more than are in flight.
    my @before = $e->deliveries;
    $e->stop;
    my $lane;
    under_load('away', $oracle, sub { ($lane = lane($node, 'away'))->{state} eq 'refused' });
    my $cut = $lane->{retried};
    cmp_ok($cut, '<=', 4, "in flight when it went: $cut");
    under_load('away', $oracle, for_seconds($seconds));
    $lane = lane($node, 'away');
    is($lane->{retried} + $lane->{failed}, $cut, "$seconds seconds without it: no attempt of any row");
    is(value($node, 'SELECT coalesce(sum(attempts), 0) FROM app.away'), $cut, 'the rows say so too');
    cmp_ok(value($node, 'SELECT count(*) FROM app.away'), '>', 20, 'they wait');
    cmp_ok($lane->{refused}, '<=', 3 * $lane->{consecutive_failures} + 3, 'and a step costs three requests at most');

    my $back = OutboxRelay::Endpoint->start(port => $port);
    my $returned = time();
    $back->wait_for_count(1, of => 'acked');
    cmp_ok(time() - $returned, '<', $step + 1.5, 'the first goes out within one backoff step');
    wait_empty($node, 'app.away', all => 1, endpoint => $back);
    cmp_ok(time() - $returned, '<', $step + 6, 'and the rest at once behind it');
    my %acked = map { $_->{event_id} => 1 } grep { $_->{acked} } @before, $back->deliveries;
    my @lost = grep { !$acked{$_} } split /\n/, $node->safe_psql('postgres', 'SELECT event_id FROM truth_away');
    # Those that went out between the look at the first endpoint and its end are in its file alone.
    my $file = PostgreSQL::Test::Utils::slurp_file($e->log_file);
    is(scalar(grep { index($file, $_) < 0 } @lost), 0, 'nothing is lost');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'away'");
};

# B-22, outbox side: what a trigger writes at each deletion gets a column that nobody fills.
subtest 'a fault that every pass meets' => sub {
    my $seconds = $ENV{FAULT_SECONDS} // 12;
    my $e = OutboxRelay::Endpoint->start;
    make_outbox($node, 'postgres', 'app.fault');
    $node->safe_psql('postgres', <<'SQL');
CREATE TABLE app.history (event_id uuid);
CREATE FUNCTION app.history() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN INSERT INTO app.history (event_id) VALUES (OLD.event_id); RETURN OLD; END $$;
CREATE TRIGGER history BEFORE DELETE ON app.fault FOR EACH ROW EXECUTE FUNCTION app.history();
SQL
    create_route($node, 'fault', 'app.fault', $e->url, %pace, retry_max_backoff => '1s');
    my $oracle = OutboxRelay::Oracle->new(node => $node, relation => 'app.fault', endpoint => $e, table => 'truth_fault');
    under_load('fault', $oracle, sub { $e->count->{acked} > 50 });
    $node->safe_psql('postgres', 'TRUNCATE app.history; ALTER TABLE app.history ADD region text NOT NULL');
    under_load('fault', $oracle, for_seconds($seconds));
    my $lane = lane($node, 'fault');
    cmp_ok($lane->{failed_passes}, '>=', $seconds / 2, "$lane->{failed_passes} passes failed in $seconds seconds");
    like($lane->{last_error}, qr/null value in column "region" of relation "history" violates not-null/, 'the reason names the table');
    is($lane->{set_aside}, 0, 'no row is blamed');
    my $deleted = value($node, 'SELECT (SELECT count(*) FROM truth_fault) - (SELECT count(*) FROM app.fault)');
    under_load('fault', $oracle, sub { lane($node, 'fault')->{failed_passes} > $lane->{failed_passes} });
    is(value($node, 'SELECT (SELECT count(*) FROM truth_fault) - (SELECT count(*) FROM app.fault)'), $deleted, 'nothing is settled meanwhile');
    $node->safe_psql('postgres', 'ALTER TABLE app.history DROP COLUMN region');
    my $healed = time();
    wait_empty($node, 'app.fault', all => 1, endpoint => $e);
    cmp_ok(time() - $healed, '<', 12, 'cured, it heals by itself');
    $oracle->check_nothing_lost(undef, empty => 1);
    $oracle->check_duplicates_at_most(0, 'each event was published once');
    $oracle->check_key_order('in the order of its key', overlap => 0);
};

# BKO-08
subtest 'an endpoint that fails each request does not hold the lane' => sub {
    my $e = OutboxRelay::Endpoint->start;
    make_outbox($node, 'postgres', 'app.fails');
    create_route($node, 'fails', 'app.fails', $e->url('/status/500'), %pace, retry_base_delay => '1min', retry_max_backoff => '2min');
    for my $number (1 .. 9)
    {
        my $staged = time();
        stage($node, 'fails');
        $e->wait_for_count($number);
        cmp_ok(time() - $staged, '<', 1.5, "event $number goes out at once");
    }
    my $lane = wait_lane($node, 'fails', 'retried = 9');
    is($lane->{consecutive_failures}, 0, 'no pass has failed');
    is($lane->{state}, 'idle', 'the lane is at rest, not held');
    # At breaker_threshold it is.
    stage($node, 'fails');
    wait_lane($node, 'fails', "breaker = 'open' AND state = 'refused'");
    pass('at breaker_threshold it is held');
};

$node->stop;
done_testing();
