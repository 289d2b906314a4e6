# The limits of a pass: statements, lock waits, publishing, the session itself; who may make them stricter;
# what swallows a settling; and databases whose defaults are hostile.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use Time::HiRes qw(time);
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $node = new_node('limits', conf => "autovacuum = off\n");
my $e = OutboxRelay::Endpoint->start;

# Fresh table app.NAME with a route of that name, tried again soon.
sub table_and_route
{
    my ($name, %columns) = @_;
    my %table = map { exists $columns{$_} ? ($_ => delete $columns{$_}) : () } qw(indexes owner);
    make_outbox($node, 'postgres', "app.$name", %table);
    create_route($node, $name, "app.$name", delete $columns{url} // $e->url,
        interval => '100ms', retry_base_delay => '100ms', retry_max_backoff => '200ms', %columns);
    return "app.$name";
}

# A trigger TIMING (BEFORE DELETE, ...) of the table that runs plpgsql statements.
sub add_trigger
{
    my ($table, $timing, $statements, $level) = @_;
    $level //= 'STATEMENT';
    my $function = $table . '_trigger';
    $node->safe_psql('postgres', <<"SQL");
CREATE OR REPLACE FUNCTION $function() RETURNS trigger LANGUAGE plpgsql AS \$\$ BEGIN $statements END \$\$;
DROP TRIGGER IF EXISTS slow ON $table;
CREATE TRIGGER slow $timing ON $table FOR EACH $level EXECUTE FUNCTION $function();
SQL
    return;
}

sub drop_trigger { return $node->safe_psql('postgres', "DROP TRIGGER slow ON $_[0]"); }

# Where every row is and what it is: the same text means that nobody touched one.
sub versions
{
    my ($table, $where) = @_;
    return value($node, "SELECT string_agg(concat_ws('/', ctid, xmin, attempts, status, available_at), ' ' ORDER BY id)"
          . " FROM $table WHERE " . ($where // 'true'));
}

# The first failed pass of a route with its one row: how long it took, what it said; nothing is lost or touched.
sub failed_pass
{
    my ($route, $table, %expected) = @_;
    my ($id) = insert_rows($node, $table, $route, 1);
    my $before = versions($table);
    my $lane = wait_lane($node, $route, 'failed_passes > 0');
    like($lane->{last_error}, $expected{error}, "$route: fails with its reason");
    cmp_ok($lane->{last_pass_ms}, '>=', $expected{at_least}, "not before $expected{at_least} ms");
    cmp_ok($lane->{last_pass_ms}, '<', $expected{below}, "and before $expected{below} ms");
    is(versions($table), $before, 'the row is as it was');
    return $id;
}

# CON-06
subtest 'a statement is cut at pass_statement_timeout' => sub {
    my $table = table_and_route('statement', pass_statement_timeout => '400ms');
    add_trigger($table, 'BEFORE DELETE', 'PERFORM pg_sleep(3); RETURN NULL;');
    failed_pass('statement', $table, error => qr/statement timeout/, at_least => 400, below => 1500);
    drop_trigger($table);
    wait_empty($node, $table, all => 1);
    is(lane($node, 'statement')->{duplicates_avoided}, 1, 'cured, it settles what it had sent');
    is($e->count->{received}, 1, 'without sending it again');
    $e->reset;
};

# CON-07
subtest 'and so is a wait for a lock' => sub {
    my $table = table_and_route('lock', pass_statement_timeout => '400ms', enabled => 'false');
    my $holder = hold_session($node, "BEGIN; LOCK TABLE $table IN ACCESS EXCLUSIVE MODE");
    $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = 'lock'");
    my $lane = wait_lane($node, 'lock', 'failed_passes > 1');
    like($lane->{last_error}, qr/lock timeout|statement timeout/, 'on the table');
    cmp_ok($lane->{last_pass_ms}, '>=', 390, 'at the limit');
    cmp_ok($lane->{last_pass_ms}, '<', 1500, 'not later');
    $holder->query_safe('COMMIT');
    $node->safe_psql('postgres', 'CREATE TABLE app.held AS SELECT 1 AS n');
    add_trigger($table, 'BEFORE DELETE', 'PERFORM n FROM app.held FOR UPDATE; RETURN NULL;');
    my $passes = lane($node, 'lock')->{failed_passes};
    $holder->query_safe('BEGIN; UPDATE app.held SET n = 2');
    insert_rows($node, $table, 'lock', 1);
    $lane = wait_lane($node, 'lock', "failed_passes > $passes");
    like($lane->{last_error}, qr/lock timeout|statement timeout/, 'on a row, in settling');
    cmp_ok($lane->{last_pass_ms}, '<', 1500, 'at the limit too');
    $holder->query_safe('COMMIT');
    $holder->quit;
    wait_empty($node, $table, all => 1);
    is($e->count->{received}, 1, 'sent once');
    $e->reset;
};

# CON-08
subtest 'reclaim and claim are covered too' => sub {
    my $table = table_and_route('reclaim', pass_statement_timeout => '300ms', reclaim_stale_after => '1s');
    add_trigger($table, 'BEFORE UPDATE', 'PERFORM pg_sleep(3); RETURN NULL;');
    insert_rows($node, $table, 'reclaim', 1, columns => { status => 'processing', processing_at => \q{now() - interval '1h'} });
    my $lane = wait_lane($node, 'reclaim', 'failed_passes > 0');
    like($lane->{last_error}, qr/statement timeout/, 'reclaim');
    cmp_ok($lane->{last_pass_ms}, '<', 1500, 'at the limit');
    is($e->count->{received}, 0, 'nothing was sent');
    drop_trigger($table);
    wait_empty($node, $table, all => 1);
    $e->reset;

    # CON-23, with 50,000 rows: the claim of a table without an index does not fit into its limit.
    my $big = table_and_route('big', indexes => 0, enabled => 'false', pass_statement_timeout => '5ms');
    insert_rows($node, $big, 'big', 50_000, columns => { status => 'failed' });
    insert_rows($node, $big, 'big', 3);
    my $before = versions($big, "status = 'pending'");
    $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = 'big'");
    $lane = wait_lane($node, 'big', 'failed_passes >= 3');
    is($lane->{passes}, 0, 'claim without an index: every pass fails');
    like($lane->{last_error}, qr/timeout/, 'by its timeout');
    is($e->count->{received}, 0, 'nothing was sent');
    is(versions($big, "status = 'pending'"), $before, 'the rows are as they were');
    $node->safe_psql('postgres', "CREATE INDEX ON $big (outbox_route, status, available_at, created_at)");
    wait_empty($node, $big, route => 'big');
    pass('with the index it fits');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'big'; DROP TABLE $big");
    $e->reset;
};

# CON-09, CON-10
subtest 'publishing stops at pass_deadline, and the rest is untouched' => sub {
    my $table = table_and_route('deadline', url => $e->url('/slow?ms=300'), pass_deadline => '1500ms', concurrency => 1,
        enabled => 'false', interval => '1h', retry_base_delay => '1h', retry_max_backoff => '1h');
    insert_rows($node, $table, 'deadline', 20);
    my %before = map { split / / } split /\n/, value($node, "SELECT event_id || ' ' || concat_ws('/', ctid, xmin, attempts) FROM $table");
    $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = 'deadline'");
    my $lane = wait_lane($node, 'deadline', "passes = 1 AND state = 'idle'");
    cmp_ok($lane->{last_pass_ms}, '<', 2100, 'the pass ends in time');
    cmp_ok($lane->{published}, '>=', 3, 'what was done by then');
    cmp_ok($lane->{published}, '<=', 5, 'and no more');
    is($lane->{retried}, 1, 'what was under way is retried');
    is(value($node, "SELECT count(*) FROM $table"), 20 - $lane->{published}, 'the rest stays');
    my %after = map { split / / } split /\n/,
      value($node, "SELECT event_id || ' ' || concat_ws('/', ctid, xmin, attempts) FROM $table WHERE attempts = 0");
    is(scalar(keys %after), 19 - $lane->{published}, 'without an attempt');
    is_deeply([ grep { $after{$_} ne $before{$_} } keys %after ], [], 'in the same place, with the same xmin');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'deadline'");
    $e->reset;
};

# CON-11
subtest 'a request at the deadline is cancelled and counts; the event may arrive twice' => sub {
    $e->script('late', '/hang', '/ok');
    my $table = table_and_route('late', url => $e->url('/script/late'), pass_deadline => '500ms', retry_base_delay => '2s',
        retry_max_backoff => '2s');
    insert_rows($node, $table, 'late', 1);
    wait_sql($node, 'postgres', "SELECT attempts = 1 FROM $table");
    like(value($node, "SELECT last_error FROM $table"), qr/^deadline/, 'a failed attempt, with its reason');
    wait_empty($node, $table, all => 1);
    is($e->count->{complete}, 2, 'it arrived twice');
    $e->reset;
};

# CON-13
subtest 'a session that hangs in silence is cut, and the lane backs off' => sub {
    my $table = table_and_route('stuck', pass_deadline => '1s', pass_statement_timeout => '500ms');
    my $pid = wait_for_worker($node, 'postgres');
    my $offset = log_offset($node);
    set_conf($node, 'outbox_relay.fault_point' => 'before_settle=wait');
    my $started = time();
    insert_rows($node, $table, 'stuck', 2);
    wait_log($node, qr/fault point before_settle reached/, $offset);
    wait_log($node, qr/FATAL:.*idle-in-transaction/, $offset);
    cmp_ok(time() - $started, '>=', 1.4, 'not before pass_deadline + pass_statement_timeout');
    cmp_ok(time() - $started, '<', 4, 'but soon after');
    set_conf($node, 'outbox_relay.fault_point' => undef);
    is(value($node, "SELECT count(*) FROM $table WHERE status = 'pending' AND attempts = 0"), 2, 'the rows are pending');
    my $lane = lane($node, 'stuck');
    is($lane->{failed_passes}, 1, 'the pass has failed, and the lane remembers it');
    wait_empty($node, $table, all => 1);
    is($e->count->{received}, 2, 'the next worker sends nothing again');
    $e->reset;
};

# T-22; and the watchdog's last word, pass_deadline + 5 x pass_statement_timeout
subtest 'a trigger that traps its cancellation' => sub {
    my $table = table_and_route('trap', interval => '1s', retry_max_backoff => '1min', pass_deadline => '300ms',
        pass_statement_timeout => '300ms');
    add_trigger($table, 'BEFORE DELETE', <<'SQL');
LOOP
    BEGIN PERFORM pg_sleep(60); EXCEPTION WHEN query_canceled THEN RAISE LOG 'trapped'; END;
END LOOP;
SQL
    my $offset = log_offset($node);
    insert_rows($node, $table, 'trap', 1);
    my @cut;
    wait_until(
        sub {
            my $log = log_since($node, $offset);
            @cut = map { 3600 * $_->[0] + 60 * $_->[1] + $_->[2] } map { [ split /:/ ] }
              $log =~ /^\S+ ([\d:.]+) .*FATAL:.*idle-in-transaction/mg;
            @cut >= 3;
        },
        what => 'three sessions cut', timeout => 30, diag => sub { log_tail($node) });
    like(log_since($node, $offset), qr/trapped/, 'the cancel was trapped');
    cmp_ok($cut[1] - $cut[0], '>=', 0.99, 'the second worker waits an interval');
    cmp_ok($cut[1] - $cut[0], '<', 4, 'of the route');
    cmp_ok($cut[2] - $cut[1], '>=', 1.99, 'the third twice as long');
    is($e->count->{received}, 1, 'the event was sent once');
    drop_trigger($table);
    $node->safe_psql('postgres', "UPDATE outbox_route SET \"interval\" = '100ms' WHERE name = 'trap'");
    wait_empty($node, $table, all => 1);
    $e->reset;
};

# CON-14: one worker, two lanes; the limits of the stricter one must not stay for the other.
subtest 'limits end with their pass' => sub {
    set_conf($node, 'outbox_relay.workers' => 1);
    wait_until(sub { worker_pids($node, 'postgres') == 1 }, what => 'a single worker');
    $node->safe_psql('postgres', 'CREATE TABLE app.seen (n serial, route text, limits text)');
    my $see = q{INSERT INTO app.seen (route, limits) SELECT TG_TABLE_NAME, string_agg(setting, '/' ORDER BY name) FROM pg_settings
        WHERE name IN ('idle_in_transaction_session_timeout', 'lock_timeout', 'statement_timeout'); RETURN NULL;};
    my $strict = table_and_route('strict', pass_statement_timeout => '700ms', pass_deadline => '2s');
    my $loose = table_and_route('loose', pass_statement_timeout => '3s', pass_deadline => '4s');
    add_trigger($_, 'BEFORE DELETE', $see) for $strict, $loose;
    for my $route (qw(loose strict loose))
    {
        insert_rows($node, "app.$route", $route, 1);
        wait_empty($node, "app.$route", all => 1);
    }
    is(value($node, q{SELECT string_agg(route || ' ' || limits, ', ' ORDER BY n) FROM app.seen}),
        'loose 7000/3000/3000, strict 2700/700/700, loose 7000/3000/3000', 'each pass has its own');
    set_conf($node, 'outbox_relay.workers' => undef);
    $e->reset;
};

# CON-15
subtest 'a stricter limit of the owner or the database stays, a looser one widens nothing' => sub {
    $node->safe_psql('postgres', 'CREATE ROLE app_owner; GRANT USAGE ON SCHEMA app TO app_owner');
    my $table = table_and_route('role', owner => 'app_owner', pass_statement_timeout => '2s');
    is(value($node, "SELECT owner FROM outbox_route WHERE name = 'role'"), 'app_owner', "the route is the table owner's");
    add_trigger($table, 'BEFORE DELETE', 'PERFORM pg_sleep(5); RETURN NULL;');
    my @cases = (
        [ 'the role', 'ROLE app_owner SET statement_timeout', '200ms', 200, 1500 ],
        [ 'the database', 'DATABASE postgres SET statement_timeout', '250ms', 250, 1500 ],
        [ 'the role in the database', 'ROLE app_owner IN DATABASE postgres SET statement_timeout', '300ms', 300, 1500 ],
        [ 'a looser one', 'ROLE app_owner SET statement_timeout', '1h', 2000, 3500 ]);
    insert_rows($node, $table, 'role', 1);
    for my $case (@cases)
    {
        my ($name, $setting, $value, $at_least, $below) = @$case;
        $node->safe_psql('postgres', "ALTER $setting = '$value'");
        # A session takes the database's setting when it begins.
        my $lane = wait_passes($node, 'role', 2);
        cmp_ok($lane->{last_pass_ms}, '>=', $at_least, "$name: not before $at_least ms");
        cmp_ok($lane->{last_pass_ms}, '<', $below, "$name: before $below ms");
        $node->safe_psql('postgres', 'ALTER ' . ($setting =~ s/SET/RESET/r));
    }
    drop_trigger($table);
    wait_empty($node, $table, all => 1);
    $e->reset;
};

# On 17 and newer a transaction_timeout stays too; the relay has none of its own.
sub transaction_timeouts
{
    my $restart = "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker'";
    my $table = table_and_route('whole', owner => 'app_owner', url => $e->url('/hang'), pass_deadline => '20s');
    my $neighbour = table_and_route('neighbour');
    for my $setting ('ROLE app_owner SET transaction_timeout', 'DATABASE postgres SET transaction_timeout')
    {
        # A looser one, which the session has from its start, must not stand in the way of the role's.
        $node->safe_psql('postgres', "ALTER DATABASE postgres SET transaction_timeout = '15s'");
        $node->safe_psql('postgres', $restart);
        wait_for_worker($node, 'postgres');
        $node->safe_psql('postgres', "ALTER $setting = '700ms'");
        my $offset = log_offset($node);
        my ($id) = insert_rows($node, $table, 'whole', 1);
        my $before = versions($table);
        my $started = time();
        wait_log($node, qr/FATAL:.*transaction timeout/, $offset);
        cmp_ok(time() - $started, '<', 6, "$setting: long before pass_deadline");
        wait_lane($node, 'whole', 'failed_passes > 0');
        is(versions($table), $before, 'the row is as it was');
        insert_rows($node, $neighbour, 'neighbour', 3);
        wait_empty($node, $neighbour, all => 1);
        pass('the neighbour is served');
        $node->safe_psql('postgres', 'ALTER ROLE app_owner RESET transaction_timeout;'
              . 'ALTER DATABASE postgres RESET transaction_timeout');
        $node->safe_psql('postgres', $restart);
        $e->release(1);
        wait_empty($node, $table, all => 1);
        pass('and once nothing cuts it, the row goes out');
        $e->reset;
    }
    return;
}
subtest 'a transaction_timeout of the owner or the database cuts the session' => \&transaction_timeouts if $node->pg_version >= 17;

# CON-24, T-08
subtest 'what swallows a settling fails the pass' => sub {
    my %swallow = (
        trigger => [ 'CREATE FUNCTION %1$s_no() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$;'
              . 'CREATE TRIGGER no BEFORE DELETE ON %1$s FOR EACH ROW EXECUTE FUNCTION %1$s_no()', 'DROP TRIGGER no ON %1$s' ],
        rule => [ 'CREATE RULE no AS ON DELETE TO %1$s DO INSTEAD NOTHING', 'DROP RULE no ON %1$s' ],
        policy => [ 'ALTER TABLE %1$s ENABLE ROW LEVEL SECURITY, FORCE ROW LEVEL SECURITY;'
              . 'CREATE POLICY yes ON %1$s USING (true); CREATE POLICY no ON %1$s AS RESTRICTIVE FOR DELETE USING (false)',
            'DROP POLICY no ON %1$s' ]);
    for my $way (sort keys %swallow)
    {
        my $name = "no_$way";
        my $table = table_and_route($name, owner => 'app_owner');
        $node->safe_psql('postgres', sprintf $swallow{$way}[0], $table);
        my ($id) = insert_rows($node, $table, $name, 1);
        my $lane = wait_lane($node, $name, 'failed_passes >= 3');
        like($lane->{last_error}, qr/only 0 of 1 rows of app\.$name were deleted for route "$name"/, "$way: it says so");
        is(value($node, "SELECT status, attempts FROM $table"), 'pending|0', 'the row stays');
        $node->safe_psql('postgres', sprintf $swallow{$way}[1], $table);
        wait_empty($node, $table, all => 1);
        is(scalar(grep { $_->{event_id} eq $id } $e->deliveries), 1, 'and was sent once');
    }
    my $table = table_and_route('no_update', url => $e->url('/status/500'));
    add_trigger($table, 'BEFORE UPDATE', 'RETURN NULL;', 'ROW');
    insert_rows($node, $table, 'no_update', 1);
    like(wait_lane($node, 'no_update', 'failed_passes > 0')->{last_error}, qr/only 0 of 1 rows .* were updated/, 'updates too');
    $node->safe_psql('postgres', 'DELETE FROM outbox_route');
    $e->reset;
};

# F-43
subtest 'a database of hostile defaults' => sub {
    $node->safe_psql('postgres', 'CREATE DATABASE hostile');
    $node->safe_psql('hostile', 'CREATE EXTENSION outbox_relay');
    make_outbox($node, 'hostile', 'app.outbox', indexes => 1);
    create_route($node, 'h', 'app.outbox', $e->url, db => 'hostile', enabled => 'false', interval => '100ms', max_claim_rows => 7,
        reclaim_stale_after => '1h');
    insert_rows($node, 'app.outbox', 'h', 20, db => 'hostile',
        columns => { occurred_at => '2026-03-02 01:02:03.000004+00', available_at => \q{now() - interval '1 minute'} });
    insert_rows($node, 'app.outbox', 'h', 1, db => 'hostile', columns => { available_at => \q{now() + interval '1 hour'} });
    my %defaults = (
        default_transaction_isolation => 'serializable', default_transaction_read_only => 'on',
        default_transaction_deferrable => 'on', search_path => 'evil', DateStyle => 'SQL, DMY',
        TimeZone => 'Asia/Kathmandu', IntervalStyle => 'sql_standard', synchronous_commit => 'off', row_security => 'off',
        enable_indexscan => 'off', plan_cache_mode => 'force_custom_plan', session_replication_role => 'replica',
        bytea_output => 'escape', statement_timeout => '20s', lock_timeout => '20s', idle_in_transaction_session_timeout => '20s',
        client_encoding => 'LATIN1', standard_conforming_strings => 'off', transform_null_equals => 'on', array_nulls => 'off');
    $node->safe_psql('postgres', join ';', map { "ALTER DATABASE hostile SET $_ = '$defaults{$_}'" } sort keys %defaults);
    $node->safe_psql('hostile', 'SET default_transaction_read_only = off; UPDATE public.outbox_route SET enabled = true');
    $e->wait_for_count(20, of => 'acked');
    my %times = map { $e->headers($_)->{'ce-time'} => 1 } $e->requests;
    is_deeply([ keys %times ], ['2026-03-02T01:02:03.000004Z'], 'relayed, and the times are as they should be');
    wait_sql($node, 'hostile', 'SELECT count(*) = 1 AND bool_and(available_at > now()) FROM app.outbox');
    is(value($node, "SELECT failed_passes FROM public.outbox_stat_route", 'hostile'), 0, 'no pass failed');
};

done_testing();
