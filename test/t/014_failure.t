# What becomes of a row that could not be sent: attempts, retries, parking, requeue, last_error; in any
# encoding.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $node = new_node('failure', conf => "autovacuum = off\n");
my $e = OutboxRelay::Endpoint->start(tls => 1);

# Fresh table app.NAME with a route of that name, polled often.
sub table_and_route
{
    my ($name, %columns) = @_;
    my $db = $columns{db} // 'postgres';
    make_outbox($node, $db, "app.$name");
    create_route($node, $name, "app.$name", delete $columns{url} // $e->url,
        interval => '100ms', retry_base_delay => '50ms', max_attempts => 3, %columns);
    return "app.$name";
}

# Values of the row of an event, as psql prints them; undef when it is gone.
sub row
{
    my ($table, $id, $columns, $db) = @_;
    my $row = value($node, "SELECT $columns FROM $table WHERE event_id = '$id'", $db);
    return $row eq '' ? undef : $row;
}

# Answers this event with a step of the endpoint, N times (for ever).
my @rules;

sub answer
{
    my ($id, $step, $times) = @_;
    push @rules, { header => 'Idempotency-Key', value => $id, step => $step, $times ? (times => $times) : () };
    $e->rules(@rules);
    return;
}

sub answered_at
{
    my ($id) = @_;
    return map { $_->{answer_at} } sort { $a->{n} <=> $b->{n} } grep { $_->{event_id} eq $id } $e->deliveries;
}

sub new_id { return value($node, 'SELECT gen_random_uuid()'); }

# FLR-01, FLR-02, FLR-03, FLR-21
subtest 'rescheduled with backoff, then parked' => sub {
    my $table = table_and_route('retry', retry_base_delay => '20s');
    my $id = new_id();
    answer($id, '/status/500?body=out%20of%20order');
    insert_rows($node, $table, 'retry', 1, columns => { event_id => $id });
    for my $attempt (1, 2)
    {
        wait_sql($node, 'postgres', "SELECT attempts = $attempt FROM $table");
        my ($status, $available_at, $error) = split /\|/, row($table, $id,
            'status, extract(epoch FROM available_at), last_error');
        my $wait = $available_at - (answered_at($id))[-1];
        my $raw = 20 * 2**($attempt - 1);
        cmp_ok($wait, '>=', $raw / 2, "attempt $attempt: at least half of $raw s");
        cmp_ok($wait, '<=', $raw + 2, 'at most all of it');
        is("$status $error", 'pending HTTP 500: out of order', 'pending, with its error');
        my $version = row($table, $id, 'xmin');
        wait_passes($node, 'retry', 3);
        is(scalar(answered_at($id)), $attempt, 'not sent before its time');
        is(row($table, $id, 'xmin'), $version, 'and not touched');
        $node->safe_psql('postgres', "UPDATE $table SET available_at = now()");
    }
    wait_sql($node, 'postgres', "SELECT status = 'failed' FROM $table");
    is(row($table, $id, 'attempts, last_error'), '2|HTTP 500: out of order', 'max_attempts 3: failed after two reschedules');
    my $lane = wait_passes($node, 'retry', 10);
    is(scalar(answered_at($id)), 3, 'three requests, and no more in ten passes');
    is_deeply([ @$lane{qw(claimed published failed retried refused)} ], [ 3, 0, 1, 2, 0 ], 'counted so');
};

# FLR-04, FLR-20
subtest 'the ends of the count' => sub {
    my $once = table_and_route('once', url => $e->url('/status/500'), max_attempts => 1);
    insert_rows($node, $once, 'once', 1);
    wait_empty($node, $once);
    is(value($node, "SELECT status, attempts FROM $once"), 'failed|0', 'max_attempts 1: parked at the first');
    my $endless = table_and_route('endless', url => $e->url('/status/500'), max_attempts => 0, retry_base_delay => '1min',
        retry_max_backoff => '2min');
    insert_rows($node, $endless, 'endless', 1, columns => { attempts => 2147483647 });
    wait_sql($node, 'postgres', "SELECT last_error IS NOT NULL FROM $endless");
    is(value($node, "SELECT status, attempts, available_at BETWEEN now() + interval '50 s' AND now() + interval '121 s' FROM $endless"),
        'pending|2147483647|t', 'no end: the largest number stays, the wait is the cap');
    my $largest = table_and_route('largest', url => $e->url('/status/500'));
    insert_rows($node, $largest, 'largest', 1, columns => { attempts => 2147483647 });
    wait_empty($node, $largest);
    is(value($node, "SELECT status, attempts FROM $largest"), 'failed|2147483647', 'with an end it is parked');
};

# FLR-05
subtest 'fails twice, then succeeds' => sub {
    my $table = table_and_route('third');
    my @ids = map { new_id() } 1 .. 3;
    answer($_, '/status/503', 2) for @ids;
    insert_rows($node, $table, 'third', 1, columns => { event_id => $_ }) for @ids;
    wait_empty($node, $table, all => 1);
    my $lane = wait_lane($node, 'third', 'published = 3');
    is_deeply([ @$lane{qw(retried failed)} ], [ 6, 0 ], 'six reschedules');
    is_deeply([ map { scalar(answered_at($_)) } @ids ], [ 3, 3, 3 ], 'three requests each');
};

# FLR-08, FLR-09
subtest "one row's failure is its own" => sub {
    my $table = table_and_route('one', retry_base_delay => '1min', concurrency => 4);
    my @ids = map { new_id() } 1 .. 35;
    answer($ids[9], '/status/500');
    my $list = sql_literal(\@ids);
    insert_rows($node, $table, 'one', 35, columns => { event_id => \"(${list}::uuid[])[g]" });
    wait_lane($node, 'one', 'claimed = 35');
    is(value($node, "SELECT event_id, status, attempts FROM $table"), "$ids[9]|pending|1", '34 are done, one waits');
    is(scalar(grep { my @at = answered_at($_); @at == 1 } @ids), 35, 'each was sent once');
};

# FLR-06, FLR-14, FLR-18
subtest 'what can never be sent is parked with its reason; its neighbours go out' => sub {
    my $table = table_and_route('poison', max_payload_bytes => 2000, enabled => 'false');
    my %poison = (
        'payload of \d+ bytes is larger than max_payload_bytes \(2000\)' =>
          { payload => \q{jsonb_build_object('a', repeat('x', 100000))} },
        'occurred_at is infinite' => { occurred_at => 'infinity' },
        'occurred_at is outside' => { occurred_at => '4000-01-01 BC' },
        'event_type is longer than 8192 bytes' => { event_type => \q{repeat('x', 9000)} },
        'event_type is empty' => { event_type => '' },
        'forze_key would be longer|ce-partitionkey would be longer' => { ordering_key => \q{repeat(' ', 3000)} });
    my (%expected, @good);
    push @good, insert_rows($node, $table, 'poison', 1);
    for my $reason (sort keys %poison)
    {
        my ($id) = insert_rows($node, $table, 'poison', 1, columns => { attempts => 1, %{ $poison{$reason} } });
        $expected{$id} = $reason;
        push @good, insert_rows($node, $table, 'poison', 1);
    }
    $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = 'poison'");
    wait_empty($node, $table);
    like(row($table, $_, 'status, attempts, last_error'), qr/^failed\|1\|.*(?:$expected{$_})/, $expected{$_})
      for sort keys %expected;
    is(scalar(grep { answered_at($_) } keys %expected), 0, 'none of them was sent');
    is(scalar(grep { answered_at($_) } @good), scalar @good, 'all the others were');
    my $lane = wait_lane($node, 'poison', 'claimed = 13');
    is_deeply([ @$lane{qw(published failed retried refused failed_passes)} ], [ 7, 6, 0, 0, 0 ], 'counted so');
};

# FLR-15, FLR-16, FLR-17
subtest 'requeue' => sub {
    my $table = table_and_route('requeue', max_attempts => 1, fail_statuses => [400], interval => '1d');
    my @ids = map { new_id() } 1 .. 4;
    answer($_, '/status/400', 1) for @ids;
    insert_rows($node, $table, 'requeue', 1, columns => { event_id => $_ }) for @ids;
    my ($waiting) = insert_rows($node, $table, 'requeue', 1, columns => { available_at => 'infinity' });
    stage($node, 'requeue');
    wait_sql($node, 'postgres', "SELECT count(*) = 4 FROM $table WHERE status = 'failed'");
    is(value($node, "SELECT outbox_requeue_failed('requeue', '{}')"), 0, 'an empty list: none');
    my $list = sql_literal([ $ids[1], $ids[1], $waiting, new_id() ]);
    is(value($node, "SELECT outbox_requeue_failed('requeue', $list)"), 1, 'of the list the failed one');
    $e->wait_until(sub { answered_at($ids[1]) == 2 }, what => 'the requeued one');
    is(value($node, "SELECT outbox_requeue_failed('requeue')"), 3, 'all that are left');
    $e->wait_until(sub { 8 == map { answered_at($_) } @ids }, what => 'the others');
    wait_sql($node, 'postgres', "SELECT string_agg(event_id::text, ',') FROM $table", expected => $waiting);
    pass('delivered at once, though the lane is polled once a day');
};

subtest 'fail_statuses park at once' => sub {
    my $table = table_and_route('fatal', fail_statuses => [ 400, 404 ], retry_base_delay => '1min');
    my %ids = map { $_ => new_id() } 400, 403, 404;
    answer($ids{$_}, "/status/$_") for keys %ids;
    insert_rows($node, $table, 'fatal', 1, columns => { event_id => $ids{$_} }) for sort keys %ids;
    wait_lane($node, 'fatal', 'failed = 2 AND retried = 1');
    is(row($table, $ids{$_}, 'status, attempts, last_error'), "failed|0|HTTP $_", "status $_") for 400, 404;
    is(row($table, $ids{403}, 'status, attempts, last_error'), 'pending|1|HTTP 403', '403 is not in the list');
};

subtest 'last_error is clean and bounded' => sub {
    my $table = table_and_route('dirty', url => $e->url('/dirty-body'), max_attempts => 1);
    my $big = table_and_route('big', url => $e->url('/big-body'), max_attempts => 1);
    insert_rows($node, $table, 'dirty', 1);
    insert_rows($node, $big, 'big', 1);
    wait_empty($node, $_) for $table, $big;
    is(value($node, "SELECT last_error ~ '^HTTP 500: .' AND last_error !~ '[\\x01-\\x1f\\x7f-\\x9f]' FROM $table"), 't',
        'no control characters');
    is(value($node, "SELECT last_error ~ '^HTTP 500: .*[.]{3}\$' AND octet_length(last_error) <= 500 FROM $big"), 't',
        'bounded');
    my $log = log_since($node, 0);
    like($log, qr/route "big": HTTP 500\n/, 'the log says what happened');
    unlike($log, qr/out of order|xxxx/, 'and nothing of what the endpoint said: it may have been our payload');
};

# B-14, the classes that count as an attempt
subtest 'every class of failed attempt counts' => sub {
    make_outbox($node, 'postgres', 'app.classes');
    my %classes = (
        c403 => [ '/status/403', 'HTTP 403' ],
        c500 => [ '/status/500', 'HTTP 500' ],
        redirect => [ '/redirect?to=/ok', 'HTTP 302' ],
        timeout => [ '/hang', 'timeout: ', request_timeout => '100ms', connect_timeout => '100ms' ],
        deadline => [ '/hang', 'deadline: ', pass_deadline => '150ms' ],
        drop => [ '/drop', 'connection lost: ' ],
        reset => [ '/rst', 'connection lost: ' ],
        malformed => [ '/garbage', 'malformed response: ' ],
        bad_header => [ '/nul-header', 'malformed response: ' ],
        long_head => [ '/endless-headers', 'malformed response: ' ],
        early => [ '/early?status=200&then=close', 'HTTP 200 before the body was sent|connection lost: ' ]);
    insert_rows($node, 'app.classes', $_, 1,
        columns => { payload => \('jsonb_build_object(\'a\', repeat(\'x\', ' . ($_ eq 'early' ? 4_000_000 : 10) . '))') })
      for sort keys %classes;
    $e->reset;
    for my $name (sort keys %classes)
    {
        my ($path, undef, %columns) = @{ $classes{$name} };
        my $mark = $path =~ /\?/ ? "&$name" : "?$name";
        create_route($node, $name, 'app.classes', $e->url($path . $mark),
            interval => '100ms', max_attempts => 3, retry_base_delay => '10ms', %columns);
    }
    wait_empty($node, 'app.classes');
    my %requests;
    $requests{$_}++ for map { $_->{target} =~ /(\w+)$/ ? $1 : '' } $e->requests, $e->inflight;
    for my $name (sort keys %classes)
    {
        my ($row) = value($node, "SELECT status, attempts, last_error FROM app.classes WHERE outbox_route = '$name'");
        like($row, qr/^failed\|2\|(?:$classes{$name}[1])/, "$name: failed after two reschedules");
        is($requests{$name}, 3, 'three requests');
    }
};

# B-14, the classes that cost no attempt
subtest 'what could not be sent, and an endpoint that asks to wait, cost no attempt' => sub {
    make_outbox($node, 'postgres', 'app.refused');
    my $gone = OutboxRelay::Endpoint->start;
    my $gone_url = $gone->url;
    $gone->stop;
    my %classes = (
        connect => [ $gone_url, 'connect: ' ],
        dns => [ 'http://nowhere.invalid/', 'resolve: ' ],
        untrusted => [ $e->url('/ok', 'tls_good'), 'tls: ' ],
        expired => [ $e->url('/ok', 'tls_expired'), 'tls: ', ca_file => $e->tls_file('ca.crt') ],
        limited => [ $e->url('/status/429?retry_after=30'), 'HTTP 429' ],
        over => [ $e->url('/status/410'), 'HTTP 410' ],
        later => [ $e->url('/status/503?retry_after=30'), 'HTTP 503' ]);
    insert_rows($node, 'app.refused', $_, 1) for sort keys %classes;
    my $versions = "SELECT outbox_route, xmin FROM app.refused WHERE outbox_route IN ('connect', 'dns', 'untrusted', 'expired')"
      . ' ORDER BY 1';
    my $before = value($node, $versions);
    for my $name (sort keys %classes)
    {
        my ($url, undef, %columns) = @{ $classes{$name} };
        create_route($node, $name, 'app.refused', $url, interval => '100ms', connect_timeout => '1s', max_attempts => 1, %columns);
    }
    for my $name (sort keys %classes)
    {
        my $lane = wait_lane($node, $name, "refused > 0 AND state = 'refused'");
        like($lane->{last_error}, qr/^$classes{$name}[1]/, "$name: the lane says why and waits");
        cmp_ok($lane->{backoff_until}, '>', $lane->{now} + 20, 'as long as asked') if $name =~ /limited|over|later/;
        cmp_ok($lane->{failed} + $lane->{retried}, '==', 0, 'nothing is counted against the row');
    }
    is(value($node, $versions), $before, 'what was not sent is as it was');
    is(value($node, "SELECT string_agg(status || attempts, ',') FROM app.refused"), join(',', ('pending0') x 7), 'no attempts');
    $node->safe_psql('postgres', 'UPDATE outbox_route SET url = ' . sql_literal($e->url('/ok', 'tls_good')) . ', ca_file = '
          . sql_literal($e->tls_file('ca.crt')) . " WHERE name = 'untrusted'");
    wait_empty($node, 'app.refused', route => 'untrusted');
    pass('trusted, it goes out over TLS');
};

subtest 'encodings' => sub {
    $node->safe_psql('postgres', "CREATE DATABASE $_ ENCODING '$_' LOCALE 'C' TEMPLATE template0; ALTER DATABASE $_ SET client_encoding = 'UTF8'")
      for qw(latin1 sql_ascii);
    for my $db (qw(latin1 sql_ascii))
    {
        $node->safe_psql($db, 'CREATE EXTENSION outbox_relay');
        my $table = table_and_route("caf\xc3\xa9", db => $db, max_attempts => 1);
        my ($id) = insert_rows($node, $table, "caf\xc3\xa9", 1, db => $db,
            columns => { event_type => "\xc3\xa9t\xc3\xa9", payload => qq({"a": "na\xc3\xafve"}) });
        my $failing = new_id();
        answer($failing, "/status/500?body=%E2%82%AC%20caf%C3%A9");
        my @bad = $db eq 'latin1' ? () : (
            insert_rows($node, $table, "caf\xc3\xa9", 1, db => $db, columns => { payload => \q{E'{"a": "\xe9"}'} }),
            insert_rows($node, $table, "caf\xc3\xa9", 1, db => $db, columns => { event_type => \q{E'\xe9'} }));
        insert_rows($node, $table, "caf\xc3\xa9", 1, db => $db, columns => { event_id => $failing });
        wait_empty($node, $table, db => $db);
        my ($request) = @{ $e->by_event_id->{$id} };
        is($request->{body}, qq({"a": "na\x{ef}ve"}), "$db: body in UTF-8");
        is($e->headers($request)->{'ce-type'}, '%C3%A9t%C3%A9', 'header');
        is($e->headers($request)->{'ce-source'}, "/$db/caf%C3%A9", 'route');
        like(row($table, $failing, 'status, last_error', $db), qr/^failed\|HTTP 500: .+ caf/, 'last_error fits the encoding');
        like(row($table, $_, 'status, attempts, last_error', $db), qr/^failed\|0\|.*UTF-8/, 'what is no text is parked') for @bad;
    }
};

done_testing();
