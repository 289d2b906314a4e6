# The main job: what commits arrives, once and in its key's order, and leaves the table; what does not
# commit never arrives.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;
use OutboxRelay::Oracle;

my $node = new_node('relay', conf => "max_prepared_transactions = 5\nautovacuum = off\n");
my $e = OutboxRelay::Endpoint->start;

# Event ids that the endpoint has taken, in order of arrival.
sub arrived { return map { $_->{event_id} } sort { $a->{n} <=> $b->{n} } grep { $_->{acked} } $e->deliveries; }

sub has_arrived { my ($id) = @_; return scalar grep { $_ eq $id } arrived(); }

sub wait_for_event
{
    my ($id, %opts) = @_;
    return $e->wait_until(sub { has_arrived($id) }, what => "event $id", %opts);
}

# A route with a table of its own, polled often.
sub table_and_route
{
    my ($name, %columns) = @_;
    make_outbox($node, 'postgres', "app.$name");
    create_route($node, $name, "app.$name", $e->url, interval => '100ms', %columns);
    return "app.$name";
}

subtest '1,000 events of 40 keys arrive once, in order' => sub {
    my $table = table_and_route('main');
    my $oracle = OutboxRelay::Oracle->new(node => $node, relation => $table, endpoint => $e);
    for (1 .. 10)
    {
        stage_many($node, 'main', 100, keys => 40, truth => $oracle->truth_table);
        stage_many($node, 'main', 10, keys => 40, truth => $oracle->truth_table, rollback => 1);
    }
    wait_empty($node, $table, all => 1, endpoint => $e);
    is($oracle->compare->{committed}, 1000, 'committed');
    is(scalar(arrived()), 1000, 'arrived');
    $oracle->check_nothing_lost(undef, empty => 1);
    $oracle->check_nothing_invented;
    $oracle->check_duplicates_at_most(0);
    $oracle->check_key_order;
    my $lane = wait_lane($node, 'main', 'published = 1000');
    is_deeply([ @$lane{qw(claimed failed retried refused failed_passes)} ], [ 1000, 0, 0, 0, 0 ], 'counted so');
};

# STG-02, STG-03
subtest 'rollback and savepoints' => sub {
    my $table = table_and_route('undone');
    my ($rolled_back) = stage_many($node, 'undone', 1, rollback => 1);
    wait_passes($node, 'undone', 2);
    is(value($node, "SELECT count(*) FROM $table"), 0, 'nothing is left of a rollback');
    my @ids = map { sprintf '00000000-0000-4000-8000-00000000000%d', $_ } 1 .. 4;
    my $stage = sub { "SELECT outbox_stage('undone', 't', '{}', event_id => '$ids[$_[0]]')" };
    $node->safe_psql('postgres', join ";\n", 'BEGIN', $stage->(0), 'SAVEPOINT a', $stage->(1), 'ROLLBACK TO a',
        'SAVEPOINT b', $stage->(2), 'RELEASE b', 'COMMIT');
    # A whole transaction inside a savepoint that is undone; then one more event to wait for.
    $node->safe_psql('postgres', join ";\n", 'BEGIN', 'SAVEPOINT a', $stage->(1), 'ROLLBACK TO a', 'COMMIT');
    $node->safe_psql('postgres', $stage->(3));
    wait_for_event($_) for @ids[ 0, 2, 3 ];
    wait_passes($node, 'undone', 2);
    ok(!has_arrived($_), 'undone') for $rolled_back, $ids[1];
};

# STG-04, CLM-11's other half
subtest 'nothing before the commit' => sub {
    my $table = table_and_route('held');
    my $id = '00000000-0000-4000-8000-0000000000aa';
    my $session = hold_session($node, "BEGIN; SELECT outbox_stage('held', 't', '{}', event_id => '$id')");
    wait_passes($node, 'held', 3);
    ok(!has_arrived($id), 'three passes see nothing of it');
    is(value($node, "SELECT count(*) FROM $table"), 0, 'nor does anybody else');
    $session->query_safe('COMMIT');
    wait_for_event($id);
    $session->quit;
    pass('it arrives after the commit');
};

# STG-12, STG-13
subtest 'the same event id again' => sub {
    my $table = table_and_route('again');
    create_route($node, 'again2', $table, $e->url);
    my $id = stage($node, 'again');
    $e->wait_until(sub { has_arrived($id) == 1 });
    wait_empty($node, $table, all => 1);
    is(stage($node, 'again', event_id => $id), $id, 'a consumed id can be staged again');
    $e->wait_until(sub { has_arrived($id) == 2 });
    wait_empty($node, $table, all => 1);
    is($node->safe_psql('postgres', qq{BEGIN;
        SELECT outbox_stage('again', 't', '{}', event_id => '$id');
        SELECT outbox_stage('again2', 't', '{}', event_id => '$id');
        COMMIT;}), "$id\n$id", 'one id on two routes');
    $e->wait_until(sub { has_arrived($id) == 4 });
    wait_empty($node, $table, all => 1);
    pass('is two events');
};

# STG-24
subtest 'routes of one table do not mix' => sub {
    my $table = table_and_route('mine');
    create_route($node, 'theirs', $table, $e->url, enabled => 'false');
    my @ids = map { stage($node, $_) } qw(mine theirs mine theirs mine);
    my $versions = "SELECT string_agg(ctid || ' ' || xmin, ',' ORDER BY created_at) FROM $table WHERE outbox_route = 'theirs'";
    my $before = value($node, $versions);
    wait_for_event($ids[$_]) for 0, 2, 4;
    wait_passes($node, 'mine', 2);
    ok(!has_arrived($ids[$_]), 'of the paused route: nothing') for 1, 3;
    is(value($node, $versions), $before, 'its rows are as they were');
    $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = 'theirs'");
    wait_for_event($ids[$_]) for 1, 3;
    wait_empty($node, $table, all => 1);
};

# STG-25 (20 sessions of 50 events instead of 500)
subtest '20 sessions on one route' => sub {
    my $table = table_and_route('crowd');
    my $oracle = OutboxRelay::Oracle->new(
        node => $node, relation => $table, endpoint => $e, table => 'crowd_truth', route => 'crowd');
    $e->reset;
    my $script = <<'SQL';
BEGIN;
INSERT INTO crowd_truth (event_id, ordering_key) SELECT outbox_stage('crowd', 'test.crowd', '{}',
    ordering_key => 'client ' || :client_id), 'client ' || :client_id;
COMMIT;
SQL
    $node->pgbench('-n -M prepared -c 20 -j 2 -t 50', 0, [qr{processed: 1000/1000}], [qr{^$}],
        'staging', { 'crowd' => $script });
    wait_empty($node, $table, all => 1, endpoint => $e);
    is($oracle->compare->{committed}, 1000, 'committed');
    $oracle->check_nothing_lost(undef, empty => 1);
    $oracle->check_nothing_invented;
    $oracle->check_duplicates_at_most(0);
    $oracle->check_key_order;
};

subtest 'plain INSERT and COPY, with and without the wake trigger' => sub {
    # Polled once a day: whatever arrives has been woken for.
    my %triggers = (
        exact => 'REFERENCING NEW TABLE AS added FOR EACH STATEMENT', whole => 'FOR EACH STATEMENT');
    my $silent = table_and_route('silent', interval => '1d');
    wait_lane($node, 'silent', "passes > 0 AND state = 'idle'");
    my ($unseen) = insert_rows($node, $silent, 'silent', 1);
    for my $name (sort keys %triggers)
    {
        my $table = table_and_route($name, interval => '1d');
        $node->safe_psql('postgres',
            "CREATE TRIGGER wake AFTER INSERT ON $table $triggers{$name} EXECUTE FUNCTION outbox_wake()");
        wait_lane($node, $name, "passes > 0 AND state = 'idle'");
        my ($id) = insert_rows($node, $table, $name, 1);
        wait_for_event($id, what => "an INSERT into $table");
        pass("INSERT wakes ($name)");
        wait_lane($node, $name, "state = 'idle'");
        $id = '00000000-0000-4000-8000-0000000000' . ($name eq 'exact' ? 'c1' : 'c2');
        my @columns = qw(id outbox_route event_id event_type occurred_at payload status created_at);
        $node->safe_psql('postgres', "COPY $table (" . join(', ', @columns) . ") FROM stdin;\n"
              . join("\t", $id, $name, $id, 't', '2026-01-01 00:00:00Z', '{}', 'pending', '2026-01-01 00:00:00Z')
              . "\n\\.\n");
        wait_for_event($id, what => "a COPY into $table");
        pass("COPY wakes ($name)");
    }
    ok(!has_arrived($unseen), 'without the trigger nobody noticed the row');
    my $id = stage($node, 'silent');
    wait_for_event($_) for $id, $unseen;
    pass('until the lane was woken for another reason');
    my $polled = table_and_route('polled');
    my ($found) = insert_rows($node, $polled, 'polled', 1);
    wait_for_event($found, what => 'a row that only the poll can find');
    pass('a poll finds it');
};

subtest 'two-phase commit' => sub {
    my $table = table_and_route('twophase');
    my %ids = (kept => '00000000-0000-4000-8000-0000000000e1', dropped => '00000000-0000-4000-8000-0000000000e2');
    $node->safe_psql('postgres', "BEGIN; SELECT outbox_stage('twophase', 't', '{}', event_id => '$ids{$_}');
        PREPARE TRANSACTION '$_'") for sort keys %ids;
    wait_passes($node, 'twophase', 3);
    ok(!has_arrived($_), 'prepared is not committed') for values %ids;
    $node->safe_psql('postgres', "ROLLBACK PREPARED 'dropped'");
    $node->safe_psql('postgres', "COMMIT PREPARED 'kept'");
    wait_for_event($ids{kept});
    wait_passes($node, 'twophase', 2);
    ok(!has_arrived($ids{dropped}), 'rolled back in the second phase');
    is(value($node, "SELECT count(*) FROM $table"), 0, 'empty');
};

done_testing();
