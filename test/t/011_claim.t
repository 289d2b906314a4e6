# What a pass claims: which rows, how many, in which order, beside whom; and from which tables it can.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;
use OutboxRelay::Oracle;

my ($share) = PostgreSQL::Test::Utils::run_command([ 'pg_config', '--sharedir' ]);
my $have_statements = -e "$share/extension/pg_stat_statements.control";
my $node = new_node('claim',
    preload => $have_statements ? 'outbox_relay,pg_stat_statements' : 'outbox_relay',
    conf => "autovacuum = off\n");
my $e = OutboxRelay::Endpoint->start;

# Event ids that the endpoint has taken, in order of arrival.
sub arrived { return map { $_->{event_id} } sort { $a->{n} <=> $b->{n} } grep { $_->{acked} } $e->deliveries; }

sub wait_for_event
{
    my ($id, %opts) = @_;
    return $e->wait_until(sub { scalar grep { $_ eq $id } arrived() }, what => "event $id", %opts);
}

# A route of the table, polled often.
sub route
{
    my ($name, $table, %columns) = @_;
    create_route($node, $name, $table, $e->url, interval => '100ms', %columns);
    return;
}

# Fresh table app.NAME.
sub table { my ($name, %opts) = @_; make_outbox($node, 'postgres', "app.$name", %opts); return "app.$name"; }

# Notes for each pass (its transaction) how many rows it deleted, fresh ones and ones tried before.
sub audit_deletes
{
    my ($table) = @_;
    $node->safe_psql('postgres', <<"SQL");
CREATE TABLE ${table}_audit (pass xid8, fresh int, again int, seq bigserial);
CREATE FUNCTION ${table}_note() RETURNS trigger LANGUAGE plpgsql AS \$\$ BEGIN
    INSERT INTO ${table}_audit (pass, fresh, again)
    SELECT pg_current_xact_id(), count(*) FILTER (WHERE available_at IS NULL), count(available_at) FROM gone;
    RETURN NULL;
END \$\$;
CREATE TRIGGER note AFTER DELETE ON $table REFERENCING OLD TABLE AS gone FOR EACH STATEMENT
    EXECUTE FUNCTION ${table}_note();
SQL
    return "${table}_audit";
}

# CLM-01, CLM-02, CLM-03, CLM-12
subtest 'only ripe pending rows of this very route' => sub {
    my $table = table('which');
    my %left;
    for my $name ('a ', 'A', 'a_', '%', 'aa', ' a')
    {
        $left{$_} = "route '$name'" for insert_rows($node, $table, $name, 1);
    }
    for my $status (qw(processing published failed))
    {
        my %columns = (status => $status, processing_at => \q{now() - interval '1 day'});
        $left{$_} = $status for insert_rows($node, $table, 'a', 1, columns => \%columns);
    }
    $left{$_} = 'a retry of the future'
      for insert_rows($node, $table, 'a', 1, columns => { available_at => \q{now() + interval '1 hour'} });
    my @good = insert_rows($node, $table, 'a', 2);
    push @good, insert_rows($node, $table, 'a', 1, columns => { available_at => \q{now() - interval '1 second'} });
    my $versions = "SELECT string_agg(ctid || ' ' || xmin || ' ' || status, ',' ORDER BY event_id) FROM $table"
      . " WHERE event_id IN ('" . join("', '", keys %left) . "')";
    my $before = value($node, $versions);
    route('a', $table, reclaim_stale_after => '0');
    wait_for_event($_) for @good;
    wait_passes($node, 'a', 3);
    my %arrived = map { $_ => 1 } arrived();
    is_deeply([ map { $left{$_} } grep { $arrived{$_} } keys %left ], [], 'nothing else is sent');
    is(value($node, $versions), $before, 'or touched');
    is(value($node, "SELECT count(*) FROM $table"), scalar keys %left, 'the good ones are gone');
    is(lane($node, 'a')->{claimed}, 3, 'claimed: 3');
};

# CLM-04, B-24
subtest 'at most max_claim_rows, whatever the planner does' => sub {
    $node->safe_psql('postgres', 'CREATE DATABASE hostile');
    $node->safe_psql('postgres', "ALTER DATABASE hostile SET $_ = off")
      for qw(enable_hashjoin enable_mergejoin enable_material enable_hashagg enable_indexscan enable_indexonlyscan
        enable_sort enable_bitmapscan);
    $node->safe_psql('hostile', 'CREATE EXTENSION outbox_relay');
    make_outbox($node, 'hostile', 'app.outbox');
    # Statistics that lie: they were made of a table of two rows.
    insert_rows($node, 'app.outbox', 'other', 2, db => 'hostile');
    $node->safe_psql('hostile', 'ANALYZE app.outbox');
    my @ids = insert_rows($node, 'app.outbox', 'limited', 1000, db => 'hostile');
    $node->safe_psql('hostile', <<'SQL');
UPDATE app.outbox SET available_at = now() - interval '1 s' WHERE (payload->>'n')::int % 3 = 0;
CREATE TABLE app.audit (n int);
CREATE FUNCTION app.note() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN INSERT INTO app.audit SELECT count(*) FROM gone; RETURN NULL; END $$;
CREATE TRIGGER note AFTER DELETE ON app.outbox REFERENCING OLD TABLE AS gone FOR EACH STATEMENT
    EXECUTE FUNCTION app.note();
SQL
    create_route($node, 'limited', 'app.outbox', $e->url, db => 'hostile', max_claim_rows => 7);
    wait_empty($node, 'app.outbox', db => 'hostile', route => 'limited', endpoint => $e);
    is(value($node, 'SELECT max(n) FROM app.audit', 'hostile'), 7, 'never more than 7 in a pass');
    is(value($node, 'SELECT count(*) FROM app.audit WHERE n < 7', 'hostile'), 1, 'and only the last has fewer');
    is(wait_lane($node, 'limited', 'published = 1000', db => 'hostile')->{claimed}, 1000, 'each claimed once');
    my %arrived = map { $_ => 1 } arrived();
    is(scalar(grep { $arrived{$_} } @ids), 1000, 'all of them arrived');
};

# spec.md section 4, step 4: neither less than half when both have more
subtest 'retries and fresh rows share a pass' => sub {
    my $table = table('shared');
    my $audit = audit_deletes($table);
    insert_rows($node, $table, 'shared', 60);
    insert_rows($node, $table, 'shared', 60,
        columns => { available_at => \q{now() - interval '1 minute'}, attempts => 1 });
    insert_rows($node, $table, 'shared', 40);
    route('shared', $table, max_claim_rows => 7);
    wait_empty($node, $table);
    my ($passes, $worst, $full) = split /\|/, value($node, <<"SQL");
WITH p AS (SELECT fresh, again, sum(fresh) OVER w AS fresh_so_far, sum(again) OVER w AS again_so_far
           FROM $audit WINDOW w AS (ORDER BY seq))
SELECT count(*), min(least(fresh, again)), bool_and(fresh + again = 7) FROM p
WHERE fresh_so_far <= 93 AND again_so_far <= 53
SQL
    cmp_ok($passes, '>=', 13, 'passes with more of both kinds');
    is($worst, 3, 'at least half of 7, rounded down, of each kind in each');
    is($full, 't', 'and every one full');
    cmp_ok(abs(value($node, "SELECT sum(fresh - again) FROM (SELECT * FROM $audit ORDER BY seq LIMIT 12) AS a")),
        '<=', 2, 'the odd one goes to either in turn');
};

# CLM-05, CLM-06
subtest 'oldest first, in claiming and in sending' => sub {
    my $table = table('oldest');
    my @ids = insert_rows($node, $table, 'oldest', 100,
        columns => { created_at => \q{timestamptz '2026-01-01' + (g * 37 % 50) * interval '1 minute'} });
    # created_at twice each: the id decides.
    my @order = split /\n/, value($node, "SELECT event_id FROM $table ORDER BY created_at, id");
    my $seen = () = arrived();
    route('oldest', $table, concurrency => 1, ordering => 'none', max_claim_rows => 30);
    wait_empty($node, $table);
    is_deeply([ (arrived())[ $seen .. $seen + 99 ] ], \@order, '100 rows by created_at, id');
    isnt(join(' ', @order), join(' ', @ids), '(which is not the order of insertion)');
};

# CLM-08, CLM-16
subtest 'rows locked by others are passed over and taken later' => sub {
    my $table = table('locked');
    my @ids = insert_rows($node, $table, 'locked', 10);
    my $some = "SELECT 1 FROM $table WHERE event_id IN ('" . join("', '", @ids[ 0 .. 4 ]) . "') FOR UPDATE";
    my $session = hold_session($node, "BEGIN; $some");
    route('locked', $table);
    wait_for_event($_) for @ids[ 5 .. 9 ];
    my $lane = wait_passes($node, 'locked', 2);
    is_deeply([ @$lane{qw(claimed published failed_passes)} ], [ 5, 5, 0 ], 'five without an error or a wait');
    $session->query_safe('COMMIT');
    $session->quit;
    wait_for_event($_) for @ids[ 0 .. 4 ];
    wait_empty($node, $table, all => 1);
    pass('the others once they are free');
};

# CLM-09: "two workers" on one lane are a worker and another relay of the same rows
subtest 'beside another relay no row is taken twice' => sub {
    my $table = table('beside');
    $node->safe_psql('postgres', 'CREATE TABLE app.taken (event_id uuid)');
    my @ids = insert_rows($node, $table, 'beside', 3000);
    my $other = <<"SQL";
WITH mine AS MATERIALIZED (SELECT id FROM $table WHERE outbox_route = 'beside' AND status = 'pending'
    ORDER BY created_at LIMIT 10 FOR UPDATE SKIP LOCKED),
gone AS (DELETE FROM $table AS o USING mine WHERE o.id = mine.id RETURNING o.event_id)
INSERT INTO app.taken SELECT event_id FROM gone;
SQL
    my $seen = () = arrived();
    route('beside', $table, max_claim_rows => 20);
    $node->pgbench('-n -c 2 -j 1 -t 60', 0, [qr{processed: 120/120}], [qr{^$}], 'the other relay',
        { 'other_relay' => $other });
    wait_empty($node, $table, all => 1, endpoint => $e);
    my @ours = splice @{ [ arrived() ] }, $seen;
    my @theirs = split /\n/, value($node, 'SELECT event_id FROM app.taken');
    cmp_ok(scalar(@ours), '>', 100, 'ours: ' . @ours);
    cmp_ok(scalar(@theirs), '>', 100, 'theirs: ' . @theirs);
    is_deeply([ sort @ours, @theirs ], [ sort @ids ], 'together each row once');
};

# CLM-11
subtest 'rows are pending to others until the commit' => sub {
    my $table = table('seen');
    insert_rows($node, $table, 'seen', 1);
    my $what = "SELECT status || ' ' || xmin || ' ' || ctid FROM $table";
    my $before = value($node, $what);
    create_route($node, 'seen', $table, $e->url('/hang'));
    $e->wait_for_inflight;
    is(value($node, $what), $before, 'while it is being sent');
    like($before, qr/^pending /, 'pending');
    is(value($node, "SELECT count(*) FROM (SELECT 1 FROM $table FOR UPDATE SKIP LOCKED) AS r"), 0, 'and locked');
    $e->release;
    wait_empty($node, $table, all => 1);
};

# CLM-14; spec.md section 8: an empty claim takes no XID
subtest 'an empty route costs a claim a tick and no transaction id' => sub {
    my $table = table('empty');
    route('empty', $table, interval => '50ms');
    $node->safe_psql('postgres', 'CREATE EXTENSION pg_stat_statements') if $have_statements;
    wait_passes($node, 'empty', 1);
    my $next = 'SELECT pg_snapshot_xmax(pg_current_snapshot())';
    my $xid = value($node, $next);
    my $calls = sub {
        my ($what) = @_;
        my $claim = "query LIKE '%FOR UPDATE SKIP LOCKED%' AND query LIKE '%app.empty%' AND query NOT LIKE 'UPDATE%'";
        my $where = $what eq 'claim' ? $claim : "query LIKE '%app.empty%' AND NOT ($claim)";
        return value($node, "SELECT coalesce(sum(calls), 0) FROM pg_stat_statements WHERE query NOT LIKE '%outbox_route =%calls%' AND $where");
    };
    my $costs = sub {
        my ($what) = @_;
        my ($before, $claims) = (lane($node, 'empty'), $have_statements && $calls->('claim'));
        my $after = wait_passes($node, 'empty', 10);
        is(value($node, $next), $xid, "$what: no transaction id in ten passes of any lane");
        is($after->{claimed}, 0, 'nothing claimed');
      SKIP:
        {
            skip 'pg_stat_statements is not installed', 1 if !$have_statements;
            my $made = $calls->('claim') - $claims;
            my $passes = lane($node, 'empty')->{passes} - $before->{passes};
            cmp_ok(abs($made - $passes), '<=', 2, "$made claims in $passes passes");
        }
        return;
    };
    $costs->('at the defaults');
    $node->safe_psql('postgres', "UPDATE outbox_route SET max_claim_rows = 1 WHERE name = 'empty'");
    wait_passes($node, 'empty', 2);
    $xid = value($node, $next);
    $costs->('of one row');
};

# SCH-02
subtest 'columns in any order, with others added and dropped' => sub {
    $node->safe_psql('postgres', <<'SQL');
CREATE TABLE app.shuffled (gone1 int, ordering_key varchar(200), attempts bigint NOT NULL DEFAULT 0,
    extra1 text NOT NULL DEFAULT 'x', payload jsonb NOT NULL, status varchar NOT NULL, gone2 text,
    available_at timestamptz, event_type text NOT NULL, tenant_id uuid, extra2 int NOT NULL DEFAULT 7,
    causation_id uuid, correlation_id uuid, execution_id uuid, created_at timestamptz NOT NULL, last_error text,
    event_id uuid NOT NULL, occurred_at timestamptz NOT NULL, outbox_route varchar(63) NOT NULL,
    processing_at timestamptz, published_at timestamptz, id uuid PRIMARY KEY,
    extra3 timestamptz NOT NULL DEFAULT now(), UNIQUE (outbox_route, event_id));
ALTER TABLE app.shuffled DROP COLUMN gone1;
ALTER TABLE app.shuffled DROP COLUMN gone2;
CREATE INDEX ON app.shuffled (outbox_route, status, available_at, created_at);
SQL
    create_route($node, 'shuffled', 'app.shuffled', $e->url);
    my $id = stage($node, 'shuffled', ordering_key => 'k', payload => { a => 1 });
    wait_for_event($id);
    my ($failing) = (stage($node, 'shuffled', event_type => "caf\x{c3}\x{a9}"));
    wait_for_event($failing);
    wait_empty($node, 'app.shuffled', all => 1);
    is($e->headers($e->by_event_id->{$id}[0])->{'ce-partitionkey'}, 'k', 'staged and sent');
};

# SCH-03
subtest 'rows from before the migration' => sub {
    my $table = table('old', drop => [qw(attempts available_at ordering_key)], indexes => 0);
    my $id = value($node, <<"SQL");
INSERT INTO $table (id, outbox_route, event_id, event_type, occurred_at, payload, status, created_at)
VALUES (gen_random_uuid(), 'old', gen_random_uuid(), 't', now(), '{}', 'pending', now()) RETURNING event_id
SQL
    $node->safe_psql('postgres', <<"SQL");
ALTER TABLE $table ADD COLUMN attempts int NOT NULL DEFAULT 0, ADD COLUMN available_at timestamptz,
    ADD COLUMN ordering_key text;
CREATE INDEX ON $table (outbox_route, status, available_at, created_at);
SQL
    route('old', $table);
    wait_for_event($id);
    wait_empty($node, $table, all => 1);
    pass('are claimed at once');
};

# SCH-04
subtest 'without processing_at and published_at' => sub {
    for my $name (qw(slim_off slim_default))
    {
        my $table = table($name, drop => [qw(processing_at published_at)]);
        route($name, $table, $name eq 'slim_off' ? (reclaim_stale_after => '0') : ());
        my ($id) = insert_rows($node, $table, $name, 1);
        wait_for_event($id);
        is(wait_lane($node, $name, 'published = 1')->{failed_passes}, 0, "$name: no pass failed");
    }
};

# SCH-07
subtest 'trace propagation needs its column' => sub {
    my $table = table('traced', trace => 1);
    my ($legacy) = insert_rows($node, $table, 'traced', 1);
    route('traced', $table, propagate_trace => 'true');
    wait_for_event($legacy);
    pass('NULL in it is fine');
    wait_empty($node, $table, all => 1);
    $node->safe_psql('postgres', "ALTER TABLE $table DROP COLUMN traceparent");
    my ($id) = insert_rows($node, $table, 'traced', 1);
    my $lane = wait_lane($node, 'traced', "failed_passes > 0 AND state = 'backoff'");
    like($lane->{last_error}, qr/traceparent/, 'without it: an error that names the column');
    ok(!(grep { $_ eq $id } arrived()), 'before anything is sent');
    my ($ret, $out, $err) = $node->psql('postgres', "SELECT outbox_stage('traced', 't', '{}')");
    like($err, qr/traceparent/, 'and for the stager') or diag $out;
    $node->safe_psql('postgres', "ALTER TABLE $table ADD COLUMN traceparent text");
    wait_for_event($id);
};

# SCH-10, SCH-11
subtest 'what a row costs in tuples' => sub {
    my $stats = sub {
        my ($table) = @_;
        return "SELECT n_tup_ins || ' ' || n_tup_upd || ' ' || n_tup_hot_upd || ' ' || n_tup_del"
          . " FROM pg_stat_user_tables WHERE relid = '$table'::regclass";
    };
    my $table = table('cost');
    route('cost', $table);
    insert_rows($node, $table, 'cost', 50);
    wait_empty($node, $table, all => 1);
    wait_sql($node, 'postgres', $stats->($table), expected => '50 0 0 50');
    pass('sent at the first attempt: one insert, one delete');
    my $again = table('cost_again');
    create_route($node, 'cost_again', $again, $e->url('/script/cost'), interval => '100ms',
        retry_base_delay => '50ms', concurrency => 1);
    $e->script('cost', '/status/500', '/status/500');
    insert_rows($node, $again, 'cost_again', 1);
    wait_empty($node, $again, all => 1);
    wait_sql($node, 'postgres', $stats->($again), expected => '1 2 0 1');
    pass('a retry is one update under the claim index');
};

# SCH-18
subtest 'names that need quotes' => sub {
    my $table = q{"Ünï"."we""ird"};
    make_outbox($node, 'postgres', $table);
    route('select', $table, ordering => 'none');
    my @ids = (insert_rows($node, $table, 'select', 2), stage($node, 'select'));
    wait_for_event($_) for @ids;
    wait_empty($node, $table, all => 1);
    my $keyword = q{app."select"};
    make_outbox($node, 'postgres', $keyword);
    route('naïve "route"', $keyword);
    wait_for_event(stage($node, 'naïve "route"'));
    is(value($node, q{SELECT count(*) FROM app."select"}), 0, 'a keyword as a table, spaces and quotes in a route');
};

done_testing();
