# Kills at random moments: a retain drain, a consume drain with a delivery log, a migration from one to the other, and
# relays of others on the same rows. Every event arrives; what arrives twice stays within the bound of its storage.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use IPC::Run ();
use Time::HiRes qw(usleep);
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;
use OutboxRelay::Oracle;

my $kills = $ENV{STORAGE_KILLS} || 12;
my $events = $ENV{STORAGE_EVENTS} || 3000;
my $concurrency = 8;
# A kill restarts the server, which takes half a second: a drain lasts that long for each.
my $delay_ms = int(600 * $concurrency * $kills / $events);
my $node = new_node('storage', conf => "outbox_relay.workers = 1\nautovacuum = off\n");
my $e = OutboxRelay::Endpoint->start;

sub table_and_route
{
    my ($name, %columns) = @_;
    make_outbox($node, 'postgres', "app.$name");
    create_route($node, $name, "app.$name", $e->url(delete $columns{path} // '/ok'), interval => '50ms', concurrency => $concurrency,
        retry_base_delay => '20ms', retry_max_backoff => '200ms', reclaim_stale_after => '300ms', %columns);
    return "app.$name";
}

# Kills the worker at random moments while ROUTE drains; returns how often.
sub drain_under_kills
{
    my ($route, $table) = @_;
    my $done = 0;
    while ($done < $kills)
    {
        usleep(20_000 + int rand 150_000);
        last if value_of("SELECT NOT EXISTS (SELECT FROM $table WHERE status IN ('pending', 'processing'))") eq 't';
        my $pid = eval { worker_pid($node, 'postgres') } or next;
        kill 'KILL', $pid and ++$done;
    }
    wait_until(sub { value_of('SELECT 1') eq '1' }, what => 'the server after its last crash');
    wait_empty($node, $table, timeout => 120, endpoint => $e);
    return $done;
}

# value(), also while the server restarts after a crash.
sub value_of
{
    my ($sql) = @_;
    my $value;
    wait_until(sub { defined($value = eval { value($node, $sql) }) }, what => 'an answer of the server', poll_ms => 30);
    return $value;
}

sub duplicates
{
    my %seen;
    my $more = 0;
    $more += $seen{ $_->{event_id} }++ ? 1 : 0 for grep { $_->{acked} } $e->deliveries;
    return $more;
}

subtest "a retain drain, killed $kills times" => sub {
    my $table = table_and_route('kept', storage => 'retain', enabled => 0, path => "/slow?ms=$delay_ms");
    my $oracle = OutboxRelay::Oracle->new(node => $node, relation => $table, endpoint => $e);
    stage_many($node, 'kept', $events, truth => $oracle->truth_table);
    value($node, "UPDATE outbox_route SET enabled = true WHERE name = 'kept'");
    my $done = drain_under_kills('kept', $table);
    is($done, $kills, "killed $done times");
    diag("$events events of a retain drain, killed $done times: " . duplicates() . ' duplicates');
    is(value($node, "SELECT count(*) FROM $table WHERE status = 'published'"), $events, 'all are published');
    $oracle->check_nothing_lost;
    # One chunk, and what was in flight or answered beyond it when the worker died.
    cmp_ok(duplicates(), '<=', $done * (32 + $concurrency), duplicates() . ' duplicates: at most 32 and those in flight a kill');
    $e->reset;
};

subtest "a consume drain with a delivery log, killed $kills times" => sub {
    value($node, $_) for split /;\n/, value($node, "SELECT string_agg(s, E';\\n') FROM outbox_ddl('app.x', delivery_log => 'app.log') s WHERE s LIKE '%app.log%'");
    my $table = table_and_route('logged', delivery_log => 'app.log', enabled => 0, path => "/slow?ms=$delay_ms");
    my $oracle = OutboxRelay::Oracle->new(node => $node, relation => $table, endpoint => $e);
    stage_many($node, 'logged', $events, truth => $oracle->truth_table);
    value($node, "UPDATE outbox_route SET enabled = true WHERE name = 'logged'");
    my $done = drain_under_kills('logged', $table);
    is($done, $kills, "killed $done times");
    diag("$events events of a logged consume drain, killed $done times: " . duplicates() . ' duplicates');
    is(value($node, 'SELECT count(*) || $$ $$ || count(DISTINCT event_id) FROM app.log'), "$events $events", 'log rows are the committed deletions, each once');
    my %acked = map { $_->{event_id} => 1 } grep { $_->{acked} } $e->deliveries;
    my @unacked = grep { !$acked{$_} } split /\n/, value($node, 'SELECT event_id FROM app.log');
    is(scalar(@unacked), 0, 'each of them acknowledged');
    cmp_ok(duplicates(), '<=', $done * 100, duplicates() . ' duplicates: at most max_claim_rows a kill');
    $e->reset;
};

# The seed's protocols by plain SQL: a relay of the retain kind and one of the consume kind. Each notes what it took.
my %other = (
    retain => <<'SQL',
CREATE PROCEDURE app.relay_retain(tbl text, rounds int) LANGUAGE plpgsql AS $$
DECLARE taken uuid[];
BEGIN
    FOR round IN 1..rounds LOOP
        EXECUTE format('WITH c AS (SELECT id FROM %s WHERE status = ''pending'' AND (available_at IS NULL OR available_at <= now())
                ORDER BY created_at LIMIT 20 FOR UPDATE SKIP LOCKED)
            UPDATE %s o SET status = ''processing'', processing_at = clock_timestamp() FROM c WHERE o.id = c.id', tbl, tbl);
        EXECUTE format('SELECT array_agg(event_id) FROM %s WHERE status = ''processing'' AND xmin = pg_current_xact_id()::xid', tbl) INTO taken;
        COMMIT;
        INSERT INTO app.others SELECT unnest(taken), 'retain';
        PERFORM pg_sleep(0.005);
        EXECUTE format('UPDATE %s SET status = ''published'', published_at = now() WHERE event_id = ANY ($1) AND status = ''processing''', tbl) USING taken;
        COMMIT;
    END LOOP;
END $$
SQL
    consume => <<'SQL');
CREATE PROCEDURE app.relay_consume(tbl text, rounds int) LANGUAGE plpgsql AS $$
DECLARE taken uuid[];
BEGIN
    FOR round IN 1..rounds LOOP
        EXECUTE format('SELECT array_agg(event_id) FROM (SELECT event_id FROM %s WHERE status = ''pending''
            AND (available_at IS NULL OR available_at <= now()) ORDER BY created_at LIMIT 20 FOR UPDATE SKIP LOCKED) c', tbl) INTO taken;
        INSERT INTO app.others SELECT unnest(taken), 'consume';
        PERFORM pg_sleep(0.005);
        EXECUTE format('DELETE FROM %s WHERE event_id = ANY ($1)', tbl) USING taken;
        COMMIT;
    END LOOP;
END $$
SQL

# What arrived at the endpoint and what the others took, compared with what was staged.
sub check_shared
{
    my ($what, @ids) = @_;
    my (%ours, %theirs);
    $ours{ $_->{event_id} }++ for grep { $_->{acked} } $e->deliveries;
    $theirs{$_}++ for split /\n/, value($node, 'SELECT event_id FROM app.others');
    is(scalar(grep { !$ours{$_} && !$theirs{$_} } @ids), 0, "$what: nothing is lost");
    is(scalar(grep { ($ours{$_} // 0) + ($theirs{$_} // 0) > 1 } @ids), 0, "$what: nothing is taken by two");
    cmp_ok(scalar(keys %ours), '>', 0, "$what: ours relayed some");
    cmp_ok(scalar(keys %theirs), '>', 0, "$what: the other one too");
    value($node, 'TRUNCATE app.others');
    $e->reset;
}

# CLM-13, MIG-05
subtest 'beside another relay, of either kind' => sub {
    value($node, "CREATE TABLE app.others (event_id uuid, kind text); $other{retain}; $other{consume}");
    for my $ours (qw(consume retain))
    {
        for my $theirs (qw(consume retain))
        {
            my $name = "shared_${ours}_$theirs";
            my $table = table_and_route($name, storage => $ours, enabled => 0, max_claim_rows => 20, reclaim_stale_after => '1min');
            my @ids = stage_many($node, $name, 600);
            my $run = IPC::Run::start([ 'psql', '-XAtq', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr('postgres'), '-c', "CALL app.relay_$theirs('$table', 20)" ], '<', \undef, '>&', \my $out);
            value($node, "UPDATE outbox_route SET enabled = true WHERE name = '$name'");
            ok($run->finish, "$theirs beside ours of $ours") or diag($out);
            wait_empty($node, $table, endpoint => $e);
            check_shared("$ours beside $theirs", @ids);
        }
    }
};

# MIG-01 to MIG-05
subtest 'a live table moves from retain to consume, and loses its columns' => sub {
    my $table = table_and_route('moving', storage => 'retain', max_claim_rows => 20);
    my $oracle = OutboxRelay::Oracle->new(node => $node, relation => $table, endpoint => $e);
    # The table of truth is one for the whole database.
    value($node, 'TRUNCATE ' . $oracle->truth_table);
    my $stage = sub { stage_many($node, 'moving', 100, truth => $oracle->truth_table) };
    $stage->() for 1 .. 3;
    # Rows that a relay of the old kind left in the middle.
    insert_rows($node, $table, 'moving', 5, truth => $oracle->truth_table, columns => { status => 'processing', processing_at => \q{now() - interval '1 hour'} });
    value($node, "UPDATE outbox_route SET storage = 'consume' WHERE name = 'moving'");
    $stage->() for 1 .. 3;
    wait_empty($node, $table, endpoint => $e);
    my $published = value($node, "SELECT count(*) FROM $table WHERE status = 'published'");
    cmp_ok($published, '>', 0, "$published rows of the old kind are left to the retention job");
    $stage->();
    wait_empty($node, $table, endpoint => $e);
    is(value($node, "SELECT count(*) FROM $table WHERE status = 'published'"), $published, 'and are not touched');
    $oracle->check_nothing_lost;

    # MIG-03: reclaim on, the column gone
    value($node, "DELETE FROM $table WHERE status = 'published'; ALTER TABLE $table DROP COLUMN processing_at, DROP COLUMN published_at");
    my $before = $e->count->{received};
    $stage->();
    like(wait_lane($node, 'moving', 'failed_passes > 0')->{last_error}, qr/has no column "processing_at"/, 'reclaim asks for its column');
    is($e->count->{received}, $before, 'nothing was sent');
    # MIG-04: reclaim off
    value($node, "UPDATE outbox_route SET reclaim_stale_after = '0' WHERE name = 'moving'");
    $stage->() for 1 .. 2;
    wait_empty($node, $table, endpoint => $e);
    $oracle->check_nothing_lost;
    is(value($node, "SELECT count(*) FROM $table"), 0, 'the table is empty in the end');
};

done_testing();
