# target_function: each event is delivered by a call in the pass's transaction, so that it takes effect exactly once.
# Its error fails the whole pass and counts no attempt; the row that causes it is found and set aside.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use Time::HiRes qw(time);
use OutboxRelay::Lane;
use OutboxRelay::Node;
use OutboxRelay::Wait ();

my $node = new_node('target', fsync => 1, conf => "autovacuum = off\noutbox_relay.workers = 1\n");
my %fast = (interval => '100ms', retry_base_delay => '100ms', retry_max_backoff => '300ms');
$node->safe_psql('postgres', <<'SQL');
CREATE ROLE app_owner;
CREATE ROLE other_owner;
CREATE SCHEMA app AUTHORIZATION app_owner;
GRANT USAGE, CREATE ON SCHEMA app TO other_owner;
SQL

# A table of app_owner, a table NAME_inbox, and a route to the function NAME_f with this body.
sub scene
{
    my ($name, $body, %columns) = @_;
    make_outbox($node, 'postgres', "app.$name", owner => 'app_owner', %{ delete $columns{table} // {} });
    $node->safe_psql('postgres', "SET ROLE app_owner; CREATE TABLE app.${name}_inbox (seq bigserial, event_id uuid, event_type text)");
    target($name, $body);
    route($name, %columns);
    return "app.$name";
}

sub target
{
    my ($name, $body) = @_;
    $node->safe_psql('postgres', <<"SQL");
SET ROLE app_owner;
CREATE OR REPLACE FUNCTION app.${name}_f(event public.outbox_message) RETURNS void LANGUAGE plpgsql AS \$f\$
BEGIN
    $body
END \$f\$;
SQL
    return;
}

sub route
{
    my ($name, %columns) = @_;
    my %row = (name => $name, relation => "app.$name", target_function => "app.${name}_f", owner => 'app_owner', %fast, %columns);
    my @names = sort keys %row;
    $node->safe_psql('postgres', 'INSERT INTO outbox_route (' . join(', ', @names) . ') VALUES (' . join(', ', map { sql_literal($row{$_}) } @names) . ')');
    return;
}

sub note_sql { my ($name) = @_; return "INSERT INTO app.${name}_inbox (event_id, event_type) VALUES (event.event_id, event.event_type);"; }

# Kills the worker, and with it the server's memory; waits until the server is back. A psql that meets it in recovery
# may be gone before it has read its input, which its caller does not survive.
sub crash
{
    kill_worker($node, 'postgres', 'KILL');
    OutboxRelay::Wait::wait_until(sub { eval { ($node->psql('postgres', 'SELECT 1'))[0] == 0 } }, what => 'the server to come back', poll_ms => 100);
    return;
}

sub drop { my ($name) = @_; $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = '$name'"); return; }

subtest 'what the function is given, and as whom' => sub {
    $node->safe_psql('postgres', 'CREATE TABLE app.got (event jsonb, who text, path text); GRANT INSERT ON app.got TO app_owner');
    my $table = scene('given', q{INSERT INTO app.got VALUES (to_jsonb(event), current_user || '/' || session_user, current_setting('search_path'));},
        enabled => 0, hlc_ordering => 1, propagate_trace => 1, table => { hlc => 1, trace => 1 });
    my @ids = map { sprintf "'00000000-0000-7000-8000-%012d'", $_ } 1 .. 5;
    my $trace = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01';
    $node->safe_psql('postgres', <<"SQL");
SELECT outbox_stage('given', 'order.placed', '{"n": 12345678901234567890.10, "t": "\x{c3}\x{a4}"}', event_id => $ids[0], ordering_key => 'k',
    occurred_at => '2026-01-02 03:04:05.678901+00', tenant_id => $ids[1], execution_id => $ids[2], correlation_id => $ids[3],
    causation_id => $ids[4], traceparent => '$trace');
SELECT outbox_stage('given', 'bare', 'null');
-- Out of line and compressed.
SELECT outbox_stage('given', 'large', to_jsonb(string_agg(md5(i::text), '')) || to_jsonb(repeat('x', 100000))) FROM generate_series(1, 2000) i;
UPDATE $table SET attempts = 3 WHERE event_type = 'bare';
CREATE TABLE app.staged AS SELECT * FROM $table;
UPDATE outbox_route SET enabled = true WHERE name = 'given';
SQL
    wait_empty($node, $table, all => 1);
    is(value($node, 'SELECT string_agg(key, chr(44) ORDER BY ordinality) FROM jsonb_object_keys((SELECT event FROM app.got LIMIT 1)) WITH ORDINALITY AS k (key, ordinality)'),
        value($node, q{SELECT string_agg(attname, ',' ORDER BY length(attname), attname) FROM pg_attribute WHERE attrelid = 'outbox_message'::regclass AND attnum > 0}),
        'every attribute');
    is(value($node, <<'SQL'), 3, 'each is the row\'s column');
SELECT count(*) FROM app.got JOIN app.staged AS s ON event ->> 'id' = s.id::text
WHERE event = to_jsonb(s) - '{status,created_at,published_at,processing_at,last_error,available_at}'::text[]
SQL
    is(value($node, 'SELECT DISTINCT who || path FROM app.got'), 'app_owner/postgrespg_catalog, pg_temp', 'as the owner, restricted');
    is(value($node, q{SELECT (event -> 'payload')::text FROM app.got WHERE event ->> 'event_type' = 'bare'}), 'null', 'a JSON null is no NULL');
    drop('given');
};

subtest 'order, and passes of many rows' => sub {
    for my $ordering ('none', 'key')
    {
        my $name = "order_$ordering";
        my $table = scene($name, note_sql($name), ordering => $ordering, enabled => 0, max_claim_rows => 30);
        my @ids = insert_rows($node, $table, $name, 100, keys => 3);
        $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = '$name'");
        wait_empty($node, $table, all => 1);
        is(value($node, "SELECT string_agg(event_id::text, ',' ORDER BY seq) FROM app.${name}_inbox"), join(',', @ids), "$ordering: in claim order");
        my $lane = wait_lane($node, $name, 'published = 100');
        is("$lane->{claimed} $lane->{retried} $lane->{failed}", '100 0 0', 'counted');
        drop($name);
    }
};

subtest 'the row at fault is found and set aside' => sub {
    my $table = scene('poison', note_sql('poison') . q{IF event.event_type = 'bad' THEN RAISE 'not this one'; END IF;});
    my $offset = log_offset($node);
    $node->safe_psql('postgres', "BEGIN; SELECT outbox_stage('poison', CASE i WHEN 4 THEN 'bad' ELSE 'e' || i END, '1') FROM generate_series(1, 8) i; COMMIT");
    wait_sql($node, 'postgres', "SELECT count(*) = 1 FROM $table");
    wait_log($node, qr/route "poison" sets row .* of app.poison aside: .*not this one/, $offset);
    is(value($node, "SELECT string_agg(event_type, ',' ORDER BY event_type) FROM app.poison_inbox"), 'e1,e2,e3,e5,e6,e7,e8', 'each other once, whatever failed in between');
    is(value($node, "SELECT event_type || attempts || status || (last_error IS NULL) FROM $table"), 'bad0pendingtrue', 'the row is untouched, no attempt counted');
    my $lane = wait_lane($node, 'poison', 'set_aside = 1');
    stage($node, 'poison', event_type => 'later');
    wait_sql($node, 'postgres', "SELECT count(*) = 1 FROM $table");
    target('poison', note_sql('poison'));
    $node->safe_psql('postgres', "UPDATE $table SET payload = '2'");
    wait_empty($node, $table, all => 1);
    drop('poison');
};

subtest 'a row set aside gets another try by requeue, or when the route changes' => sub {
    my $bad = note_sql('again') . q{IF event.event_type LIKE 'bad%' THEN RAISE 'not this one'; END IF;};
    my $table = scene('again', $bad, retry_max_backoff => '100ms');
    for my $n (1 .. 3)
    {
        # One at a time: two rows that fail at once are taken for a fault of the lane.
        $node->safe_psql('postgres', "BEGIN; SELECT outbox_stage('again', CASE i WHEN 1 THEN 'bad$n' ELSE 'e' END, '1') FROM generate_series(1, 4) i; COMMIT");
        wait_lane($node, 'again', "set_aside = $n");
    }
    my $left = "SELECT string_agg(event_type, ',' ORDER BY event_type) FROM $table";
    target('again', note_sql('again'));
    wait_passes($node, 'again', 3);
    is(value($node, $left), 'bad1,bad2,bad3', 'the function is mended, the rows wait');
    is(value($node, "SELECT outbox_requeue_failed('again', '{}')"), 0, 'none of no events');
    is($node->safe_psql('postgres', "BEGIN; SELECT outbox_requeue_failed('again'); ROLLBACK"), 3, 'counted');
    wait_passes($node, 'again', 3);
    is(lane($node, 'again')->{set_aside}, 3, 'a rollback leaves them aside');
    is(value($node, "SELECT outbox_requeue_failed('again', ARRAY(SELECT event_id FROM $table WHERE event_type = 'bad2'))"), 1, 'one event');
    wait_sql($node, 'postgres', $left, expected => 'bad1,bad3');
    is(wait_lane($node, 'again', 'set_aside = 2')->{set_aside}, 2, 'the others stay aside');
    $node->safe_psql('postgres', "UPDATE $table SET status = 'failed', attempts = 7 WHERE event_type = 'bad1'");
    is(value($node, "SELECT outbox_requeue_failed('again')"), 2, 'all, with those that failed');
    wait_empty($node, $table, all => 1);

    target('again', $bad);
    $node->safe_psql('postgres', "BEGIN; SELECT outbox_stage('again', CASE i WHEN 1 THEN 'bad' ELSE 'e' END, '1') FROM generate_series(1, 4) i; COMMIT");
    wait_lane($node, 'again', 'set_aside = 1');
    target('again', note_sql('again'));
    $node->safe_psql('postgres', "UPDATE outbox_route SET pass_deadline = '6s' WHERE name = 'again'");
    wait_empty($node, $table, all => 1);
    is(wait_lane($node, 'again', 'set_aside = 0')->{set_aside}, 0, 'the route has changed');
    drop('again');
};

subtest 'a fault of the function itself sets nothing aside' => sub {
    my $table = scene('broken', q{RAISE 'out of order';});
    for my $round (1 .. 6)
    {
        target('broken', q{RAISE 'out of order';});
        my $failed = lane($node, 'broken')->{failed_passes};
        stage_many($node, 'broken', 3);
        # Its end falls between two passes of one row, now of the one, now of the other.
        my $lane = wait_lane($node, 'broken', "failed_passes >= $failed + 2 + $round % 2");
        is($lane->{set_aside}, 0, 'nothing aside');
        like($lane->{last_error}, qr/out of order/, 'shown');
        target('broken', note_sql('broken'));
        wait_empty($node, $table, all => 1);
    }
    is(value($node, q{SELECT count(DISTINCT event_id) || ' ' || count(*) FROM app.broken_inbox}), '18 18', 'once each');
    drop('broken');
};

subtest 'the deadline is judged between calls, each bounded by pass_statement_timeout' => sub {
    my $table = scene('slow', 'PERFORM pg_sleep(0.2);' . note_sql('slow'), enabled => 0, interval => '1h',
        pass_deadline => '700ms', pass_statement_timeout => '5s');
    insert_rows($node, $table, 'slow', 20);
    $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = 'slow'");
    my $lane = wait_lane($node, 'slow', 'passes >= 1');
    cmp_ok($lane->{published}, '>=', 1, 'some');
    cmp_ok($lane->{published}, '<=', 4, 'not all');
    is(value($node, "SELECT 20 - count(*) FROM $table WHERE attempts = 0"), $lane->{published}, 'committed; the rest is untouched');
    drop('slow');

    $table = scene('cut', 'PERFORM pg_sleep(30);', pass_statement_timeout => '300ms');
    insert_rows($node, $table, 'cut', 1);
    $lane = wait_lane($node, 'cut', 'failed_passes >= 1');
    like($lane->{last_error}, qr/statement timeout/, 'cut');
    cmp_ok($lane->{last_pass_ms}, '<', 3000, 'soon');
    is(value($node, "SELECT attempts FROM $table"), 0, 'no attempt');
    drop('cut');

    $table = scene('trap', 'BEGIN PERFORM pg_sleep(30); EXCEPTION WHEN query_canceled THEN NULL; END;' . note_sql('trap'), pass_statement_timeout => '300ms');
    insert_rows($node, $table, 'trap', 2);
    wait_empty($node, $table, all => 1);
    is(value($node, 'SELECT count(*) FROM app.trap_inbox'), 2, 'one that traps the cancel and returns counts as published');
    drop('trap');
};

# CON-22: exactly once, whatever happens.
subtest 'killed in every step, each event takes effect once' => sub {
    my $table = scene('once', note_sql('once'), max_claim_rows => 10, enabled => 0);
    my @points = ('after_claim', 'after_publish:1', 'after_publish:7', 'before_settle', 'in_settle', 'before_commit', 'after_commit');
    my $count = 0;
    for my $action ('kill', 'error', 'fatal')
    {
        for my $point (grep { $action ne 'kill' || !/after_claim|publish:1|before_settle/ } @points)
        {
            next if $action ne 'kill' && $point eq 'after_commit';
            insert_rows($node, $table, 'once', 10);
            $count += 10;
            my $offset = log_offset($node);
            my $done = $action eq 'kill' ? 'wait' : $action;
            set_conf($node, 'outbox_relay.fault_point' => "$point=$done");
            $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = 'once'");
            wait_log($node, qr/fault point \w+ reached: $done/, $offset);
            if ($action eq 'kill')
            {
                crash();
            }
            set_conf($node, 'outbox_relay.fault_point' => undef);
            wait_empty($node, $table, all => 1);
            is(value($node, 'SELECT count(DISTINCT event_id) || \' \' || count(*) FROM app.once_inbox'), "$count $count", "$action at $point");
            $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = false WHERE name = 'once'");
        }
    }
    drop('once');
};

subtest 'a lock for the session ends with the pass' => sub {
    my $held = q{SELECT count(*) FROM pg_locks WHERE locktype = 'advisory'};
    for my $what ('', q{IF event.event_type = 'bad' THEN RAISE 'no'; END IF;})
    {
        my $table = scene('locker', "PERFORM pg_advisory_lock(17); $what" . note_sql('locker'));
        $node->safe_psql('postgres', "SELECT outbox_stage('locker', '" . ($what ? 'bad' : 'good') . q{', '1')});
        $what ? wait_lane($node, 'locker', 'failed_passes > 0') : wait_empty($node, $table, all => 1);
        $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = false WHERE name = 'locker'");
        wait_sql($node, 'postgres', $held, expected => 0, what => 'the lock to be released', timeout => 20);
        drop('locker');
        $node->safe_psql('postgres', 'DROP TABLE app.locker, app.locker_inbox; DROP FUNCTION app.locker_f');
    }
    pass('after a pass that committed, and after one that failed');
    scene('locking', note_sql('locking'), enabled => 0);
    is($node->safe_psql('postgres', "SELECT pg_advisory_lock(18); SELECT claimed FROM outbox_relay_pass('locking'); $held"), "\n0\n1", 'a pass on demand leaves its caller\'s');
    drop('locking');
};

subtest 'with every storage' => sub {
    my $table = scene('retained', note_sql('retained'), storage => 'retain', max_claim_rows => 5, enabled => 0);
    insert_rows($node, $table, 'retained', 20);
    my $offset = log_offset($node);
    set_conf($node, 'outbox_relay.fault_point' => 'in_settle=wait');
    $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = 'retained'");
    wait_log($node, qr/fault point in_settle reached: wait/, $offset);
    is(value($node, "SELECT count(*) FROM $table WHERE status = 'pending'"), 20, 'until the commit all are pending to others');
    crash();
    is(value($node, 'SELECT count(*) FROM app.retained_inbox'), 0, 'killed before it, nothing took effect');
    set_conf($node, 'outbox_relay.fault_point' => undef);
    wait_empty($node, $table);
    is(value($node, "SELECT count(*) FROM $table WHERE status = 'published' AND published_at IS NOT NULL AND processing_at IS NULL"), 20, 'retain: kept as published');
    is(value($node, q{SELECT count(DISTINCT event_id) || ' ' || count(*) FROM app.retained_inbox}), '20 20', 'once each');
    drop('retained');

    $node->safe_psql('postgres', 'SET ROLE app_owner; CREATE TABLE app.logged_delivered (id uuid, outbox_route text, event_id uuid, tenant_id uuid, published_at timestamptz)');
    $table = scene('logged', note_sql('logged') . q{IF event.event_type = 'bad' THEN RAISE 'not this one'; END IF;}, delivery_log => 'app.logged_delivered');
    insert_rows($node, $table, 'logged', 1, type => 'bad');
    insert_rows($node, $table, 'logged', 3);
    wait_lane($node, 'logged', 'set_aside = 1');
    is(value($node, 'SELECT count(*) FROM app.logged_delivered JOIN app.logged_inbox USING (event_id)'), 3, 'a delivery log has each that took effect');
    is(value($node, 'SELECT count(*) FROM app.logged_delivered'), 3, 'and no other');
    drop('logged');
};

subtest 'what is refused before anything is delivered' => sub {
    my $table = scene('refused', note_sql('refused'));
    my $fails = sub {
        my ($sql, $error, $what) = @_;
        $node->safe_psql('postgres', $sql);
        insert_rows($node, $table, 'refused', 1);
        wait_lane($node, 'refused', 'state = \'backoff\' AND position(' . sql_literal($error) . ' IN last_error) > 0');
        pass($what);
        return;
    };
    insert_rows($node, $table, 'refused', 1);
    wait_empty($node, $table, all => 1);
    $fails->('ALTER FUNCTION app.refused_f RENAME TO refused_g', 'function app.refused_f(public.outbox_message) does not exist', 'gone');
    $fails->('CREATE FUNCTION app.refused_f(public.outbox_message) RETURNS int LANGUAGE sql AS $$ SELECT 1 $$', 'does not return void', 'another result');
    $fails->('DROP FUNCTION app.refused_f; CREATE FUNCTION app.refused_f(jsonb) RETURNS void LANGUAGE sql AS $$ SELECT 1 $$', 'does not exist', 'another argument');
    $fails->('CREATE PROCEDURE app.refused_f(public.outbox_message) LANGUAGE sql AS $$ SELECT 1 $$', 'not an ordinary function', 'a procedure');
    $fails->('DROP PROCEDURE app.refused_f(public.outbox_message); ALTER FUNCTION app.refused_g RENAME TO refused_f;'
          . 'REVOKE EXECUTE ON FUNCTION app.refused_f(public.outbox_message) FROM PUBLIC, app_owner', 'lacks EXECUTE', 'no right to call it');
    $fails->('GRANT EXECUTE ON FUNCTION app.refused_f(public.outbox_message) TO PUBLIC; ALTER FUNCTION app.refused_f(public.outbox_message) OWNER TO other_owner',
        'may not call function', 'somebody else\'s code');
    is(value($node, 'SELECT count(*) FROM app.refused_inbox'), 1, 'nothing was delivered meanwhile');
    $node->safe_psql('postgres', 'GRANT app_owner TO other_owner');
    wait_empty($node, $table, all => 1);
    is(value($node, 'SELECT count(*) FROM app.refused_inbox'), 7, 'an owner with the privileges of the route\'s owner may');
    drop('refused');
};

subtest 'restricted like every pass' => sub {
    my $n = 0;
    for my $vector ('RESET ROLE;', 'SET ROLE postgres;', 'CREATE TEMP TABLE t (a int);', 'LISTEN x;', 'COMMIT;', 'ALTER ROLE app_owner SUPERUSER;')
    {
        my $name = 'vector' . $n++;
        my $table = scene($name, $vector);
        insert_rows($node, $table, $name, 1);
        my $lane = wait_lane($node, $name, 'failed_passes >= 1');
        like($lane->{last_error}, qr/security-restricted|security-definer|cannot|invalid transaction termination|must be superuser|permission denied/, "$vector $lane->{last_error}");
        drop($name);
    }
    is(value($node, "SELECT rolsuper FROM pg_roles WHERE rolname = 'app_owner'"), 'f', 'nobody became a superuser');
};

subtest 'a payload that is too large is parked' => sub {
    my $table = scene('large', note_sql('large'), max_payload_bytes => 1000);
    insert_rows($node, $table, 'large', 1, columns => { payload => \q{to_jsonb(repeat('x', 2000))} });
    insert_rows($node, $table, 'large', 2);
    wait_empty($node, $table);
    is(value($node, "SELECT string_agg(status || attempts || last_error, ',') ~ '^failed0payload of 20.. bytes' FROM $table"), 't', 'alone');
    is(value($node, 'SELECT count(*) FROM app.large_inbox'), 2, 'others go');
    drop('large');
};

subtest 'on demand' => sub {
    my $table = scene('demand', note_sql('demand'), enabled => 0);
    insert_rows($node, $table, 'demand', 5);
    my $state = "(SELECT count(*) FROM $table), (SELECT count(*) FROM app.demand_inbox)";
    is($node->safe_psql('postgres', "BEGIN; SELECT * FROM outbox_relay_pass('demand', 3); SELECT $state; ROLLBACK; SELECT $state"),
        "3|3|0|0|0|0|0\n2|3\n5|0", 'a rollback undoes deliveries and deletions');
    target('demand', note_sql('demand') . q{IF event.event_type = 'bad' THEN RAISE 'not this one'; END IF;});
    insert_rows($node, $table, 'demand', 1, type => 'bad');
    is($node->safe_psql('postgres', <<"SQL"), "6|0\n1", 'an error undoes the pass alone');
BEGIN;
CREATE TABLE app.kept (a int);
INSERT INTO app.kept VALUES (1);
DO \$\$ BEGIN PERFORM outbox_relay_pass('demand'); EXCEPTION WHEN raise_exception THEN NULL; END \$\$;
SELECT $state;
COMMIT;
SELECT count(*) FROM app.kept;
SQL
    $node->safe_psql('postgres', "DELETE FROM $table WHERE event_type = 'bad'");
    is($node->safe_psql('postgres', "SELECT published FROM outbox_relay_pass('demand'); SELECT $state"), "5\n0|5", 'committed');
    # Its own staging is skipped, also by the function of the same pass.
    target('demand', q{PERFORM public.outbox_stage('demand', 'answer', '1');});
    insert_rows($node, $table, 'demand', 1);
    is($node->safe_psql('postgres', "SELECT claimed FROM outbox_relay_pass('demand'); SELECT count(*) FROM $table"), "1\n1", 'a function may stage events');
    drop('demand');
};

subtest 'no pass inside a pass' => sub {
    $node->safe_psql('postgres', 'GRANT EXECUTE ON FUNCTION outbox_relay_pass TO app_owner');
    my $table = scene('nested', q{PERFORM public.outbox_relay_pass('nested');} . note_sql('nested'), enabled => 0);
    insert_rows($node, $table, 'nested', 3);
    my ($code, $out, $err) = $node->psql('postgres', q{SELECT outbox_relay_pass('nested')});
    like($err, qr/a pass can't be run inside a pass/, 'on demand');
    ($code, $out, $err) = $node->psql('postgres', q{SELECT outbox_relay_pass('nested')});
    like($err, qr/a pass can't be run inside a pass.*PL\/pgSQL function app.nested_f/s, 'again: the one before is over');
    $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = 'nested'");
    wait_lane($node, 'nested', q{last_error ~ 'inside a pass'});
    target('nested', note_sql('nested'));
    wait_empty($node, $table, all => 1);
    is(value($node, 'SELECT count(*) FROM app.nested_inbox'), 3, 'nothing was lost or repeated');
    drop('nested');
};

subtest 'eviction does not wait for a call' => sub {
    my $table = scene('evict', 'PERFORM pg_sleep(60);' . note_sql('evict'), pass_statement_timeout => '1h');
    insert_rows($node, $table, 'evict', 1);
    wait_sql($node, 'postgres', "SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker' AND wait_event = 'PgSleep'");
    my $pid = value($node, "SELECT pid FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker' AND wait_event = 'PgSleep'");
    my $at = time();
    value($node, "SELECT pg_terminate_backend($pid)");
    wait_sql($node, 'postgres', "SELECT count(*) = 0 FROM pg_stat_activity WHERE pid = $pid");
    cmp_ok(time() - $at, '<', 5, 'gone at once');
    target('evict', note_sql('evict'));
    wait_empty($node, $table, all => 1);
    is(value($node, 'SELECT count(*) FROM app.evict_inbox'), 1, 'and delivered once');
    drop('evict');
};

$node->stop;
done_testing();
