# What operators do to the server and the database while the relay works: DROP DATABASE and its kin, evictions,
# cancelled statements, DDL, late extensions and routes, no free worker slot, types that drift.

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

my $node = new_node('operations', conf => "autovacuum = off\noutbox_relay.interval = 1s\n");
my $e = OutboxRelay::Endpoint->start;

# Seconds that a statement takes.
sub timed
{
    my ($sql, $db) = @_;
    my $started = time();
    $node->safe_psql($db // 'postgres', $sql);
    return time() - $started;
}

# A database with the extension, a table and a route.
sub database
{
    my ($name, $url, %columns) = @_;
    $node->safe_psql('postgres', "CREATE DATABASE $name");
    $node->safe_psql($name, 'CREATE EXTENSION outbox_relay');
    make_outbox($node, $name, 'app.outbox');
    create_route($node, $name, 'app.outbox', $url, db => $name, %columns);
    return wait_for_worker($node, $name);
}

# B-01
subtest 'another database is dropped at once, wherever the worker is' => sub {
    database('busy', $e->url('/hang'), pass_deadline => '20s', pass_statement_timeout => '5s', connect_timeout => '3s');
    my $drop = sub { timed('CREATE DATABASE other STRATEGY file_copy') && timed('DROP DATABASE other') };
    cmp_ok($drop->(), '<', 1, 'while it sleeps');
    stage($node, 'busy', db => 'busy');
    $e->wait_for_inflight;
    cmp_ok($drop->(), '<', 1, 'while it waits for an answer');

    $node->safe_psql('busy', <<'SQL');
CREATE FUNCTION app.wait() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN PERFORM pg_advisory_xact_lock(42); RETURN OLD; END $$;
SQL
    my $lock = hold_session($node, 'BEGIN; SELECT pg_advisory_xact_lock(42)', 'busy');
    $e->release;
    wait_empty($node, 'app.outbox', db => 'busy', all => 1);
    $node->safe_psql('busy', 'CREATE TRIGGER wait BEFORE DELETE ON app.outbox FOR EACH ROW EXECUTE FUNCTION app.wait()');
    $node->safe_psql('busy', "UPDATE outbox_route SET url = '" . $e->url . "'");
    stage($node, 'busy', db => 'busy');
    wait_sql($node, 'postgres', "SELECT count(*) > 0 FROM pg_stat_activity WHERE datname = 'busy' AND wait_event_type = 'Lock'");
    cmp_ok($drop->(), '<', 1, 'while it waits for a lock');
    $lock->query_safe('COMMIT');
    $lock->quit;
    $node->safe_psql('busy', 'DROP TRIGGER wait ON app.outbox');
    wait_empty($node, 'app.outbox', db => 'busy', all => 1);
    $e->reset;
};

subtest 'its own database may be renamed, copied, moved and dropped' => sub {
    cmp_ok(timed('ALTER DATABASE busy RENAME TO busy2'), '<', 3, 'RENAME');
    wait_for_worker($node, 'busy2');
    cmp_ok(timed('CREATE DATABASE copy TEMPLATE busy2'), '<', 3, 'TEMPLATE');
    # B-02's kind: the copy is bound elsewhere and stays idle; the original goes on.
    my $received = $e->count->{received};
    stage($node, 'busy', db => 'copy');
    stage($node, 'busy', db => 'busy2');
    $e->release(1);
    wait_empty($node, 'app.outbox', db => 'busy2', all => 1);
    is(value($node, 'SELECT count(*) FROM app.outbox', 'copy'), 1, 'a copy relays nothing');
    is(value($node, 'SELECT state FROM outbox_stat_route', 'copy'), 'foreign', 'and says why');
    is($e->count->{received}, $received + 1, 'one request');
    wait_for_worker($node, 'busy2');
    cmp_ok(timed('DROP DATABASE busy2'), '<', 3, 'DROP, with a worker connected');
    cmp_ok(timed('DROP DATABASE copy'), '<', 3, 'DROP of the copy');
    $e->reset;
};

make_outbox($node, 'postgres', 'app.outbox');
create_route($node, 'main', 'app.outbox', $e->url);
wait_for_worker($node, 'postgres');

# B-03, T-23 reduced
subtest 'evictions and cancels during a drain' => sub {
    my $oracle = OutboxRelay::Oracle->new(node => $node, relation => 'app.outbox', endpoint => $e);
    my $rounds = 20;
    for my $round (1 .. $rounds)
    {
        stage_many($node, 'main', 100, keys => 10, truth => $oracle->truth_table);
        my $function = $round % 2 ? 'pg_terminate_backend' : 'pg_cancel_backend';
        $node->safe_psql('postgres', "SELECT $function(pid) FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker'");
    }
    wait_empty($node, 'app.outbox', endpoint => $e);
    $oracle->check_nothing_lost('nothing lost', empty => 1);
    # Evictions settle what was answered; a cancel fails the pass, whose answers the lane remembers.
    $oracle->check_duplicates_at_most($rounds * 32, 'repeats: at most what was in flight each time');
    $e->reset;
};

# F-16
subtest 'a cancel between passes ends nobody' => sub {
    my $ours = "FROM pg_stat_activity WHERE backend_type LIKE 'outbox_relay %'";
    wait_sql($node, 'postgres', "SELECT count(*) = 3 $ours");
    my $pids = "SELECT string_agg(backend_type || pid, ' ' ORDER BY pid) $ours";
    my $before = value($node, $pids);
    for (1 .. 30)
    {
        $node->safe_psql('postgres', "SELECT pg_cancel_backend(pid), pg_sleep(0.02) $ours");
    }
    stage($node, 'main');
    wait_empty($node, 'app.outbox', endpoint => $e);
    is(value($node, $pids), $before, 'the same processes go on');
    $e->reset;
};

# F-16: the server looks for a cancel when it has written a line to the log too.
subtest 'a cancel that comes with the end of a pass does not undo it' => sub {
    my $before = lane($node, 'main');
    my $pids = "SELECT string_agg(pid::text, ' ' ORDER BY pid) FROM outbox_stat_worker";
    my $workers = value($node, $pids);
    $e->script('twice', '/status/500');
    value($node, q{UPDATE outbox_route SET retry_base_delay = '100ms', url = '} . $e->url('/script/twice') . q{' WHERE name = 'main'});
    set_conf($node, 'outbox_relay.fault_point' => 'after_commit=cancel');
    my $offset = log_offset($node);
    stage($node, 'main');
    wait_log($node, qr/route "main": HTTP 500/, $offset);
    wait_empty($node, 'app.outbox', endpoint => $e);
    wait_log($node, qr/route "main" relays again/, $offset);
    set_conf($node, 'outbox_relay.fault_point' => undef);
    is(lane($node, 'main')->{failed_passes}, $before->{failed_passes}, 'both passes are committed ones');
    is(value($node, $pids), $workers, 'the same processes go on');
    value($node, q{UPDATE outbox_route SET retry_base_delay = NULL, url = '} . $e->url . q{' WHERE name = 'main'});
    $e->reset;
};

# B-05, B-06
subtest 'extension, route and database that come later' => sub {
    set_conf($node, 'outbox_relay.databases' => 'postgres');
    $node->safe_psql('postgres', 'CREATE DATABASE later');
    $node->safe_psql('later', 'CREATE EXTENSION outbox_relay');
    make_outbox($node, 'later', 'app.outbox');
    create_route($node, 'l', 'app.outbox', $e->url, db => 'later');
    stage($node, 'l', db => 'later');
    is(scalar worker_pids($node, 'later'), 0, 'no worker where none is allowed');
    set_conf($node, 'outbox_relay.databases' => '*');
    wait_empty($node, 'app.outbox', db => 'later', all => 1);

    $node->safe_psql('later', <<"SQL");
BEGIN; DROP EXTENSION outbox_relay; CREATE EXTENSION outbox_relay;
INSERT INTO outbox_route (name, relation, url) VALUES ('again', 'app.outbox', '@{[ $e->url ]}'); COMMIT
SQL
    stage($node, 'again', db => 'later');
    wait_empty($node, 'app.outbox', db => 'later', all => 1);
    $node->safe_psql('later', 'DROP EXTENSION outbox_relay');
    wait_sql($node, 'postgres', "SELECT count(*) = 0 FROM pg_stat_activity WHERE datname = 'later'");
    pass('DROP EXTENSION ends the workers');
    # B-08: something that only looks like ours
    $node->safe_psql('later', 'CREATE SCHEMA outbox_relay; CREATE TABLE outbox_route (name text)');
    is(scalar worker_pids($node, 'later'), 0, 'a table of the name is nothing to us');
    $e->reset;
};

# B-23
subtest 'a column that drifts is refused by name, and heals' => sub {
    for my $drift (['attempts', 'smallint', 'int'], ['status', 'int USING 1', "text USING 'pending'"],
        ['available_at', 'timestamp', 'timestamptz'], ['last_error', 'bytea USING NULL', 'text USING NULL'],
        ['event_id', 'text', 'uuid USING event_id::uuid'], ['payload', 'json', 'jsonb'])
    {
        my ($column, $wrong, $right) = @$drift;
        $node->safe_psql('postgres', 'SELECT outbox_stat_reset()');
        $node->safe_psql('postgres', "ALTER TABLE app.outbox ALTER $column TYPE $wrong");
        my $lane = wait_lane($node, 'main', 'failed_passes > 0');
        my ($type) = $wrong =~ /^(\w+)/;
        like($lane->{last_error}, qr/route "main".*$column/, "$column: named");
        $node->safe_psql('postgres', "ALTER TABLE app.outbox ALTER $column TYPE $right");
        stage($node, 'main');
        wait_empty($node, 'app.outbox', all => 1);
    }
    $e->reset;
};

# B-12 reduced: the wake comes before a slow commit is visible to anybody
subtest 'many small transactions, none is left behind' => sub {
    my $oracle = OutboxRelay::Oracle->new(node => $node, relation => 'app.outbox', endpoint => $e, table => 'truth_small');
    $node->pgbench('-n -c 4 -j 1 -t 250', 0, [qr/processed: 1000\/1000/], [qr/^/], 'a thousand transactions',
        { 'stage' => "INSERT INTO truth_small (event_id) SELECT outbox_stage('main', 't', '1')" });
    wait_empty($node, 'app.outbox', all => 1);
    $oracle->check_nothing_lost('all are there', empty => 1);
    $oracle->check_duplicates_at_most(0, 'once each');
    $e->reset;
};

# B-25 reduced
subtest 'rows that are not for now cost nothing' => sub {
    insert_rows($node, 'app.outbox', 'main', 50_000, columns => { status => 'failed' });
    insert_rows($node, 'app.outbox', 'main', 50_000, columns => { available_at => \q{now() + interval '1 day'} });
    insert_rows($node, 'app.outbox', 'nobody', 50_000);
    my $before = lane($node, 'main');
    stage_many($node, 'main', 100);
    $e->wait_for_count(100, of => 'acked');
    cmp_ok(lane($node, 'main')->{failed_passes} - $before->{failed_passes}, '==', 0, 'no pass fails');
    cmp_ok(timed("SELECT outbox_depth('main')"), '<', 1, 'depth() takes less than a second');
    $node->safe_psql('postgres', 'TRUNCATE app.outbox');
    $e->reset;
};

# F-18
subtest 'no worker slot is free' => sub {
    $node->append_conf('postgresql.conf', "max_worker_processes = 2\nmax_logical_replication_workers = 0");
    my $offset = log_offset($node);
    $node->restart;
    # One for the launcher, one for the first worker; the second waits for a slot.
    wait_log($node, qr/no background worker slot is free/, $offset);
    stage($node, 'main');
    wait_empty($node, 'app.outbox', all => 1);
    my @lines = log_since($node, $offset) =~ /no background worker slot is free/g;
    is(scalar @lines, 1, 'said once');
};

# F-18: what has no worker at all says so, and is not forgotten.
subtest 'no worker slot is free for a whole database' => sub {
    value($node, "UPDATE outbox_route SET enabled = false");
    $node->safe_psql('postgres', 'DROP DATABASE later');
    $node->safe_psql('postgres', 'CREATE DATABASE spare');
    $node->safe_psql('spare', 'CREATE EXTENSION outbox_relay');
    make_outbox($node, 'spare', 'app.outbox');
    set_conf($node, 'outbox_relay.workers' => 1);
    my $offset = log_offset($node);
    $node->restart;
    # It was looked at and had no routes: from now on it is for its next change of routes to say so.
    wait_log($node, qr/(?:outbox_relay worker" \(PID \d+\) exited.*?){2}/s, $offset);
    value($node, "UPDATE outbox_route SET enabled = true");
    wait_for_worker($node, 'postgres');
    create_route($node, 'spare', 'app.outbox', $e->url, db => 'spare');
    stage($node, 'spare', db => 'spare');
    my $lane = wait_lane($node, 'spare', "state = 'broken'", db => 'spare');
    like($lane->{last_error}, qr/raise max_worker_processes/, 'shown, and why');
    is(lane($node, 'main')->{state} eq 'broken', '', 'where there is a worker it is not');
    $node->safe_psql('spare', 'UPDATE outbox_route SET enabled = false');
    is(lane($node, 'spare', 'spare')->{state}, 'paused', 'nor for a route that is paused');
    $node->safe_psql('spare', 'UPDATE outbox_route SET enabled = true');
    # What found no slot has not failed to start: the tries do not become rare.
    sleep 8;
    value($node, "UPDATE outbox_route SET enabled = false");
    my $freed = time;
    wait_empty($node, 'app.outbox', db => 'spare', all => 1);
    cmp_ok(time - $freed, '<', 5, 'soon after a slot is free');
    isnt(lane($node, 'spare', 'spare')->{state}, 'broken', 'served when a slot is free');
};

$node->stop;
done_testing();
