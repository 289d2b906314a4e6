# Tables whose owners and writers mean harm, or just do not know: swapped under the relay's feet, with children, with
# constraints that no update passes, with rows that no staging would write, under locks and in deadlocks, behind old
# snapshots, and transactions that commit late.

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

my $node = new_node('tables', conf => "autovacuum = off\noutbox_relay.workers = 2\ndeadlock_timeout = 100ms\n");
my $e = OutboxRelay::Endpoint->start;
my %fast = (interval => '200ms', retry_base_delay => '100ms', retry_max_backoff => '400ms');
make_outbox($node, 'postgres', 'app.good');
create_route($node, 'good', 'app.good', $e->url, %fast);

sub scene
{
    my ($name, %columns) = @_;
    $e->reset;
    make_outbox($node, 'postgres', "app.$name");
    create_route($node, $name, "app.$name", $columns{url} // $e->url, %fast, %columns);
    return "app.$name";
}

sub neighbour_is_well
{
    my $id = stage($node, 'good');
    my $started = time();
    $e->wait_until(sub { grep { $_->{event_id} eq $id } $e->deliveries }, what => 'the neighbour');
    return cmp_ok(time() - $started, '<', 2, 'another lane is not held');
}

sub sent
{
    my %count;
    $count{ $e->headers($_)->{'ce-type'} }++ for $e->requests;
    return \%count;
}

# T-07
subtest 'a table that is swapped for a view again and again' => sub {
    my $table = scene('swap');
    $node->safe_psql('postgres', 'CREATE TABLE app.decoy (LIKE app.swap INCLUDING DEFAULTS)');
    insert_rows($node, 'app.decoy', 'swap', 5, type => 'decoy');
    my $flip = $node->background_psql('postgres');
    $flip->query_until(qr/started/, <<'SQL');
\echo started
DO $$ BEGIN FOR i IN 1 .. 300 LOOP
    ALTER TABLE app.swap RENAME TO swap_real; CREATE VIEW app.swap AS SELECT * FROM app.decoy; COMMIT;
    PERFORM pg_sleep(0.003);
    DROP VIEW app.swap; ALTER TABLE app.swap_real RENAME TO swap; COMMIT;
    INSERT INTO app.swap (id, outbox_route, event_id, event_type, occurred_at, payload, status, created_at)
        SELECT gen_random_uuid(), 'swap', gen_random_uuid(), 'true', now(), '{}', 'pending', now() FROM generate_series(1, 3); COMMIT;
    PERFORM pg_sleep(0.003);
END LOOP; END $$;
\echo finished
SQL
    neighbour_is_well();
    $flip->query_until(qr/finished/, '');
    $flip->quit;
    wait_empty($node, $table, all => 1, endpoint => $e);
    my $sent = sent();
    is($sent->{decoy}, undef, 'nothing is sent that the view shows');
    is($sent->{true}, 900, 'all of the table is, once');
    is(value($node, 'SELECT count(*) FROM app.decoy'), 5, 'what lies behind the view is not touched');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'swap'");
};

# T-07: the rows of a child are not the table's, and may lie at the same places.
subtest 'a table with a child' => sub {
    my $table = scene('parent', enabled => 'false');
    $node->safe_psql('postgres', 'CREATE SCHEMA evil; CREATE TABLE evil.child () INHERITS (app.parent)');
    insert_rows($node, 'app.parent', 'parent', 3, type => 'parent');
    insert_rows($node, 'evil.child', 'parent', 3, type => 'child');
    insert_rows($node, 'evil.child', 'other', 3, type => 'bystander');
    $node->safe_psql('postgres', "UPDATE evil.child SET status = 'failed' WHERE event_type = 'child' AND payload = '{\"n\": 2}'");
    $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = 'parent'");
    wait_lane($node, 'parent', 'passes + failed_passes >= 4');
    my $sent = sent();
    is(value($node, q{SELECT string_agg(event_type || ' ' || status, ', ' ORDER BY event_type, status) FROM evil.child}),
        'bystander pending, bystander pending, bystander pending, child failed, child pending, child pending', 'the child has kept its rows');
    is($sent->{$_}, undef, "nothing of it was sent: $_") for qw(child bystander);
    is(value($node, 'SELECT count(*) FROM ONLY app.parent'), 3 - ($sent->{parent} // 0), 'and of the parent no more was deleted than was sent');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'parent'");
};

# T-09
subtest 'constraints that no update passes' => sub {
    my %faults = (
        no_failed => [ "CHECK (status <> 'failed')", 'no_failed_status_check' ],
        no_error => [ 'CHECK (last_error IS NULL)', 'no_error_last_error_check' ],
        no_attempts => [ 'CHECK (attempts = 0)', 'no_attempts_attempts_check' ]);
    for my $name (sort keys %faults)
    {
        my ($constraint, $called) = @{ $faults{$name} };
        my $table = scene($name, url => $e->url('/status/500'), max_attempts => 1 + ($name eq 'no_attempts'), breaker_threshold => 0);
        $node->safe_psql('postgres', "ALTER TABLE $table ADD $constraint");
        stage_many($node, $name, 3);
        my $lane = wait_lane($node, $name, 'failed_passes >= 3');
        like($lane->{last_error}, qr/violates check constraint "$called"/, "$name: the message names the constraint");
        is($lane->{set_aside}, 0, 'no row is blamed');
        is(value($node, "SELECT count(*) FROM $table WHERE attempts = 0 AND status = 'pending'"), 3, 'the rows are as they were');
        neighbour_is_well();
        $node->safe_psql('postgres', "ALTER TABLE $table DROP CONSTRAINT $called");
        wait_sql($node, 'postgres', "SELECT bool_and(status = 'failed') FROM $table");
        $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = '$name'");
    }
};

# T-20
subtest 'rows that no staging would write' => sub {
    my $table = scene('odd', max_attempts => 3);
    my @cases = (
        # columns                                           what becomes of it
        [ { status => 'published' },                         'stays' ],
        [ { status => 'processing' },                        'stays' ],
        [ { status => 'PENDING' },                           'stays' ],
        [ { status => '' },                                  'stays' ],
        [ { attempts => 2147483647 },                        'goes' ],
        [ { attempts => -2147483648 },                       'goes' ],
        [ { available_at => 'infinity' },                    'stays' ],
        [ { available_at => '-infinity' },                   'goes' ],
        [ { created_at => '-infinity' },                     'goes' ],
        [ { created_at => 'infinity' },                      'goes' ],
        [ { created_at => '4714-11-24 00:00:00+00 BC' },     'goes' ],
        [ { published_at => '-infinity', processing_at => 'infinity' }, 'goes' ],
        [ { occurred_at => 'infinity' },                     'fails' ],
        [ { tenant_id => '00000000-0000-0000-0000-000000000000' }, 'goes' ],
        [ { event_type => ' ' },                             'goes' ],
        [ { payload => 'null' },                             'goes' ],
        [ { payload => '1e400' },                            'goes' ],
        [ { payload => \q{('"' || repeat('\\u0001', 1000) || '"')::jsonb} }, 'goes' ],
        [ { payload => \q{(repeat('[', 5000) || repeat(']', 5000))::jsonb} }, 'goes' ],
        [ { ordering_key => '' },                            'goes' ],
        [ { last_error => \q{repeat('x', 100000)} },         'goes' ]);
    my %fate;
    for (@cases)
    {
        my ($columns, $fate) = @$_;
        my ($id) = insert_rows($node, $table, 'odd', 1, columns => $columns);
        $fate{$id} = [ $fate, join ', ', map { "$_ " . (ref $columns->{$_} ? '...' : $columns->{$_}) } sort keys %$columns ];
    }
    my $gone = grep { $_->[1] eq 'goes' } @cases;
    wait_lane($node, 'odd', "published >= $gone AND failed >= 1");
    my %left = map { split /\|/, $_, 2 } split /\n/, $node->safe_psql('postgres', "SELECT event_id, status FROM $table");
    for my $id (sort { $fate{$a}[1] cmp $fate{$b}[1] } keys %fate)
    {
        my $is = !exists $left{$id} ? 'goes' : $left{$id} eq 'failed' ? 'fails' : 'stays';
        is($is, $fate{$id}[0], "$fate{$id}[1]: $fate{$id}[0]");
    }
    like(value($node, q{SELECT outbox_depth('odd')}), qr/^\(1,1,1\)$/, 'the depth is sane');
    like(value($node, q{SELECT outbox_oldest_pending_age('odd') IS NOT NULL}), qr/^[tf]$/, 'and the age');
    is(lane($node, 'odd')->{failed_passes}, 0, 'no pass failed');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'odd'");
};

# T-21, F-26, F-28
subtest 'locks' => sub {
    my $table = scene('locked', pass_statement_timeout => '300ms');
    insert_rows($node, $table, 'locked', 2000, columns => { available_at => 'infinity' });
    my $holder = hold_session($node, "BEGIN; SELECT count(*) FROM (SELECT FROM $table FOR UPDATE) s; SELECT pg_advisory_lock_shared(i) FROM generate_series(1, 500) i");
    $node->safe_psql('postgres', "UPDATE outbox_route SET max_claim_rows = 50 WHERE name = 'locked'");
    my @ids = stage_many($node, 'locked', 20);
    $e->wait_until(sub { my %s = map { $_->{event_id} => 1 } $e->deliveries; 20 == grep { $s{$_} } @ids }, what => 'rows beside the locked ones');
    pass('what is not locked goes out');
    $holder->query_safe("COMMIT; BEGIN; LOCK TABLE $table IN ACCESS EXCLUSIVE MODE");
    my $lane = wait_lane($node, 'locked', 'failed_passes >= 2');
    like($lane->{last_error}, qr/lock timeout|statement timeout/, 'a locked table: the pass ends at its limit');
    cmp_ok($lane->{last_pass_ms}, '<', 1500, 'soon');
    neighbour_is_well();
    is(value($node, "SELECT count(*) FROM pg_locks l JOIN pg_stat_activity a USING (pid) WHERE a.backend_type = 'outbox_relay worker' AND a.state <> 'active' AND l.granted AND l.locktype = 'relation' AND l.relation = '$table'::regclass"),
        0, 'nothing is locked by a worker that rests');
    $holder->query_safe('COMMIT');
    $holder->quit;
    stage($node, 'locked');
    wait_sql($node, 'postgres', "SELECT count(*) = 0 FROM $table WHERE available_at IS NULL");
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'locked'");
};

# F-29: the closing statement and the application want the same two locks, the other way round.
subtest 'a deadlock with the application' => sub {
    my $table = scene('deadlock', url => $e->url('/hang'), pass_statement_timeout => '5s', pass_deadline => '20s');
    $node->safe_psql('postgres', <<"SQL");
CREATE TABLE app.total (n int); INSERT INTO app.total VALUES (0);
CREATE FUNCTION app.total() RETURNS trigger LANGUAGE plpgsql AS \$\$ BEGIN UPDATE app.total SET n = n + 1; RETURN OLD; END \$\$;
CREATE TRIGGER total BEFORE DELETE ON $table FOR EACH ROW EXECUTE FUNCTION app.total();
SQL
    my ($id) = stage_many($node, 'deadlock', 1);
    my $oracle = OutboxRelay::Oracle->new(node => $node, relation => $table, endpoint => $e, truth => [$id]);
    $e->wait_for_inflight;
    # The pass has the row; we have the total, then want the row.
    my $app = hold_session($node, "SET deadlock_timeout = '10s'; BEGIN; UPDATE app.total SET n = n + 100");
    $app->query_until(qr/started/, "\\echo started\nUPDATE $table SET payload = payload;\n\\echo updated\n");
    wait_sql($node, 'postgres', "SELECT count(*) = 1 FROM pg_locks WHERE NOT granted");
    $e->release(1);
    my $lane = wait_lane($node, 'deadlock', 'failed_passes >= 1');
    like($lane->{last_error}, qr/deadlock detected/, 'the pass fails');
    $app->query_until(qr/updated/, '');
    $app->query_safe('COMMIT');
    $app->quit;
    wait_empty($node, $table, all => 1, endpoint => $e);
    $oracle->check_nothing_lost(undef, empty => 1);
    # The application's update made another version of the row: it is sent again, which is allowed to happen.
    $oracle->check_duplicates_at_most(1, 'sent once more at most, since the row has changed');
    is(value($node, 'SELECT n FROM app.total'), 101, 'and settled once');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'deadlock'");
};

# B-13
subtest 'transactions that commit late' => sub {
    my $table = scene('late');
    for my $round (1 .. 5)
    {
        my $t1 = hold_session($node, "BEGIN; SELECT outbox_stage('late', 'early$round', '{}')");
        # Older still, and with a greater id.
        my $t2 = hold_session($node, "BEGIN; INSERT INTO $table (id, outbox_route, event_id, event_type, occurred_at, payload, status, created_at)"
              . " VALUES (('ffffffff-ffff-ffff-ffff-' || lpad($round\::text, 12, '0'))::uuid, 'late', gen_random_uuid(), 'old$round', now(), '{}', 'pending', now() - interval '1 day')");
        stage($node, 'late', event_type => "later$round");
        $e->wait_until(sub { sent()->{"later$round"} }, what => 'what committed first');
        $_->query_safe('COMMIT') for $t1, $t2;
        $_->quit for $t1, $t2;
    }
    wait_empty($node, $table, all => 1, endpoint => $e);
    is_deeply(sent(), { map { ("early$_" => 1, "later$_" => 1, "old$_" => 1) } 1 .. 5 }, 'each event, once');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'late'");
};

# B-28, F-33
subtest 'an old snapshot pins what the relay deletes' => sub {
    my $table = scene('pinned', max_claim_rows => 500);
    my $reader = hold_session($node, 'BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');
    my @took;
    for my $round (1 .. 6)
    {
        insert_rows($node, $table, 'pinned', 5000);
        my $started = time();
        wait_empty($node, $table, all => 1, timeout => 120);
        push @took, time() - $started;
    }
    my $lane = lane($node, 'pinned');
    is($lane->{failed_passes}, 0, 'no pass fails behind 30,000 dead rows');
    is($lane->{published}, 30_000, 'all go out');
    cmp_ok($took[-1], '<', 3 * $took[1] + 2, sprintf 'and it does not get slow: %.1f s, then %.1f s for 5,000', @took[ 1, -1 ]);
    cmp_ok(value($node, q{SELECT coalesce(max(extract(epoch FROM clock_timestamp() - xact_start)), 0) FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker'}),
        '<', 7, 'our own transactions are short');
    $reader->query_safe('COMMIT');
    $reader->quit;
    stage($node, 'pinned');
    wait_empty($node, $table, all => 1);
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'pinned'");
};

$node->stop;
done_testing();
