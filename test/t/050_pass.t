# outbox_relay_pass(): a pass in the caller's transaction. Its rollback returns every row, it skips what the transaction
# wrote itself, sets nothing, ends with its caller, and leaves the lane alone.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use Time::Local qw(timegm);
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;
use OutboxRelay::Wait ();

my $node = new_node('pass', conf => "autovacuum = off\noutbox_relay.interval = '1h'\nmax_prepared_transactions = 5\nlog_disconnections = on\nlog_timezone = 'UTC'\n");
my $e = OutboxRelay::Endpoint->start;

# A table with a paused route of the same name: nobody but the calls relays it.
sub scene
{
    my ($name, %columns) = @_;
    $e->reset;
    make_outbox($node, 'postgres', "app.$name", %{ delete $columns{table} // {} });
    create_route($node, $name, "app.$name", delete $columns{url} // $e->url, enabled => 0, %columns);
    return "app.$name";
}

# The call's result as claimed|published|failed|retried|refused|reclaimed|untouched.
sub relay
{
    my ($route, @more) = @_;
    return $node->safe_psql('postgres', "SELECT * FROM outbox_relay_pass(" . join(', ', sql_literal($route), @more) . ')');
}

sub rows { my ($table) = @_; return value($node, "SELECT count(*) FROM $table"); }

subtest 'what a pass gives back' => sub {
    my $table = scene('plain', max_attempts => 1, concurrency => 1);
    is(relay('plain'), '0|0|0|0|0|0|0', 'nothing to do');
    insert_rows($node, $table, 'plain', 7);
    is(relay('plain', 3), '3|3|0|0|0|0|0', 'max_rows');
    is(relay('plain'), '4|4|0|0|0|0|0', 'the rest');
    is(rows($table), 0, 'deleted');
    is($e->count->{events}, 7, 'and sent once each');

    insert_rows($node, $table, 'plain', 2);
    $node->safe_psql('postgres', "UPDATE outbox_route SET url = '" . $e->url('/status/500') . "' WHERE name = 'plain'");
    is(relay('plain'), '2|0|2|0|0|0|0', 'failed');
    is(value($node, "SELECT outbox_requeue_failed('plain')"), 2, 'requeued');
    $node->safe_psql('postgres', "UPDATE outbox_route SET max_attempts = 5 WHERE name = 'plain'");
    is(relay('plain'), '2|0|0|2|0|0|0', 'retried');
    is(relay('plain'), '0|0|0|0|0|0|0', 'not ripe');
    $node->safe_psql('postgres', "UPDATE $table SET available_at = NULL; UPDATE outbox_route SET url = 'http://127.0.0.1:9/'");
    insert_rows($node, $table, 'plain', 3);
    is(relay('plain'), '5|0|0|0|3|0|2', 'refused: three in a row end it, the others are untouched');
    $node->safe_psql('postgres', "UPDATE $table SET status = 'processing', processing_at = now() - interval '1 h';"
          . "UPDATE outbox_route SET url = '" . $e->url . "'");
    is(relay('plain'), '5|5|0|0|0|5|0', 'reclaimed, and published by the same pass');
    is(lane($node, 'plain')->{passes}, 0, 'no lane counts them');
};

# CON-16, CON-18
subtest 'the transaction is the caller\'s' => sub {
    my $table = scene('tx');
    insert_rows($node, $table, 'tx', 5);
    my $before = value($node, "SELECT array_agg((ctid, xmin, attempts) ORDER BY ctid) FROM $table");
    is($node->safe_psql('postgres', "BEGIN; SELECT published FROM outbox_relay_pass('tx'); SELECT count(*) FROM $table; ROLLBACK"),
        "5\n0", 'published and gone for the transaction');
    is(value($node, "SELECT array_agg((ctid, xmin, attempts) ORDER BY ctid) FROM $table"), $before, 'a rollback returns every row');

    is($node->safe_psql('postgres', <<"SQL"), "2\n3\n3\n5", 'a savepoint of the caller');
BEGIN;
SELECT published FROM outbox_relay_pass('tx', 2);
SAVEPOINT s;
SELECT published FROM outbox_relay_pass('tx');
ROLLBACK TO s;
SELECT count(*) FROM $table;
COMMIT;
SELECT 2 + count(*) FROM $table;
SQL
    is($node->safe_psql('postgres', "BEGIN; SELECT published FROM outbox_relay_pass('tx', 1); COMMIT; SELECT count(*) FROM $table"), "1\n2", 'commit');

    # An error inside: undone, and the caller's exception block goes on.
    $node->safe_psql('postgres', <<"SQL");
CREATE TABLE app.note (what text);
CREATE FUNCTION app.tx_f() RETURNS trigger LANGUAGE plpgsql AS \$\$ BEGIN RAISE 'no'; END \$\$;
CREATE TRIGGER t BEFORE DELETE ON $table FOR EACH ROW EXECUTE FUNCTION app.tx_f();
DO \$\$
BEGIN
    INSERT INTO app.note VALUES ('before');
    BEGIN
        INSERT INTO app.note VALUES ('inside');
        PERFORM outbox_relay_pass('tx');
    EXCEPTION WHEN raise_exception THEN
        INSERT INTO app.note VALUES (SQLERRM);
    END;
    INSERT INTO app.note SELECT current_user || current_setting('search_path');
END \$\$;
SQL
    is(value($node, "SELECT string_agg(what, ',') FROM app.note"), 'before,no,' . value($node, "SELECT current_user || current_setting('search_path')"), 'undone to the block\'s begin');
    is(rows($table), 2, 'no row is lost');
    is($node->psql('postgres', "BEGIN; SELECT outbox_relay_pass('tx'); COMMIT"), 3, 'without a block the error is the caller\'s');
    $node->safe_psql('postgres', "DROP TRIGGER t ON $table");
    is(relay('tx'), '2|2|0|0|0|0|0', 'afterwards');

    insert_rows($node, $table, 'tx', 2);
    $node->safe_psql('postgres', "BEGIN; SELECT outbox_relay_pass('tx'); PREPARE TRANSACTION 'p'");
    is(relay('tx'), '0|0|0|0|0|0|0', 'prepared: the rows are locked');
    $node->safe_psql('postgres', "ROLLBACK PREPARED 'p'");
    is(relay('tx'), '2|2|0|0|0|0|0', 'and come back');
};

subtest 'what the worker had published is settled and not sent again' => sub {
    my $table = scene('half');
    insert_rows($node, $table, 'half', 5);
    $node->safe_psql('postgres', <<"SQL");
CREATE FUNCTION app.half_f() RETURNS trigger LANGUAGE plpgsql AS \$\$ BEGIN RAISE 'no'; END \$\$;
CREATE TRIGGER t BEFORE DELETE ON $table FOR EACH ROW EXECUTE FUNCTION app.half_f();
UPDATE outbox_route SET enabled = true WHERE name = 'half';
SQL
    wait_lane($node, 'half', 'failed_passes > 0');
    is($e->count->{events}, 5, 'sent by a pass that then failed');
    $node->safe_psql('postgres', "DROP TRIGGER t ON $table; UPDATE outbox_route SET enabled = false WHERE name = 'half'");
    insert_rows($node, $table, 'half', 1);
    is($node->safe_psql('postgres', "BEGIN; SELECT claimed, published FROM outbox_relay_pass('half', 5); ROLLBACK; SELECT count(*) FROM $table"), "5|5\n6", 'settled, and rolled back');
    is(relay('half'), '6|6|0|0|0|0|0', 'settled');
    is($e->count->{events}, 6, 'only the new row was sent');
};

subtest 'rows that the transaction wrote itself are skipped' => sub {
    my $table = scene('own');
    insert_rows($node, $table, 'own', 3);
    is($node->safe_psql('postgres', <<"SQL"), "3\n0\n252", 'only those that were committed before');
BEGIN;
DO \$\$ BEGIN PERFORM outbox_stage('own', 'own', '1') FROM generate_series(1, 250); END \$\$;
SAVEPOINT s;
DO \$\$ BEGIN PERFORM outbox_stage('own', 'nested', '1'); EXCEPTION WHEN division_by_zero THEN NULL; END \$\$;
RELEASE s;
-- Older than all others.
INSERT INTO $table SELECT (jsonb_populate_record(o, jsonb_build_object('id', gen_random_uuid(), 'event_id', gen_random_uuid(), 'created_at', '2020-01-01', 'event_type', 'own'))).* FROM $table AS o LIMIT 1;
SELECT published FROM outbox_relay_pass('own', 100);
SELECT claimed FROM outbox_relay_pass('own');
COMMIT;
SELECT count(*) FROM $table;
SQL
    is($e->count->{events}, 3, 'nothing of its own was sent');
    is(relay('own', 1000), '252|252|0|0|0|0|0', 'the next transaction sends them');

    # Rows of its own that are ripe come before those that were tried again.
    insert_rows($node, $table, 'own', 5, columns => { attempts => 1, available_at => \q{now() - interval '1 min'} });
    is($node->safe_psql('postgres', <<"SQL"), "5\n60", 'retries behind ripe rows of its own');
BEGIN;
INSERT INTO $table SELECT (jsonb_populate_record(o, jsonb_build_object('id', gen_random_uuid(), 'event_id', gen_random_uuid(), 'available_at', '2020-01-01'))).*
    FROM $table AS o, generate_series(1, 60) LIMIT 60;
SELECT published FROM outbox_relay_pass('own', 100);
COMMIT;
SELECT count(*) FROM $table;
SQL
    insert_rows($node, $table, 'own', 40);
    is(relay('own', 40), '40|40|0|0|0|0|0', 'both kinds');
    is(value($node, "SELECT count(*) FROM $table WHERE available_at IS NULL"), 20, 'half each');
    is(relay('own'), '60|60|0|0|0|0|0', 'the rest');

    insert_rows($node, $table, 'own', 1, columns => { status => 'failed' });
    is($node->safe_psql('postgres', "BEGIN; SELECT outbox_requeue_failed('own'); SELECT claimed FROM outbox_relay_pass('own'); COMMIT"), "1\n0", 'a row that it requeued is its own too');
    is(relay('own'), '1|1|0|0|0|0|0', 'afterwards');
};

# CON-17
subtest 'it sets nothing, and takes the isolation level' => sub {
    my $table = scene('level');
    my $settings = q{SELECT string_agg(name || '=' || setting, ',' ORDER BY name) FROM pg_settings WHERE source <> 'override' OR name ~ 'timeout'};
    for my $level ('READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE')
    {
        insert_rows($node, $table, 'level', 2);
        my ($before, $published, $after) = split /\n/, $node->safe_psql('postgres',
            "BEGIN ISOLATION LEVEL $level; $settings; SELECT published FROM outbox_relay_pass('level'); $settings; COMMIT");
        is($published, 2, $level);
        is($after, $before, "$level: settings as before");
    }
    # A row that changed since the snapshot: honest.
    insert_rows($node, $table, 'level', 1);
    my $session = $node->background_psql('postgres', on_error_stop => 0);
    $session->query_safe('BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT 1');
    $node->safe_psql('postgres', "UPDATE $table SET payload = '2'");
    $session->query("SELECT claimed FROM outbox_relay_pass('level')");
    like($session->{stderr}, qr/could not serialize access/, 'REPEATABLE READ: 40001');
    $session->quit;
    is(relay('level'), '1|1|0|0|0|0|0', 'READ COMMITTED takes it');
    like(error_of('BEGIN READ ONLY; SELECT outbox_relay_pass($$level$$)'), qr/cannot execute outbox_relay_pass\(\) in a read-only transaction/, 'READ ONLY');
};

sub error_of
{
    my ($sql, %opts) = @_;
    my ($code, $out, $err) = $node->psql('postgres', $sql, %opts);
    return $code == 0 ? "no error: $out" : $err;
}

subtest 'the lane and its schedule are left alone' => sub {
    my $table = scene('lane', enabled => 1, url => $e->url('/status/503?retry_after=100'));
    # The worker's first pass is over: the rows are left to the call.
    wait_lane($node, 'lane', 'passes > 0');
    insert_rows($node, $table, 'lane', 1);
    is(relay('lane'), '1|0|0|0|1|0|0', 'an endpoint that asks to wait');
    my $lane = lane($node, 'lane');
    isnt($lane->{state}, 'refused', 'does not hold the lane');
    is($lane->{claimed}, 0, 'nor count for it');
    $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = false WHERE name = 'lane'; UPDATE $table SET available_at = NULL");
    $node->safe_psql('postgres', "UPDATE outbox_route SET url = '" . $e->url . "' WHERE name = 'lane'");
    is(relay('lane'), '1|1|0|0|0|0|0', 'a paused route is relayed');
    is(value($node, "SELECT enabled FROM outbox_route WHERE name = 'lane'"), 'f', 'and stays paused');
};

subtest 'storage retain, and a delivery log' => sub {
    my $table = scene('kept', storage => 'retain', max_attempts => 1, concurrency => 1);
    insert_rows($node, $table, 'kept', 3);
    my $state = "SELECT string_agg(DISTINCT concat_ws('/', status, published_at IS NULL, processing_at IS NULL), ',') FROM $table";
    is($node->safe_psql('postgres', "BEGIN; SELECT published FROM outbox_relay_pass('kept', 2); $state; ROLLBACK; $state"),
        "2\npending/t/t,published/f/t\npending/t/t", 'marked in the transaction, and back with its rollback');
    is(relay('kept'), '3|3|0|0|0|0|0', 'committed');
    is(value($node, $state), 'published/f/t', 'kept as published');
    $node->safe_psql('postgres', "UPDATE $table SET status = 'processing', published_at = NULL, processing_at = now() - interval '1 h'");
    is(relay('kept', 1), '1|1|0|0|0|3|0', 'stale rows come back');
    $node->safe_psql('postgres', "UPDATE outbox_route SET url = '" . $e->url('/status/500') . "' WHERE name = 'kept'");
    is(relay('kept'), '2|0|2|0|0|0|0', 'failures');
    $node->safe_psql('postgres', "SELECT outbox_requeue_failed('kept'); UPDATE outbox_route SET url = 'http://127.0.0.1:9/' WHERE name = 'kept'");
    is(relay('kept'), '2|0|0|0|2|0|0', 'refusals');
    is(value($node, "SELECT count(*) FROM $table WHERE status = 'pending' AND processing_at IS NULL AND attempts = 0"), 2, 'leave the rows as they were');

    # Rows that the lane's own live pass holds are not stale, however long it takes.
    $table = scene('live', storage => 'retain', url => $e->url('/hang'), pass_deadline => '1h', reclaim_stale_after => '10ms', enabled => 1);
    wait_lane($node, 'live', 'passes > 0');
    insert_rows($node, $table, 'live', 2);
    $node->safe_psql('postgres', "BEGIN; SELECT outbox_stage('live', 'wake', '1'); COMMIT");
    $e->wait_for_count(3, of => 'inflight');
    is(relay('live'), '0|0|0|0|0|0|0', 'a live pass is not reclaimed');
    $e->release(1);
    wait_empty($node, $table);
    is(value($node, "SELECT count(*) FROM $table WHERE status = 'published'"), 3, 'it ends as it should');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'live'");

    $node->safe_psql('postgres', 'CREATE TABLE app.logged_delivered (id uuid, outbox_route text, event_id uuid, tenant_id uuid, published_at timestamptz)');
    $table = scene('logged', delivery_log => 'app.logged_delivered');
    insert_rows($node, $table, 'logged', 2);
    is($node->safe_psql('postgres', "BEGIN; SELECT published FROM outbox_relay_pass('logged'); SELECT count(*) FROM app.logged_delivered; ROLLBACK; SELECT count(*) FROM app.logged_delivered"),
        "2\n2\n0", 'the log is the caller\'s transaction too');
    is(relay('logged'), '2|2|0|0|0|0|0', 'committed');
    is(value($node, "SELECT count(*) FROM app.logged_delivered"), 2, 'and logged');
};

# Two passes of one route in parallel, each with the half: CON-20.
subtest 'beside another pass' => sub {
    my $table = scene('beside');
    insert_rows($node, $table, 'beside', 10);
    my $session = hold_session($node, "BEGIN; SELECT outbox_relay_pass('beside', 4)");
    is(relay('beside'), '6|6|0|0|0|0|0', 'rows of the other are skipped, not waited for');
    $session->query_safe('ROLLBACK');
    $session->quit;
    is(relay('beside'), '4|4|0|0|0|0|0', 'and come back with its rollback');
};

subtest 'a deferrable constraint' => sub {
    my $table = scene('deferred');
    insert_rows($node, $table, 'deferred', 1);
    $node->safe_psql('postgres', "CREATE TABLE app.child (id uuid REFERENCES $table DEFERRABLE INITIALLY DEFERRED)");
    my $error = error_of("SELECT outbox_relay_pass('deferred')");
    like($error, qr/ERROR:.*deferred trigger/, 'fails the call');
    like($error, qr/HINT:  .*SET CONSTRAINTS ALL IMMEDIATE/, 'with a hint');
    is(rows($table), 1, 'the row is still there');
    is($node->safe_psql('postgres', "BEGIN; SET CONSTRAINTS ALL IMMEDIATE; SELECT published FROM outbox_relay_pass('deferred'); COMMIT"), 1, 'which helps');
};

# Starts a pass of the route in a session, waits until $under_way sees it, ends it by SQL with PID for the backend's pid,
# waits until $over sees no more of it, and gives the seconds that its end took, the best of four, by the server's own
# clock: from the call to the line of its log that matches $error.
sub best_end
{
    my ($on, $route, $begin, $under_way, $end, $error, $over) = @_;
    my @took;
    for my $round (1 .. 4)
    {
        my $session = $on->background_psql('postgres', on_error_stop => 0);
        my $pid = $session->query_safe('SELECT pg_backend_pid()');
        $session->{stdin} .= "$begin\nSELECT outbox_relay_pass('$route');\n";
        $session->{run}->pump_nb;
        $under_way->($pid);
        my $offset = log_offset($on);
        my ($at) = split /\|/, $on->safe_psql('postgres', 'SELECT extract(epoch FROM clock_timestamp()), ' . ($end =~ s/PID/$pid/r));
        wait_log($on, qr/\[$pid\] .*$error/, $offset);
        my ($y, $mo, $d, $h, $mi, $s) = log_since($on, $offset) =~ /^(\d+)-(\d+)-(\d+) (\d+):(\d+):([\d.]+) UTC \[$pid\] .*$error/m or die 'no time in the log';
        push @took, timegm(int($s), $mi, $h, $d, $mo - 1, $y) + $s - int($s) - $at;
        eval { $session->quit };
        $over->() if $over;
    }
    note('took ' . join ' ', map { sprintf '%.3f', $_ } @took);
    return (sort { $a <=> $b } @took)[0];
}

my %ends = (
    'pg_cancel_backend(PID)' => 'canceling statement due to user request',
    'pg_terminate_backend(PID)' => 'disconnection: session time');

# Ctrl-C, statement_timeout and pg_terminate_backend while the endpoint hangs.
subtest 'it ends with its caller' => sub {
    my $table = scene('hang', url => $e->url('/hang'), pass_deadline => '1h');
    insert_rows($node, $table, 'hang', 3);
    for my $begin ('', 'BEGIN;')
    {
        for my $end (sort keys %ends)
        {
            my $best = best_end($node, 'hang', $begin, sub { $e->wait_for_count(3, of => 'inflight') }, $end, $ends{$end},
                sub { $e->wait_until(sub { $e->count->{inflight} == 0 }, what => 'the requests to be cancelled') });
            cmp_ok($best, '<', 0.2, "$begin $end: $best s");
            is(rows($table), 3, 'every row is as it was');
        }
    }
    my @late = map { value($node, <<'SQL') } 1 .. 4;
SET statement_timeout = '400ms';
CREATE TEMP TABLE took (s float8);
DO $$
DECLARE
    began timestamptz := clock_timestamp();
BEGIN
    PERFORM outbox_relay_pass('hang');
EXCEPTION WHEN query_canceled THEN
    INSERT INTO took VALUES (extract(epoch FROM clock_timestamp() - began) - 0.4);
END $$;
SELECT s FROM took
SQL
    my ($best) = sort { $a <=> $b } @late;
    cmp_ok($best, '<', 0.2, sprintf 'statement_timeout and: %s s', join ' ', map { sprintf '%.3f', $_ } @late);
    is(value($node, "SELECT sum(attempts) FROM $table"), 0, 'no attempt is counted');
};

subtest 'what is refused' => sub {
    my $table = scene('refused');
    my $offset = 0;
    my @cases = (
        [ 'SELECT outbox_relay_pass(NULL)', qr/22004/ ],
        [ q{SELECT outbox_relay_pass('unknown')}, qr/42704/ ],
        [ q{SELECT outbox_relay_pass('refused', 0)}, qr/22023/ ],
        [ q{SELECT outbox_relay_pass('refused', -5)}, qr/22023/ ],
        [ q{SELECT outbox_relay_pass('refused', tenant_id => gen_random_uuid())}, qr/22023.*has no tenants/ ]);
    like(error_of("\\set VERBOSITY verbose\n$_->[0]"), $_->[1], $_->[0]) for @cases;
    $node->safe_psql('postgres', "ALTER TABLE $table RENAME COLUMN payload TO p");
    like(error_of("\\set VERBOSITY verbose\nSELECT outbox_relay_pass('refused')"), qr/42703.*"refused".*payload/, 'preflight');
    $node->safe_psql('postgres', "ALTER TABLE $table RENAME COLUMN p TO payload");
    $node->safe_psql('postgres', <<'SQL');
INSERT INTO outbox_route (name, relation, url, owner, bound_to) VALUES ('foreign', 'app.refused', 'http://127.0.0.1:9/', current_user, '1/2/');
SQL
    like(error_of("\\set VERBOSITY verbose\nSELECT outbox_relay_pass('foreign')"), qr/55000.*bound to another database.*HINT:  [^\n]*outbox_adopt\(\)/s, 'bound elsewhere');
    is($e->count->{received}, 0, 'nothing was sent');
};

subtest 'who may' => sub {
    $node->safe_psql('postgres', 'CREATE ROLE owner; CREATE ROLE member LOGIN IN ROLE owner; CREATE ROLE stranger LOGIN');
    my $table = scene('who', table => { owner => 'owner' }, owner => 'owner');
    $node->safe_psql('postgres', 'GRANT USAGE ON SCHEMA app TO PUBLIC; CREATE TABLE app.acted (who text, path text, level text); GRANT INSERT ON app.acted TO owner');
    $node->safe_psql('postgres', <<"SQL");
CREATE FUNCTION app.who_f() RETURNS trigger LANGUAGE plpgsql AS
    'BEGIN INSERT INTO app.acted VALUES (current_user, current_setting(''search_path''), current_setting(''work_mem'')); RETURN OLD; END';
ALTER FUNCTION app.who_f OWNER TO owner;
CREATE TRIGGER t BEFORE DELETE ON $table FOR EACH ROW EXECUTE FUNCTION app.who_f();
SQL
    insert_rows($node, $table, 'who', 2);
    my $as = sub { my ($role) = @_; return error_of("SET ROLE $role; SELECT published FROM outbox_relay_pass('who', 1)") };
    like($as->('member'), qr/permission denied for function outbox_relay_pass/, 'nobody without a grant');
    $node->safe_psql('postgres', 'GRANT EXECUTE ON FUNCTION outbox_relay_pass TO member, stranger');
    like($as->('stranger'), qr/permission denied for outbox route "who"/, 'nor without membership');
    like($as->('member'), qr/no error: 1/, 'a member');
    like(error_of("SELECT published FROM outbox_relay_pass('who')"), qr/no error: 1/, 'a superuser');
    is(value($node, 'SELECT DISTINCT who || path FROM app.acted'), 'ownerpg_catalog, pg_temp', 'as the owner, restricted, both times');
    for my $vector ('RESET ROLE', 'SET ROLE postgres', 'CREATE TEMP TABLE t (a int)', 'LISTEN x', q{PERFORM set_config('role', 'postgres', false)})
    {
        $node->safe_psql('postgres', "CREATE OR REPLACE FUNCTION app.who_f() RETURNS trigger LANGUAGE plpgsql AS 'BEGIN "
              . ($vector =~ s/'/''/gr) . "; RETURN OLD; END'");
        insert_rows($node, $table, 'who', 1);
        like(error_of(q{SELECT outbox_relay_pass('who')}), qr/ERROR: .*(security-restricted|security-definer|cannot)/, "not: $vector");
        $node->safe_psql('postgres', "DELETE FROM $table");
    }
};

$node->stop;

# In the resolver, which no signal reaches.
subtest 'while a name hangs' => sub {
    my $folder = PostgreSQL::Test::Utils::tempdir();
    system($ENV{CC} || 'gcc', '-shared', '-fPIC', '-o', "$folder/resolver.so", "$FindBin::Bin/../module/hanging_resolver.c", '-ldl') == 0 or die 'no compiler';
    local $ENV{LD_PRELOAD} = join ' ', "$folder/resolver.so", $ENV{LD_PRELOAD} // ();
    my $hung = new_node('hung', conf => "log_disconnections = on\nlog_timezone = 'UTC'\n");
    local $ENV{LD_PRELOAD};
    delete $ENV{LD_PRELOAD};
    make_outbox($hung, 'postgres', 'app.hung');
    create_route($hung, 'hung', 'app.hung', 'http://hang.test/', enabled => 0, pass_deadline => '1h', connect_timeout => '1h');
    insert_rows($hung, 'app.hung', 'hung', 2);
    for my $end (sort keys %ends)
    {
        my $under_way = sub {
            my ($pid) = @_;
            # libcurl's own threads: one a name.
            OutboxRelay::Wait::wait_until(sub { my @threads = glob "/proc/$pid/task/*"; @threads > 1 }, what => 'the resolver to be asked');
        };
        my $best = best_end($hung, 'hung', '', $under_way, $end, $ends{$end});
        cmp_ok($best, '<', 1, "$end: $best s");
        is($hung->safe_psql('postgres', 'SELECT count(*), sum(attempts) FROM app.hung'), '2|0', 'every row is as it was');
    }
    $hung->stop;
};

subtest 'without the preload' => sub {
    my $late = new_node('late', preload => '', extension => 1);
    make_outbox($late, 'postgres', 'app.late');
    create_route($late, 'late', 'app.late', $e->url);
    my ($code, $out, $err) = $late->psql('postgres', "\\set VERBOSITY verbose\nSELECT outbox_relay_pass('late')");
    like($err, qr/55000.*HINT:  Add outbox_relay to shared_preload_libraries/s, '55000 with a hint');
    $late->stop;
};

done_testing();
