# Four workers and writers of the application on the same rows (B-26): several routes over one table, the same event ids
# in each, sessions that update rows in any order, several in a transaction. WRITERS_SECONDS (6) for each storage.

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

my $seconds = $ENV{WRITERS_SECONDS} // 6;
my $claim = 40;
# A pass takes some 200 ms, so that either side of a deadlock may be the one who finds it. What waits for a lock longer
# than deadlock_timeout is in the log, and whom it waits for.
my $node = new_node('writers', conf => "outbox_relay.workers = 4\noutbox_relay.max_claim_rows = $claim\n"
      . "outbox_relay.interval = '100ms'\noutbox_relay.retry_base_delay = '50ms'\noutbox_relay.retry_max_backoff = '300ms'\n"
      . "outbox_relay.pass_statement_timeout = '10s'\ndeadlock_timeout = 50ms\nlog_lock_waits = on\n");
my $e = OutboxRelay::Endpoint->start(max_seconds => 7200);

sub sql { return $node->safe_psql('postgres', $_[0]); }

# The requests of one route, for an oracle: events of several routes have the same ids, and a route's name is in its keys.
package RouteEndpoint
{
    sub deliveries { my ($self) = @_; return grep { $_->{key} =~ /^\Q$self->{route}\E\./ } $self->{endpoint}->deliveries; }
    sub summary { return $_[0]{endpoint}->summary; }
}

# Writers are procedures that go on until app.stop says so. Some begin with the route's total, which the relay's deletions
# count up at the end of a pass: the other way round, so that they are sure to meet.
sub make_writers
{
    my ($name, $table, @routes) = @_;
    sql(<<"SQL");
CREATE TABLE IF NOT EXISTS app.stop (name text);
CREATE TABLE IF NOT EXISTS app.total (route text PRIMARY KEY, settled bigint DEFAULT 0, seen bigint DEFAULT 0);
INSERT INTO app.total (route) VALUES ('@{[ join "'), ('", @routes ]}');
CREATE TABLE app.victims_$name (at timestamptz DEFAULT now());
CREATE TABLE app.writes_$name (count bigint);
CREATE FUNCTION app.count_$name() RETURNS trigger LANGUAGE plpgsql AS
    \$\$ BEGIN UPDATE app.total SET settled = settled + 1 WHERE route = OLD.outbox_route; RETURN OLD; END \$\$;
CREATE TRIGGER count BEFORE DELETE ON $table FOR EACH ROW EXECUTE FUNCTION app.count_$name();
CREATE PROCEDURE app.write_$name(total_first boolean) LANGUAGE plpgsql AS \$\$
DECLARE
    chosen uuid[];
    one uuid;
    some_route text;
    writes bigint := 0;
BEGIN
    WHILE NOT EXISTS (SELECT FROM app.stop WHERE name = '$name') LOOP
        SELECT route INTO some_route FROM app.total WHERE route LIKE '$name%' ORDER BY random() LIMIT 1;
        -- The oldest rows of a route or of all: those that a pass has, or is about to take.
        chosen := ARRAY(SELECT id FROM (
            SELECT id FROM $table WHERE status IN ('pending', 'processing') AND (NOT total_first OR outbox_route = some_route)
            ORDER BY created_at LIMIT 150) AS oldest ORDER BY random() LIMIT 6);
        BEGIN
            IF total_first THEN
                UPDATE app.total SET seen = seen + 1 WHERE route = some_route;
            END IF;
            FOREACH one IN ARRAY chosen LOOP
                UPDATE $table SET payload = payload || jsonb_build_object('w', writes) WHERE id = one;
                writes := writes + 1;
            END LOOP;
        EXCEPTION WHEN deadlock_detected THEN
            INSERT INTO app.victims_$name DEFAULT VALUES;
        END;
        COMMIT;
        PERFORM pg_sleep(0.01);
    END LOOP;
    INSERT INTO app.writes_$name VALUES (writes);
END \$\$;
SQL
    return;
}

# COUNT events of the same ids for each route, in one transaction.
sub stage_for_all
{
    my ($table, $count, %truth) = @_;
    my $staged = join "\n", map { <<"SQL" } sort keys %truth;
INSERT INTO $truth{$_} (event_id, ordering_key) SELECT id, '$_.' || g FROM e ORDER BY g;
SELECT count(outbox_stage('$_', 'test.event', '{}', event_id => id, ordering_key => '$_.' || g)) FROM (SELECT * FROM e ORDER BY g) AS e;
SQL
    sql("BEGIN; CREATE TEMP TABLE e ON COMMIT DROP AS SELECT gen_random_uuid() AS id, g FROM generate_series(1, $count) AS g;\n$staged COMMIT;");
    return;
}

# Waits for locks that the log tells of: hashes of pid, kind (backend type), victim, lock, holders.
sub lock_waits
{
    my ($log) = @_;
    my @waits;
    while ($log =~ /\[(\d+)\] (client backend|outbox_relay worker) .*?LOG:  process \d+ (detected deadlock while waiting|still waiting) for (\w+ on .*?) after .*\n.*DETAIL:  Process(?:es)? holding the lock: ([\d, ]+)\./g)
    {
        my ($pid, $kind, $what, $lock, $holders) = ($1, $2, $3, $4, $5);
        push @waits, { pid => $pid, kind => $kind, victim => $what eq 'detected deadlock while waiting', lock => $lock, holders => [ split /, /, $holders ] };
    }
    return @waits;
}

for my $storage (qw(consume retain))
{
    subtest "$storage storage" => sub {
        my $table = "app.$storage";
        my @routes = map { "$storage$_" } 1 .. 4;
        $e->reset;
        make_outbox($node, 'postgres', $table);
        make_writers($storage, $table, @routes);
        create_route($node, $_, $table, $e->url('/slow?ms=20'), storage => $storage, concurrency => 4, max_attempts => 0) for @routes;
        wait_until(sub { worker_pids($node, 'postgres') == 4 }, what => 'four workers');
        my %workers = map { $_ => 1 } worker_pids($node, 'postgres');
        my %oracle = map {
            $_ => OutboxRelay::Oracle->new(node => $node, relation => $table, route => $_, table => "truth_$_",
                endpoint => bless { endpoint => $e, route => $_ }, 'RouteEndpoint')
        } @routes;
        my %truth = map { $_ => $oracle{$_}->truth_table } @routes;
        my $offset = log_offset($node);
        stage_for_all($table, 300, %truth);
        my @writers = map { $node->background_psql('postgres') } 1 .. 4;
        for my $number (1 .. @writers)
        {
            my $total_first = $number == 1 && $storage eq 'consume' ? 'true' : 'false';
            $writers[ $number - 1 ]->set_query_timer_restart;
            $writers[ $number - 1 ]->query_until(qr/begun/, "\\echo begun\nCALL app.write_$storage($total_first);\n\\echo done\n");
        }
        # Deletions of consume storage meet a writer in each case; marks of retain storage, which hold their locks for
        # moments, by chance.
        my $end = time() + $seconds;
        my $backed_off = $storage eq 'retain';
        my $victims = sub { return scalar grep { $_->{victim} && $_->{kind} =~ /worker/ } lock_waits(log_since($node, $offset)) };
        wait_until(
            sub {
                stage_for_all($table, 20, %truth) if sql("SELECT count(*) < 1200 FROM $table WHERE status IN ('pending', 'processing')") eq 't';
                $backed_off ||= sql("SELECT EXISTS (SELECT FROM outbox_stat_route WHERE route LIKE '$storage%' AND state = 'backoff'
                    AND last_error = 'deadlock detected' AND backoff_until > last_error_at)") eq 't';
                return $backed_off && time() > $end;
            },
            what => 'a lane that backs off from a deadlock', timeout => 60 + $seconds, poll_ms => 50);
        sql("INSERT INTO app.stop VALUES ('$storage')");
        $_->query_until(qr/done/, ''), $_->quit for @writers;
        wait_empty($node, $table, endpoint => $e, timeout => 120);

        my @waits = lock_waits(log_since($node, $offset));
        my @of_workers = grep { $_->{kind} =~ /worker/ } @waits;
        my ($worker_victims, $writer_victims) = ($victims->(), value($node, "SELECT count(*) FROM app.victims_$storage"));
        # Extending a file is no affair of rows.
        my @each_other = grep { my $wait = $_; $wait->{lock} !~ /extension/ && grep { $workers{$_} } @{ $wait->{holders} } } @of_workers;
        is(join("\n", map { "$_->{pid} waits for $_->{lock}, held by @{ $_->{holders} }" } @each_other), '', 'no worker waits for another');
        my %sum = map { $_ => value($node, "SELECT sum($_) FROM outbox_stat_route WHERE route LIKE '$storage%'") } qw(failed_passes set_aside);
        my $events = value($node, "SELECT count(*) FROM truth_${storage}1");
        my $writes = value($node, "SELECT sum(count) FROM app.writes_$storage");
        diag "$events events for each of four routes ($storage): $writes writes; workers victims of $worker_victims deadlocks, "
          . "writers of $writer_victims; $sum{failed_passes} failed passes";
        cmp_ok($writes, '>', 100, 'the writers wrote');
        if ($storage eq 'consume')
        {
            is($sum{failed_passes}, $worker_victims, 'a deadlock with a writer is one failed pass');
        }
        else
        {
            # A mark that fails is tried in halves.
            cmp_ok($sum{failed_passes}, '<=', $worker_victims, 'a deadlock with a writer is one failed pass at most');
        }
        is($sum{set_aside}, 0, 'no row is blamed');
        is_deeply([ grep { !$workers{$_} } worker_pids($node, 'postgres') ], [], 'and no worker\'s end');
        $oracle{$_}->check_nothing_lost("$_: nothing is lost", empty => $storage eq 'consume') for @routes;
        $oracle{$_}->check_nothing_invented for @routes;
        $oracle{$_}->check_duplicates_at_most($worker_victims * $claim) for @routes;
        sql("DELETE FROM outbox_route WHERE name LIKE '$storage%'");
    };
}

$node->stop;
done_testing();
