# A database under its own worker: dropped, moved and copied in the middle of a long publish, the extension or the table
# dropped under a pass (B-07), an extension made and dropped in one transaction; and a drain of which a random worker or
# statement is ended all the time.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use Time::HiRes qw(time usleep);
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;
use OutboxRelay::Oracle;

my $blows = $ENV{BLOWS} || 100;
my $events = $ENV{BLOW_EVENTS} || 2000;
my $node = new_node('databases', conf => "outbox_relay.interval = '300ms'\noutbox_relay.workers = 2\n");
my $e = OutboxRelay::Endpoint->start;

sub timed
{
    my ($sql, $db) = @_;
    my $start = time;
    $node->safe_psql($db // 'postgres', $sql);
    return time - $start;
}

# A database whose worker waits for an answer that does not come.
sub publishing
{
    my ($name) = @_;
    $e->reset;
    value($node, "CREATE DATABASE $name");
    value($node, 'CREATE EXTENSION outbox_relay', $name);
    make_outbox($node, $name, 'app.outbox');
    create_route($node, $name, 'app.outbox', $e->url('/hang'), db => $name, pass_deadline => '60s');
    wait_for_worker($node, $name);
    insert_rows($node, 'app.outbox', $name, 3, db => $name);
    $e->wait_for_count(3, of => 'inflight');
    return;
}

my $folder = PostgreSQL::Test::Utils::tempdir_short();
value($node, "CREATE TABLESPACE elsewhere LOCATION '$folder'");
for (['DROP DATABASE d1', 'd1'], ['DROP DATABASE d2 WITH (FORCE)', 'd2'], ['ALTER DATABASE d3 SET TABLESPACE elsewhere', 'd3'],
    ['CREATE DATABASE d4copy TEMPLATE d4', 'd4'], ['ALTER DATABASE d5 RENAME TO d5moved', 'd5'])
{
    my ($command, $name) = @$_;
    publishing($name);
    cmp_ok(timed($command), '<', 5, "$command in the middle of a publish");
    next if $command =~ /^DROP/;
    my $now = $command =~ /RENAME/ ? 'd5moved' : $name;
    value($node, "UPDATE outbox_route SET url = '" . $e->url . "'", $now);
    # A new worker may have begun a pass before that.
    value($node, "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = '$now' AND backend_type = 'outbox_relay worker'");
    wait_empty($node, 'app.outbox', db => $now, endpoint => $e);
    pass('whose rows go out afterwards');
    value($node, "DROP DATABASE $now");
    value($node, 'DROP DATABASE d4copy') if $name eq 'd4';
}
is(value($node, "SELECT count(*) FROM pg_database WHERE datname LIKE 'd_' OR datname LIKE 'd_moved'"), 0, 'all are gone');

# B-07.
subtest 'the extension, or the table, is dropped under a pass' => sub {
    publishing('e1');
    # It waits for the pass, which ends when the answers come.
    my $drop = $node->background_psql('e1', on_error_stop => 0);
    $drop->query_until(qr/started/, "\\echo started\nDROP EXTENSION outbox_relay CASCADE;\n");
    wait_sql($node, 'postgres', "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = 'e1' AND wait_event_type = 'Lock' AND query LIKE 'DROP%')");
    $e->release(3);
    $drop->query_safe('SELECT 1');
    $drop->quit;
    is(value($node, 'SELECT count(*) FROM app.outbox', 'e1'), 0, 'the pass settled what was answered');
    wait_sql($node, 'postgres', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = 'e1' AND backend_type LIKE 'outbox%')");
    value($node, 'DROP DATABASE e1');

    publishing('e2');
    my $offset = log_offset($node);
    $drop = $node->background_psql('e2', on_error_stop => 0);
    $drop->query_until(qr/started/, "\\echo started\nDROP TABLE app.outbox;\n");
    wait_sql($node, 'postgres', "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE datname = 'e2' AND wait_event_type = 'Lock' AND query LIKE 'DROP%')");
    $e->release(3);
    $drop->query_safe('SELECT 1');
    $drop->quit;
    wait_lane($node, 'e2', "state = 'backoff' AND failed_passes > 1", db => 'e2');
    my @lines = log_since($node, $offset) =~ /(a pass of route "e2" failed: .*)/g;
    is(scalar @lines, 1, 'one line for the trouble, not one a pass');
    like($lines[0], qr/relation app\.outbox does not exist/, 'which says what is missing');
    value($node, 'DROP DATABASE e2');
};

subtest 'an extension that comes and goes' => sub {
    value($node, 'CREATE DATABASE e3');
    value($node, 'BEGIN; CREATE EXTENSION outbox_relay; DROP EXTENSION outbox_relay; COMMIT', 'e3');
    value($node, 'BEGIN; CREATE EXTENSION outbox_relay; ROLLBACK', 'e3');
    value($node, 'CREATE EXTENSION outbox_relay; DROP EXTENSION outbox_relay', 'e3') for 1 .. 10;
    value($node, 'CREATE EXTENSION outbox_relay', 'e3');
    make_outbox($node, 'e3', 'app.outbox');
    $e->reset;
    create_route($node, 'e3', 'app.outbox', $e->url, db => 'e3');
    insert_rows($node, 'app.outbox', 'e3', 3, db => 'e3');
    wait_empty($node, 'app.outbox', db => 'e3', endpoint => $e);
    pass('relays in the end');
    # What only has our names is none of ours.
    value($node, 'DROP EXTENSION outbox_relay CASCADE; CREATE SCHEMA outbox_relay; CREATE TABLE outbox_route (name text, relation text, url text, enabled bool)', 'e3');
    value($node, "INSERT INTO outbox_route VALUES ('e3', 'app.outbox', '" . $e->url . "', true)", 'e3');
    insert_rows($node, 'app.outbox', 'e3', 1, db => 'e3');
    wait_sql($node, 'postgres', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE datname = 'e3' AND backend_type LIKE 'outbox%')");
    is(value($node, 'SELECT count(*) FROM app.outbox', 'e3'), 1, 'a table that looks like ours relays nothing');
    cmp_ok(timed('DROP DATABASE e3'), '<', 1, 'and nobody is connected');
};

# T-23.
subtest "$blows random cancels and terminations while $events events drain" => sub {
    $e->reset;
    make_outbox($node, 'postgres', 'app.outbox');
    create_route($node, 'main', 'app.outbox', $e->url('/slow?ms=' . int(8 * 20 * $blows / $events + 1)), concurrency => 8, enabled => 0,
        interval => '20ms', retry_max_backoff => '100ms', retry_base_delay => '20ms');
    my $oracle = OutboxRelay::Oracle->new(node => $node, relation => 'app.outbox', endpoint => $e);
    stage_many($node, 'main', $events, truth => $oracle->truth_table);
    value($node, "UPDATE outbox_route SET enabled = true WHERE name = 'main'");
    my $session = $node->background_psql('postgres');
    my ($done, $left) = (0, $events);
    while ($done < $blows && $left > 0)
    {
        my $function = rand() < 0.5 ? 'pg_terminate_backend' : 'pg_cancel_backend';
        my ($hits) = $session->query_safe("SELECT count(*) FILTER (WHERE $function(pid)) FROM (SELECT pid FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker' ORDER BY random() LIMIT 1) AS w") =~ /(\d+)/;
        $done += $hits;
        usleep(int rand 20_000);
        $left = $session->query_safe('SELECT count(*) FROM app.outbox') =~ /(\d+)/ ? $1 : 0 if $done % 20 == 0;
    }
    $session->quit;
    wait_empty($node, 'app.outbox', endpoint => $e, timeout => 180);
    $oracle->check_nothing_lost;
    my %seen;
    my $more = grep { $seen{ $_->{event_id} }++ } $e->deliveries;
    diag("$events events, $done workers or statements ended at random: $more duplicates");
    cmp_ok($more, '<=', 8 * $done, 'repeats: at most what was in flight each time');
};

done_testing();
