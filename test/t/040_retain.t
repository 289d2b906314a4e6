# Retain storage: rows are claimed by a commit, published outside of any transaction, and marked.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;
use OutboxRelay::Oracle;

my $node = new_node('retain');
my $e = OutboxRelay::Endpoint->start;

# A route on retain storage with a table of its own; the worker polls it often.
sub table_and_route
{
    my ($name, %columns) = @_;
    my %table = map { $_ => delete $columns{$_} } grep { exists $columns{$_} } qw(drop hlc trace);
    my $url = delete $columns{url} // $e->url;
    make_outbox($node, 'postgres', "app.$name", %table);
    create_route($node, $name, "app.$name", $url, storage => 'retain', interval => '100ms', %columns);
    return "app.$name";
}

sub statuses { return value($node, "SELECT string_agg(status || ' ' || n, ', ' ORDER BY status) FROM (SELECT status, count(*) AS n FROM $_[0] GROUP BY 1) s"); }

# RET-01, FLR-05 (retain half), last_error cleared
subtest 'published rows stay, marked' => sub {
    my $table = table_and_route('kept', retry_base_delay => '10ms');
    my $oracle = OutboxRelay::Oracle->new(node => $node, relation => $table, endpoint => $e);
    stage_many($node, 'kept', 100, keys => 10, truth => $oracle->truth_table);
    wait_empty($node, $table, route => 'kept', endpoint => $e);
    is(statuses($table), 'published 100', 'none is deleted');
    is(value($node, "SELECT bool_and(published_at BETWEEN created_at AND now() AND attempts = 0) FROM $table"), 't', 'published_at');
    $oracle->check_duplicates_at_most(0);
    $oracle->check_key_order;
    $e->reset;
    $e->script('twice', { status => 500 }, { status => 500 });
    my $failing = table_and_route('retried', url => $e->url('/script/twice'), retry_base_delay => '10ms');
    stage($node, 'retried');
    wait_sql($node, 'postgres', "SELECT status = 'published' FROM $failing", diag => sub { $e->summary });
    is(value($node, "SELECT attempts || ' ' || (last_error IS NULL) FROM $failing"), '2 true', 'two attempts counted, last_error cleared');
};

# FLR-12, FLR-13 as spec.md has it
subtest 'each row keeps its own error, and waits by its own attempts' => sub {
    $e->reset;
    my $table = table_and_route('own_errors', url => $e->url('/status/{event_type}'), retry_base_delay => '100s', interval => '1h', enabled => 0);
    insert_rows($node, $table, 'own_errors', 1, type => '500');
    insert_rows($node, $table, 'own_errors', 1, type => '502');
    insert_rows($node, $table, 'own_errors', 1, type => '504', columns => { attempts => 1, available_at => \q{now()} });
    value($node, "UPDATE outbox_route SET enabled = true WHERE name = 'own_errors'");
    wait_lane($node, 'own_errors', 'retried = 3');
    is(value($node, "SELECT bool_and(last_error LIKE 'HTTP ' || event_type || '%') FROM $table"), 't', 'its error');
    is(value($node, "SELECT string_agg(event_type || ' ' || attempts || ' ' || (available_at - now() > '100 s'), ', ' ORDER BY event_type) FROM $table"),
        '500 1 false, 502 1 false, 504 2 true', 'its wait');
};

# CLM-10
subtest 'rows show processing to others before the first send, and no transaction is open meanwhile' => sub {
    $e->reset;
    my $table = table_and_route('seen', url => $e->url('/hang'), pass_deadline => '20s');
    stage_many($node, 'seen', 3);
    $e->wait_for_count(3, of => 'inflight');
    is(statuses($table), 'processing 3', 'processing');
    is(value($node, "SELECT bool_and(processing_at IS NOT NULL) FROM $table"), 't', 'processing_at');
    is(value($node, <<'SQL'), 0, 'the worker is in no transaction');
SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker'
    AND (xact_start IS NOT NULL OR backend_xid IS NOT NULL OR backend_xmin IS NOT NULL)
SQL
    $e->release;
    wait_empty($node, $table);
    is(statuses($table), 'published 3', 'published then');
};

# CLM-06, RET-06: in claim order, in chunks of 32
subtest 'order and chunks' => sub {
    $e->reset;
    my $table = table_and_route('chunks', concurrency => 1, enabled => 0);
    my @ids = stage_many($node, 'chunks', 100);
    value($node, <<"SQL");
CREATE TABLE app.marks (at xid8, n bigint);
CREATE FUNCTION app.note_mark() RETURNS trigger LANGUAGE plpgsql AS \$\$
BEGIN
    INSERT INTO app.marks SELECT pg_current_xact_id(), count(*) FROM new_rows WHERE status = 'published' HAVING count(*) > 0;
    RETURN NULL;
END \$\$;
CREATE TRIGGER note AFTER UPDATE ON $table REFERENCING NEW TABLE AS new_rows FOR EACH STATEMENT EXECUTE FUNCTION app.note_mark();
UPDATE outbox_route SET enabled = true WHERE name = 'chunks';
SQL
    wait_empty($node, $table, route => 'chunks', endpoint => $e);
    my @order = map { $_->{event_id} } sort { $a->{n} <=> $b->{n} } $e->deliveries;
    is_deeply(\@order, \@ids, 'sent in claim order, although UPDATE gives rows in no order');
    is(value($node, 'SELECT string_agg(n::text, $$ $$ ORDER BY at) FROM app.marks'), '32 32 32 4', 'marked in chunks of 32');
};

# RET-02 to RET-05, MIG-01's half
subtest 'stale rows are reclaimed once a tick, others are left' => sub {
    $e->reset;
    my $table = table_and_route('stale', enabled => 0, max_claim_rows => 2, reclaim_stale_after => '5min');
    insert_rows($node, $table, 'stale', 3, columns => { status => 'processing', processing_at => \q{now() - interval '1 hour'} });
    insert_rows($node, $table, 'stale', 1, columns => { status => 'processing', processing_at => \q{now() - interval '4 minutes'} });
    insert_rows($node, $table, 'stale', 1, columns => { status => 'processing' });
    insert_rows($node, $table, 'elsewhere', 1, columns => { status => 'processing', processing_at => \q{now() - interval '1 hour'} });
    value($node, "UPDATE outbox_route SET enabled = true WHERE name = 'stale'");
    wait_sql($node, 'postgres', "SELECT count(*) = 3 FROM $table WHERE status = 'published'");
    wait_passes($node, 'stale', 2);
    is(statuses($table), 'processing 3, published 3', 'the young, the one without a time and the other route\'s are left');
    is(lane($node, 'stale')->{reclaimed}, 3, 'counted');
    value($node, "UPDATE outbox_route SET reclaim_stale_after = '0' WHERE name = 'stale'");
    insert_rows($node, $table, 'stale', 1, columns => { status => 'processing', processing_at => \q{now() - interval '1 hour'} });
    wait_passes($node, 'stale', 3);
    is(statuses($table), 'processing 4, published 3', 'off: stale rows stay');
};

# RET-05: by the trigger's own account of which statements there were
subtest 'reclaim runs with the first pass of a tick' => sub {
    $e->reset;
    my $table = table_and_route('once', interval => '1h', max_claim_rows => 2);
    value($node, <<"SQL");
CREATE TABLE app.statements (what text);
CREATE FUNCTION app.note_statement() RETURNS trigger LANGUAGE plpgsql AS \$\$
BEGIN
    PERFORM pg_stat_clear_snapshot();
    INSERT INTO app.statements SELECT query FROM pg_stat_activity WHERE pid = pg_backend_pid();
    RETURN NULL;
END \$\$;
CREATE TRIGGER note BEFORE UPDATE ON $table FOR EACH STATEMENT EXECUTE FUNCTION app.note_statement();
SQL
    # A tick ends where a route has changed: this one is to have nothing to learn.
    my $passes = wait_lane($node, 'once', q{passes > 0 AND state = 'idle'})->{passes};
    insert_rows($node, $table, 'once', 1, columns => { status => 'processing', processing_at => \q{now() - interval '1 hour'} });
    insert_rows($node, $table, 'once', 5);
    value($node, 'TRUNCATE app.statements');
    stage($node, 'once');
    wait_lane($node, 'once', "passes = $passes + 4 AND published = 7");
    is(value($node, "SELECT count(*) FROM app.statements WHERE what = 'outbox_relay: claim'"), 4, 'four passes claimed');
    is(value($node, "SELECT count(*) FROM app.statements WHERE what = 'outbox_relay: reclaim'"), 1, 'one of them reclaimed');
};

# RET-02: as the next claim finds it
subtest 'a reclaimed row has no processing_at' => sub {
    $e->reset;
    my $table = table_and_route('cleared', enabled => 0, max_claim_rows => 1, url => $e->url('/hang'), pass_deadline => '20s');
    insert_rows($node, $table, 'cleared', 2, columns => { status => 'processing', processing_at => \q{now() - interval '1 hour'} });
    value($node, "UPDATE outbox_route SET enabled = true WHERE name = 'cleared'");
    $e->wait_for_count(1, of => 'inflight');
    is(value($node, "SELECT string_agg(status || ' ' || (processing_at IS NULL), ', ' ORDER BY status) FROM $table"), 'pending true, processing false', 'the one that waits for its turn');
    $e->release(1);
    wait_empty($node, $table);
};

# RET-07, RET-08, LOOP-04's other reading: the lane backs off
subtest 'a mark that fails' => sub {
    $e->reset;
    my $table = table_and_route('unmarked', interval => '1h');
    value($node, "ALTER TABLE $table ADD CONSTRAINT no_published CHECK (status <> 'published')");
    stage_many($node, 'unmarked', 3);
    my $lane = wait_lane($node, 'unmarked', 'failed_passes > 0');
    is(statuses($table), 'processing 3', 'its rows stay processing');
    like($lane->{last_error}, qr/no_published/, 'the error is shown');
    value($node, "ALTER TABLE $table DROP CONSTRAINT no_published");

    my $failing = table_and_route('unmarked_retry', interval => '1h', url => $e->url('/status/500'));
    value($node, "CREATE FUNCTION app.no_retry() RETURNS trigger LANGUAGE plpgsql AS \$\$ BEGIN IF NEW.attempts > 0 THEN RAISE EXCEPTION 'no retry'; END IF; RETURN NEW; END \$\$;
        CREATE TRIGGER no_retry BEFORE UPDATE ON $failing FOR EACH ROW EXECUTE FUNCTION app.no_retry()");
    stage($node, 'unmarked_retry');
    wait_lane($node, 'unmarked_retry', 'failed_passes > 0');
    is(statuses($failing), 'processing 1', 'a failing reschedule likewise');
};

subtest 'a trigger that swallows marks fails the pass' => sub {
    $e->reset;
    my $table = table_and_route('swallowed', interval => '1h', concurrency => 1);
    value($node, "CREATE FUNCTION app.swallow() RETURNS trigger LANGUAGE plpgsql AS \$\$ BEGIN RETURN CASE WHEN NEW.status = 'published' THEN NULL ELSE NEW END; END \$\$;
        CREATE TRIGGER swallow BEFORE UPDATE ON $table FOR EACH ROW EXECUTE FUNCTION app.swallow()");
    stage_many($node, 'swallowed', 40);
    # The tick goes on behind the first, with one row, unless the worker just then has to read the routes anew.
    my $lane = wait_lane($node, 'swallowed', "failed_passes >= 1 AND state = 'backoff'");
    my $sent = 31 + $lane->{failed_passes};
    like($lane->{last_error}, qr/only 0 of \d+ rows? of app.swallowed were updated/, 'and says so');
    # What nothing was sent of goes back at once.
    is(statuses($table), 'pending ' . (40 - $sent) . ", processing $sent", 'the rows that were not reached go back');
    is($e->count->{received}, $sent, 'nothing was sent twice');
};

# RET-10
subtest 'a late pass does not overwrite what others made of its rows' => sub {
    $e->reset;
    my $table = table_and_route('late', url => $e->url('/hang'), pass_deadline => '30s');
    my @ids = stage_many($node, 'late', 4);
    $e->wait_for_count(4, of => 'inflight');
    # Somebody else reclaims three and takes one of them anew, publishes another, parks the third.
    value($node, "UPDATE $table SET status = 'pending', processing_at = NULL WHERE event_id IN ('$ids[0]', '$ids[1]', '$ids[2]');
        UPDATE $table SET status = 'processing', processing_at = now() WHERE event_id = '$ids[0]';
        UPDATE $table SET status = 'published', published_at = '2026-01-01' WHERE event_id = '$ids[1]';
        UPDATE $table SET status = 'failed', last_error = 'theirs' WHERE event_id = '$ids[2]'");
    $e->release;
    wait_lane($node, 'late', 'passes > 0 AND in_flight = 0 AND published = 4');
    is(value($node, "SELECT string_agg(status, ' ' ORDER BY id) FROM $table"), 'processing published failed published', 'their states stay');
    is(value($node, "SELECT published_at = '2026-01-01' FROM $table WHERE event_id = '$ids[1]'"), 't', 'and their times');
    is(lane($node, 'late')->{failed_passes}, 0, 'it is no error');
};

# RET-10 for each kind of mark, and where the mark itself has to wait for what the other does
my %marks = (
    # kind      the endpoint's answer    columns of the route               what the row that is still ours becomes
    published => [ '/hang',              {},                                'published 0' ],
    retried   => [ '/hang?status=500',   { retry_base_delay => '1h', retry_max_backoff => '1h' }, 'pending 1' ],
    failed    => [ '/hang?status=422',   { fail_statuses => [422] },        'failed 0' ]);
for my $kind (sort keys %marks)
{
    my ($target, $columns, $ours) = @{ $marks{$kind} };
    for my $when ('before the mark', 'while the mark waits')
    {
        subtest "rows that others have changed $when: $kind" => sub {
            $e->reset;
            my $name = "others_$kind" . ($when =~ /waits/ ? '_wait' : '');
            my $table = table_and_route($name, url => $e->url($target), pass_deadline => '30s', pass_statement_timeout => '10s', %$columns);
            my @ids = stage_many($node, $name, 5);
            $e->wait_for_count(5, of => 'inflight');
            my $session = hold_session($node, "BEGIN;
                UPDATE $table SET status = 'pending', processing_at = NULL, available_at = 'infinity' WHERE event_id = '$ids[0]';
                UPDATE $table SET processing_at = now() + interval '1 min' WHERE event_id = '$ids[1]';
                UPDATE $table SET status = 'published', published_at = '2026-01-01' WHERE event_id = '$ids[2]';
                UPDATE $table SET status = 'failed', last_error = 'theirs' WHERE event_id = '$ids[3]'");
            $session->query_safe('COMMIT') if $when !~ /waits/;
            $e->release(1);
            if ($when =~ /waits/)
            {
                wait_sql($node, 'postgres', "SELECT count(*) = 1 FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker' AND wait_event_type = 'Lock'");
                $session->query_safe('COMMIT');
            }
            $session->quit;
            wait_sql($node, 'postgres', "SELECT status <> 'processing' FROM $table WHERE event_id = '$ids[4]'");
            is(value($node, "SELECT string_agg(status || ' ' || attempts, ', ' ORDER BY id) FROM $table"),
                "pending 0, processing 0, published 0, failed 0, $ours", 'only what is still ours is marked');
            is(value($node, "SELECT count(*) FROM $table WHERE published_at = '2026-01-01' OR last_error = 'theirs' OR processing_at > now()"), 3, 'times and errors of the others stay');
            wait_lane($node, $name, 'in_flight = 0 AND state <> $$running$$');
            is(lane($node, $name)->{failed_passes}, 0, 'it is no error');
            value($node, "UPDATE outbox_route SET enabled = false WHERE name = '$name'");
        };
    }
}

# Rows not reached, refusals: back as they were
subtest 'rows that are not reached go back as they were' => sub {
    $e->reset;
    my $table = table_and_route('unreached', url => $e->url('/slow?ms=300'), concurrency => 1, pass_deadline => '1s', enabled => 0, interval => '1h');
    insert_rows($node, $table, 'unreached', 20, columns => { attempts => 3, last_error => 'earlier', available_at => \q{now() - interval '1 s'} });
    my $before = value($node, "SELECT string_agg(to_jsonb(o)::text, E'\\n' ORDER BY id) FROM $table o WHERE event_id IN (SELECT event_id FROM $table ORDER BY created_at DESC LIMIT 10)");
    value($node, "UPDATE outbox_route SET enabled = true WHERE name = 'unreached'");
    my $lane = wait_lane($node, 'unreached', 'passes = 1');
    cmp_ok($lane->{published}, '>=', 1, 'some are published');
    is(value($node, "SELECT string_agg(to_jsonb(o)::text, E'\\n' ORDER BY id) FROM $table o WHERE event_id IN (SELECT event_id FROM $table ORDER BY created_at DESC LIMIT 10)"), $before, 'the last ten are as they were');
    # One of them is tried again soon.
    value($node, "UPDATE outbox_route SET enabled = false WHERE name = 'unreached'");
    wait_sql($node, 'postgres', "SELECT count(*) = 0 FROM outbox_stat_worker WHERE route = 'unreached'");

    my $refused = table_and_route('refused', url => 'http://127.0.0.1:1/', interval => '1h');
    stage_many($node, 'refused', 5);
    wait_lane($node, 'refused', 'refused > 0 OR failed_passes > 0');
    is(value($node, "SELECT count(*) FROM $refused WHERE status = 'pending' AND attempts = 0 AND processing_at IS NULL AND last_error IS NULL"), 5, 'refused rows too');
};

# Payloads stored in the row and out of line
subtest 'large payloads' => sub {
    $e->reset;
    my $table = table_and_route('large', max_payload_bytes => 200_000);
    value($node, "ALTER TABLE $table ALTER payload SET STORAGE EXTERNAL");
    my %size = (small => 10, large => 100_000, huge => 300_000);
    stage_sized($_, $size{$_}) for sort keys %size;
    wait_empty($node, $table, endpoint => $e);
    my %body = map { my $r = $_; $e->headers($r)->{'ce-type'} => length $r->{body} } $e->requests;
    is($body{small}, 10 + 9, 'a small one');
    is($body{large}, 100_000 + 9, 'one that is stored out of line');
    is(value($node, "SELECT status || ' ' || attempts || ' ' || (last_error LIKE 'payload of%') FROM $table WHERE event_type = 'huge'"), 'failed 0 true', 'one that is too large fails');
};

sub stage_sized
{
    my ($type, $bytes) = @_;
    value($node, "INSERT INTO app.large (id, outbox_route, event_id, event_type, occurred_at, payload, status, created_at)
        SELECT gen_random_uuid(), 'large', gen_random_uuid(), '$type', now(), jsonb_build_object('p', repeat('x', $bytes)), 'pending', clock_timestamp()");
}

# SCH-05
subtest 'the columns that retain needs' => sub {
    $e->reset;
    for my $column (qw(processing_at published_at))
    {
        my $table = table_and_route("without_$column", enabled => 0);
        value($node, "ALTER TABLE $table DROP COLUMN $column; UPDATE outbox_route SET enabled = true WHERE name = 'without_$column'");
        stage($node, "without_$column");
        like(wait_lane($node, "without_$column", 'failed_passes > 0')->{last_error}, qr/has no column "$column"/, "$column is missed");
    }
    is($e->count->{received}, 0, 'nothing was sent');
};

subtest 'STG-11: an id stays deduplicated when its row is published' => sub {
    my $table = table_and_route('again');
    my $id = stage($node, 'again');
    wait_empty($node, $table);
    is(stage($node, 'again', event_id => $id), '', 'staged again: there already');
};

subtest 'hlc order and keys hold as in consume' => sub {
    $e->reset;
    my $table = table_and_route('ordered', hlc => 1, hlc_ordering => 1, enabled => 0, concurrency => 1);
    insert_rows($node, $table, 'ordered', 1, type => "r$_", columns => { hlc => 10 - $_ }) for 1 .. 5;
    value($node, "UPDATE outbox_route SET enabled = true WHERE name = 'ordered'");
    wait_empty($node, $table);
    is_deeply([ map { $e->headers($_)->{'ce-type'} } sort { $a->{n} <=> $b->{n} } $e->requests ], [qw(r5 r4 r3 r2 r1)], 'by stamp');
};

# CLM-14's half: an empty claim takes no transaction id
subtest 'an empty claim' => sub {
    my $table = table_and_route('idle', interval => '50ms');
    value($node, "UPDATE outbox_route SET enabled = (name = 'idle')");
    wait_passes($node, 'idle', 1);
    my $xid = value($node, 'SELECT txid_snapshot_xmax(txid_current_snapshot())');
    wait_passes($node, 'idle', 5);
    is(value($node, 'SELECT txid_snapshot_xmax(txid_current_snapshot())'), $xid, 'takes no transaction id');
};

done_testing();
