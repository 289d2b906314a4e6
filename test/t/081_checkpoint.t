# The checkpoint of the clock under crashes, clocks that are set back, promotion and contention: no committed
# stamp is above the committed marks, and none is given again.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use IPC::Run ();
use Time::HiRes qw(usleep);
use OutboxRelay::Node;

my $rounds = $ENV{CHECKPOINT_CRASHES} || 6;
my $conf = "max_connections = 100\nmax_prepared_transactions = 5\noutbox_relay.hlc_checkpoint = 'app.checkpoint'\n";
my $node = new_node('main', conf => $conf, fsync => 1, init => { allows_streaming => 1 });

sub value { my ($n, $sql, $db) = @_; return $n->safe_psql($db // 'postgres', $sql); }

sub make_route
{
    my ($n, $db) = @_;
    make_outbox($n, $db // 'postgres', 'app.outbox', hlc => 1);
    value($n, 'CREATE TABLE app.checkpoint (node_key text PRIMARY KEY, hlc bigint NOT NULL)', $db);
    create_route($n, 'events', 'app.outbox', 'http://127.0.0.1:9/', hlc_ordering => 1, enabled => 0,
        db => $db // 'postgres');
}
make_route($node);

sub covered { return value($_[0], 'SELECT (SELECT max(hlc) FROM app.outbox) <= (SELECT max(hlc) FROM app.checkpoint)'); }

# Stages in SESSIONS sessions by a pgbench script until it is told to stop; a session that is cut ends.
sub stagers
{
    my ($n, $sessions, $script, %opts) = @_;
    my $file = PostgreSQL::Test::Utils::tempdir() . '/script.sql';
    PostgreSQL::Test::Utils::append_to_file($file, $script);
    my $how = $opts{transactions} ? [ '-t', $opts{transactions} ] : [ '-T', $opts{seconds} // 120 ];
    my $out = '';
    my $run = IPC::Run::start(
        [ 'pgbench', '-n', '-c', $sessions, '-j', 2, @$how, @{ $opts{options} || [] }, '-f', $file, $n->connstr('postgres') ],
        '<', \undef, '>&', \$out);
    return ($run, \$out);
}

# CKP-12, CKP-13: eight stampers, killed again and again
subtest "$rounds crashes under eight stampers" => sub {
    my ($bad, $below, $staged) = (0, 0, 0);
    for my $round (1 .. $rounds)
    {
        my $rows = value($node, 'SELECT count(*) FROM app.outbox');
        my ($run) = stagers($node, 8, "SELECT outbox_stage('events', 't', '{}');\n",
            options => [ '-D', "round=$round" ]);
        wait_sql($node, 'postgres', "SELECT count(*) > $rows + 200 FROM app.outbox");
        usleep(int rand 200_000);
        # A backend in the middle of it, the postmaster, or an immediate stop, in turn.
        if ($round % 3 == 1)
        {
            my $pid = value($node,
                "SELECT pid FROM pg_stat_activity WHERE query LIKE 'SELECT outbox_stage%' LIMIT 1");
            kill 'KILL', $pid;
            $run->finish;
            wait_until(sub { (eval { value($node, 'SELECT 1') } // 0) == 1 }, what => 'the server after its crash');
        }
        elsif ($round % 3 == 2)
        {
            my $postmaster = $node->{_pid};
            $node->kill9;
            $run->finish;
            wait_until(sub { !kill 0, $postmaster }, what => 'the postmaster to be gone');
            wait_until(sub { $node->start(fail_ok => 1) }, what => 'the server to start', poll_ms => 200);
        }
        else
        {
            $node->stop('immediate');
            $run->finish;
            $node->start;
        }
        my $before = value($node, 'SELECT count(*) FROM app.outbox');
        $staged += $before - $rows;
        ++$bad if covered($node) ne 't';
        my $max = value($node, 'SELECT max(hlc) FROM app.outbox');
        value($node, "SELECT outbox_stage('events', 'first', '{}')");
        ++$below if value($node, "SELECT min(hlc) FROM app.outbox WHERE event_type = 'first' AND hlc > $max") eq '';
    }
    cmp_ok($staged, '>', 200 * $rounds, 'events were staged');
    is($bad, 0, 'no committed stamp is above the committed mark');
    is($below, 0, 'the first stamp after a crash is above all');
    is(value($node, 'SELECT count(*) = count(DISTINCT hlc) FROM app.outbox'), 't', 'no stamp was given twice');
};

# HLC-24, CKP-13: the clock an hour back across a restart, without and with a checkpoint
subtest 'a clock that is set back across a restart' => sub {
    my $faketime = (glob '/usr/lib/*/faketime/libfaketime.so.1')[0];
    ok($faketime, 'libfaketime is here') or return;
    my $max = value($node, "SELECT outbox_stage('events', 'before', '{}'); SELECT max(hlc) FROM app.outbox") =~ s/.*\n//r;
    $node->stop;
    {
        local $ENV{LD_PRELOAD} = join ' ', grep { defined && length } $ENV{LD_PRELOAD}, $faketime;
        local $ENV{FAKETIME} = '-90m';
        local $ENV{FAKETIME_DONT_FAKE_MONOTONIC} = 1;
        $node->start;
    }
    my $without = $node->safe_psql('postgres', "SET outbox_relay.hlc_checkpoint = ''; SELECT hlc_now()");
    cmp_ok($without, '<', $max, 'without a checkpoint stamps are given again');
    my (undef, $with, $said) = $node->psql('postgres', 'SELECT hlc_now()');
    cmp_ok($with, '>', $max, 'with it they are not');
    like($said, qr/WARNING:.*mark of checkpoint app.checkpoint is (89|90) minutes ahead/, 'and a mark far ahead is said');
    value($node, "SELECT outbox_stage('events', 'after', '{}')");
    is(covered($node), 't', 'covered');
    $node->restart;
};

# Each database has its own checkpoint, the server one clock
subtest 'a further database' => sub {
    value($node, 'CREATE DATABASE other');
    value($node, 'CREATE EXTENSION outbox_relay', 'other');
    make_route($node, 'other');
    my $ahead = value($node, 'SELECT hlc_pack(hlc_physical_ms(hlc_now()) + 600000, 0)');
    value($node, "INSERT INTO app.checkpoint VALUES ('default', $ahead)", 'other');
    $node->restart;
    cmp_ok(value($node, 'SELECT hlc_now()'), '<', $ahead, 'the first database knows nothing of the other');
    cmp_ok(value($node, 'SELECT hlc_now()', 'other'), '>', $ahead, 'the other begins above its own mark');
    cmp_ok(value($node, 'SELECT hlc_now()'), '>', $ahead, 'and lifts the clock that both share');
};

# 32 sessions that stage under one key: no serialization failure of our making (mechanisms.md section 10)
subtest 'contention at each isolation level' => sub {
    for my $level ('READ COMMITTED', 'REPEATABLE READ', 'SERIALIZABLE')
    {
        my $rows = value($node, 'SELECT count(*) FROM app.outbox');
        my ($run, $out) = stagers($node, 32,
            "BEGIN ISOLATION LEVEL $level;\nSELECT 1;\nSELECT outbox_stage('events', 't', '{}');\nCOMMIT;\n",
            transactions => 40);
        ok($run->finish, "$level: no transaction fails") or diag($$out);
        is(value($node, 'SELECT count(*) FROM app.outbox') - $rows, 32 * 40, "$level: all are staged");
        is(covered($node), 't', "$level: covered");
    }
};

# CKP-16: sessions with keys of their own do not wait for each other
subtest 'keys of their own' => sub {
    value($node, 'CREATE FUNCTION hold() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN
        PERFORM pg_advisory_xact_lock(7); RETURN NEW; END $$;
        CREATE TRIGGER hold BEFORE UPDATE OR INSERT ON app.checkpoint FOR EACH ROW WHEN (NEW.node_key = $$slow$$)
            EXECUTE FUNCTION hold()');
    my ($gate_in, $gate_out) = ("SELECT pg_advisory_lock(7);\nSELECT 'locked';\n", '');
    my $held = IPC::Run::start([ 'psql', '-XAtq', '-d', $node->connstr('postgres') ], '<', \$gate_in, '>', \$gate_out);
    $held->pump until $gate_out =~ /locked/;
    my $slow = IPC::Run::start([ 'psql', '-XAtq', '-c', "SET outbox_relay.node_key = 'slow'", '-c',
            "SELECT outbox_stage('events', 'slow', '{}')", '-d', $node->connstr('postgres') ], '<', \undef, '>&', \my $out);
    wait_sql($node, 'postgres', "SELECT count(*) > 0 FROM pg_locks WHERE locktype = 'advisory' AND objid = 7 AND NOT granted");
    my $quick = value($node, "SET outbox_relay.node_key = 'quick'; SET statement_timeout = '20s'; SELECT outbox_stage('events', 'quick', '{}')");
    isnt($quick, '', 'another key commits meanwhile');
    $gate_in .= "SELECT pg_advisory_unlock(7);\n\\q\n";
    $held->finish;
    ok($slow->finish, 'and the slow one in the end');
    value($node, 'DROP TRIGGER hold ON app.checkpoint');
    is(value($node, "SELECT string_agg(node_key, ' ' ORDER BY node_key COLLATE \"C\") FROM app.checkpoint"),
        'default quick slow', 'a row for each');
};

# A forze fleet advances the same table under its own keys, by the seed's statement
subtest 'beside a fleet with its own keys' => sub {
    my ($run, $out) = stagers($node, 8, <<'SQL', transactions => 100);
\set key random(1, 3)
BEGIN;
INSERT INTO app.checkpoint AS c (node_key, hlc) VALUES ('forze-' || :key, hlc_last())
    ON CONFLICT (node_key) DO UPDATE SET hlc = GREATEST(c.hlc, EXCLUDED.hlc);
COMMIT;
SQL
    my ($ours, $said) = stagers($node, 8, "SELECT outbox_stage('events', 't', '{}');\n", transactions => 100);
    ok($run->finish, 'the fleet goes on') or diag($$out);
    ok($ours->finish, 'so do we') or diag($$said);
    is(covered($node), 't', 'covered');
    my $top = value($node, "INSERT INTO app.checkpoint SELECT 'forze-4', max(hlc) + 1000000 FROM app.checkpoint RETURNING hlc");
    cmp_ok(value($node, 'SELECT hlc_now()'), '>', $top, "a new session begins above the fleet's marks");
};

# CKP-15: the replicated mark is the floor of a promoted server, also in sessions that were open on it
subtest 'promotion' => sub {
    $node->backup('base');
    my $standby = PostgreSQL::Test::Cluster->new('standby');
    $standby->init_from_backup($node, 'base', has_streaming => 1);
    $standby->start;
    my ($in, $out) = ("SELECT hlc_last(), 'open';\n", '');
    my $session = IPC::Run::start([ 'psql', '-XAtq', '-d', $standby->connstr('postgres') ], '<', \$in, '>&', \$out);
    $session->pump until $out =~ /open/;
    value($node, "SELECT outbox_stage('events', 't', '{}')");
    my $max = value($node, 'SELECT max(hlc) FROM app.outbox');
    cmp_ok($max, '>', value($node, 'SELECT hlc_pack((extract(epoch FROM clock_timestamp()) * 1000)::bigint + 60000, 0)'),
        'the mark is ahead of every wall clock');
    $node->wait_for_catchup($standby, 'replay');
    $node->stop('immediate');
    $standby->promote;
    $in .= "SELECT 'first ' || hlc_now();\n\\q\n";
    $session->finish;
    like($out, qr/first \d+/, 'the open session stamps');
    my ($first) = $out =~ /first (\d+)/;
    cmp_ok($first, '>', $max, 'above the replicated mark');
    cmp_ok(value($standby, 'SELECT hlc_now()'), '>', $first, 'and so does a new one');
    value($standby, "SELECT outbox_stage('events', 't', '{}')");
    is(covered($standby), 't', 'covered');
    $standby->stop;
};

done_testing();
