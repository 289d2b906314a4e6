# What arrives: method, headers, body, order; which value of a row becomes what.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use JSON::PP ();
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;
use OutboxRelay::Oracle;

my $node = new_node('publish', conf => "autovacuum = off\n");
my $e = OutboxRelay::Endpoint->start;
my $uuid = qr/[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}/;
my $trace = '00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01';

# Fresh table app.NAME with a route of that name, polled often.
sub table_and_route
{
    my ($name, %columns) = @_;
    my %table = (db => 'postgres', %{ delete $columns{table} || {} });
    my $db = delete $table{db};
    make_outbox($node, $db, "app.$name", %table);
    create_route($node, $name, "app.$name", delete $columns{url} // $e->url,
        interval => '100ms', retry_base_delay => '50ms', db => $db, %columns);
    return "app.$name";
}

# The finished requests of an event, once there are `count` (1).
sub requests_of
{
    my ($id, $count) = @_;
    my $found;
    $e->wait_until(sub { $found = $e->by_event_id->{$id}; $found && @$found >= ($count // 1) },
        what => 'requests of ' . $id);
    return @$found;
}

# The header lines of an event's only request as a list of NAME: VALUE, sorted; without those of the transport.
sub envelope_of
{
    my ($id) = @_;
    my ($request) = requests_of($id);
    return [ sort grep { !/^(?:Host|Content-Length):/ } @{ $request->{headers} } ];
}

# The envelope of an event that has nothing but its id, type and time.
sub bare_envelope
{
    my ($id, $type, $at, %opts) = @_;
    my $key = $opts{key} // $id;
    my @common = ('Content-Type: application/json', "Idempotency-Key: $id", 'User-Agent: outbox_relay/1.0');
    my @cloudevents = (
        'ce-specversion: 1.0', "ce-id: $id", "ce-type: $type", "ce-source: $opts{source}", "ce-time: ${at}Z",
        "ce-partitionkey: $key");
    my @forze = ("forze_event_id: $id", "forze_event_type: $type", "forze_key: $key", "forze_occurred_at: $at+00:00");
    my %family = (cloudevents => \@cloudevents, forze => \@forze);
    return [ sort @common, map { @{ $family{$_} } } @{ $opts{families} || [qw(cloudevents forze)] } ];
}

# PUB-01, PUB-02, PUB-03, PUB-06, PUB-07
subtest 'a bare event: one POST, the documented headers and no others' => sub {
    table_and_route('bare');
    my $id = stage($node, 'bare', event_type => 'order.paid', occurred_at => '2026-02-03 04:05:06.5+00',
        payload => { a => [ 1, undef ] });
    my @requests = requests_of($id);
    is(scalar(@requests), 1, 'one request');
    is_deeply([ @{ $requests[0] }{qw(method target version body)} ], [ 'POST', '/ok', 'HTTP/1.1', '{"a": [1, null]}' ],
        'method, target, body');
    is_deeply(envelope_of($id),
        bare_envelope($id, 'order.paid', '2026-02-03T04:05:06.500000', source => '/postgres/bare'), 'headers');
};

# PUB-05, PUB-06, PUB-08, PUB-11, CLM-15
subtest 'the context of the stager and a key travel along' => sub {
    table_and_route('full', propagate_trace => 'true', table => { trace => 1 });
    my $number = 0;
    my %ids = map { $_ => sprintf '00000000-0000-4000-8000-0000000000%02d', ++$number }
      qw(tenant_id execution_id correlation_id causation_id);
    my $set = join '', map { "SET LOCAL outbox_relay.$_ = '$ids{$_}'; " } sort keys %ids;
    my $id = $node->safe_psql('postgres', <<"SQL");
BEGIN; $set SET LOCAL outbox_relay.traceparent = '$trace';
SELECT outbox_stage('full', 't', '{}', ordering_key => 'k1', occurred_at => '2026-02-03 04:05:06Z');
COMMIT;
SQL
    my @more = ("traceparent: $trace");
    for my $name (keys %ids)
    {
        push @more, "forze_$name: $ids{$name}", 'ce-' . ($name =~ s/_//gr) . ": $ids{$name}";
    }
    my $bare = bare_envelope($id, 't', '2026-02-03T04:05:06.000000', source => '/postgres/full', key => 'k1');
    is_deeply(envelope_of($id), [ sort @$bare, @more ], 'every field, and nothing else');
};

# STG-21 at the receiving end
subtest 'payloads arrive as Postgres prints them, in UTF-8' => sub {
    my $table = table_and_route('payload');
    my $long = 'x' x 300_000;
    my @payloads = (
        '{"price": 19.99, "big": 1152921504606846977, "tiny": 1e-30, "nested": {"a": [{}, [], null, true]}}',
        '{"text": "naïve ключ 🐘 \u0001 \" \\\\ \n"}', '"a scalar"', '[1, 2]', 'null', qq{{"long": "$long"}});
    for my $payload (@payloads)
    {
        my $id = stage($node, 'payload', payload => $payload);
        my ($request) = requests_of($id);
        utf8::encode(my $body = $request->{body});
        is(value($node, 'SELECT ' . sql_literal($body) . '::jsonb = ' . sql_literal($payload) . '::jsonb'), 't',
            'equal: ' . substr $payload, 0, 30);
        is($body, value($node, 'SELECT ' . sql_literal($payload) . '::jsonb'), 'to the byte');
    }
};

# PUB-04
subtest 'times and numbers do not depend on the database' => sub {
    $node->safe_psql('postgres', 'CREATE DATABASE nepal');
    $node->safe_psql('postgres', "ALTER DATABASE nepal SET $_")
      for q(DateStyle = 'SQL, DMY'), q(TimeZone = 'Asia/Kathmandu'), q(IntervalStyle = 'sql_standard'),
      q(bytea_output = 'escape'), q(extra_float_digits = -15), q(client_encoding = 'LATIN1'),
      q(quote_all_identifiers = on), q(xmloption = 'document'), q(search_path = 'nowhere');
    $node->safe_psql('nepal', 'CREATE EXTENSION outbox_relay SCHEMA public');
    local $ENV{PGOPTIONS} = '-c search_path=public';
    table_and_route('local', table => { db => 'nepal' });
    my $id = stage($node, 'local', db => 'nepal', event_type => 't', occurred_at => '2026-02-03 04:05:06.789012+00',
        payload => '{"n": 0.1234567890123456789}');
    is_deeply(envelope_of($id), bare_envelope($id, 't', '2026-02-03T04:05:06.789012', source => '/nepal/local'), 'UTC');
    is((requests_of($id))[0]{body}, '{"n": 0.1234567890123456789}', 'numbers whole');
};

# PUB-10
subtest 'traceparent: exact, where the route propagates it and the row has a valid one' => sub {
    my $table = table_and_route('traced', propagate_trace => 'true', table => { trace => 1 });
    create_route($node, 'untraced', $table, $e->url, interval => '100ms');
    my ($valid) = insert_rows($node, $table, 'traced', 1, columns => { traceparent => $trace });
    my ($null) = insert_rows($node, $table, 'traced', 1);
    my ($invalid) = insert_rows($node, $table, 'traced', 1, columns => { traceparent => "00-xyz\r\nX-Evil: 1" });
    my ($off) = insert_rows($node, $table, 'untraced', 1, columns => { traceparent => $trace });
    my @lines = map { join ',', grep { /^(?:traceparent|x-evil)/i } @{ envelope_of($_) } } $valid, $null, $invalid, $off;
    is_deeply(\@lines, [ "traceparent: $trace", '', '', '' ], 'valid, NULL, invalid, switched off');
};

# PUB-12
subtest 'headers of the route: more, never others' => sub {
    table_and_route('extra', headers => { 'X-Api-Key' => 'abc %41', 'X-Empty' => '' });
    my %headers = map { split /: ?/, $_, 2 } @{ envelope_of(stage($node, 'extra')) };
    is($headers{'X-Api-Key'}, 'abc %41', 'as it was written');
    is($headers{'X-Empty'}, '', 'an empty one');
    for my $name ('Ce-Type', 'content-type', 'idempotency-key', 'FORZE_KEY', 'traceparent', 'Host', 'Content-Length',
        'Transfer-Encoding', 'webhook-id', "X\nY", 'X Y', '')
    {
        my ($ret, undef, $err) = $node->psql('postgres',
            'UPDATE outbox_route SET headers = ' . sql_literal({ $name => 'v' }) . " WHERE name = 'extra'",
            extra_params => [ '-v', 'VERBOSITY=verbose' ]);
        like($err, qr/ERROR:  22023/, 'refused: ' . $name =~ s/\n/\\n/r);
    }
};

subtest 'method, envelope and source of the route' => sub {
    my $at = '2026-02-03T04:05:06.000000';
    my $send = sub { stage($node, $_[0], event_type => 't', occurred_at => "${at}Z") };
    table_and_route('put', method => 'PUT', envelope => ['cloudevents'], source => 'urn:shop/naïve');
    my $id = $send->('put');
    is((requests_of($id))[0]{method}, 'PUT', 'PUT');
    is_deeply(envelope_of($id),
        bare_envelope($id, 't', $at, source => 'urn:shop/na%C3%AFve', families => ['cloudevents']), 'cloudevents alone');
    table_and_route('patch', method => 'PATCH', envelope => ['forze']);
    $id = $send->('patch');
    is((requests_of($id))[0]{method}, 'PATCH', 'PATCH');
    is_deeply(envelope_of($id), bare_envelope($id, 't', $at, families => ['forze']), 'forze alone');
    table_and_route('none', envelope => []);
    $id = $send->('none');
    is_deeply(envelope_of($id), bare_envelope($id, 't', $at, families => []), 'neither');
};

# PUB-22 for what this file sends; url placeholders
subtest 'values of rows in headers and in the url are encoded' => sub {
    my $table = table_and_route('coded', url => $e->url('/ok/{event_type}/{ordering_key}?tenant={tenant_id}'));
    my $tenant = '00000000-0000-4000-8000-0000000000dd';
    my %columns = (event_type => "a\r\nX-Evil: 1", ordering_key => 'ключ "%" /?#', tenant_id => $tenant);
    my ($id) = insert_rows($node, $table, 'coded', 1, columns => \%columns);
    my ($without) = insert_rows($node, $table, 'coded', 1);
    my ($request) = requests_of($id);
    my $headers = $e->headers($request);
    is($headers->{'x-evil'}, undef, 'no line is smuggled in');
    is($headers->{'ce-type'}, 'a%0D%0AX-Evil:%201', 'event_type');
    is($headers->{'forze_event_type'}, $headers->{'ce-type'}, 'in both families');
    is($headers->{'ce-partitionkey'}, '%D0%BA%D0%BB%D1%8E%D1%87%20%22%25%22%20/?#', 'ordering_key');
    is($request->{target}, '/ok/a%0D%0AX-Evil%3A%201/%D0%BA%D0%BB%D1%8E%D1%87%20%22%25%22%20%2F%3F%23?tenant=' . $tenant,
        'the url');
    wait_empty($node, $table);
    like(value($node, "SELECT status || ': ' || last_error FROM $table"), qr/^failed: .*placeholder/,
        'a row that cannot fill it is parked');
};

# PUB-15
subtest 'redirects are not followed' => sub {
    my $other = OutboxRelay::Endpoint->start;
    my $table = table_and_route('moved', max_attempts => 1, headers => { 'X-Api-Key' => 'secret' },
        url => $e->url('/redirect?to=' . $other->url('/elsewhere')));
    my $id = stage($node, 'moved');
    wait_empty($node, $table);
    is(value($node, "SELECT status || ': ' || last_error FROM $table"), 'failed: HTTP 302', 'a failed attempt');
    is($other->count->{connections}, 0, 'the other endpoint hears nothing');
    is(scalar(requests_of($id)), 1, 'one request');
};

# PUB-16
subtest 'a redelivery is the same request' => sub {
    my $table = table_and_route('twice', url => $e->url('/script/twice'));
    $e->script('twice', '/status/500', '/drop');
    my $id = stage($node, 'twice', ordering_key => 'k', payload => { a => 'ключ' });
    my @requests = requests_of($id, 3);
    is(scalar(@requests), 3, 'refused, dropped, accepted');
    my @same = map { [ $_->{body}, grep { !/^Host/ } @{ $_->{headers} } ] } @requests;
    is_deeply($same[$_], $same[0], "headers and body of number $_") for 1, 2;
    wait_empty($node, $table, all => 1);
};

# PUB-17
subtest 'passes without new rows send nothing' => sub {
    my $table = table_and_route('quiet');
    stage($node, 'quiet') for 1 .. 2;
    wait_lane($node, 'quiet', 'published = 2');
    my $before = $e->count->{received};
    my $lane = wait_passes($node, 'quiet', 3);
    is($e->count->{received}, $before, 'three passes');
    is($lane->{claimed}, 2, 'and claim nothing');
};

# PUB-18, PUB-19
subtest 'events of a key go out one after another, others side by side' => sub {
    my $table = table_and_route('keys', url => $e->url('/slow?ms=40'));
    $e->reset;
    my $oracle = OutboxRelay::Oracle->new(node => $node, relation => $table, endpoint => $e);
    my @ids = stage_many($node, 'keys', 40, keys => 8, truth => $oracle->truth_table);
    wait_empty($node, $table, all => 1);
    $oracle->check_nothing_lost(undef, empty => 1);
    $oracle->check_key_order;
    my @done = sort { $a->{head_at} <=> $b->{head_at} } $e->deliveries;
    my $together = grep { $done[$_]{head_at} < $done[ $_ - 1 ]{answer_at} } 1 .. $#done;
    cmp_ok($together, '>=', 20, "of 40, $together began while another was under way");
    is(keys %{ $e->by_event_id }, 40, 'each has an event id of its own');
    # With ordering none a key is no reason to wait.
    $e->reset;
    $node->safe_psql('postgres', "UPDATE outbox_route SET ordering = 'none' WHERE name = 'keys'");
    stage_many($node, 'keys', 10, keys => 1);
    wait_empty($node, $table, all => 1);
    @done = sort { $a->{head_at} <=> $b->{head_at} } $e->deliveries;
    cmp_ok($done[9]{head_at}, '<', $done[0]{answer_at}, 'ordering none: ten of one key at once');
};

# PUB-20
subtest 'a retry does not hold back its key' => sub {
    my $table = table_and_route('behind', retry_base_delay => '5min');
    $e->reset;
    my ($first, $second) = map { sprintf '00000000-0000-4000-8000-0000000000b%d', $_ } 1, 2;
    $e->rules({ header => 'Idempotency-Key', value => $first, step => '/status/500' });
    $node->safe_psql('postgres', join ';', 'BEGIN',
        (map { "SELECT outbox_stage('behind', 't', '{}', event_id => '$_', ordering_key => 'k')" } $first, $second), 'COMMIT');
    my $lane = wait_lane($node, 'behind', 'published = 1 AND retried = 1');
    is(value($node, "SELECT event_id FROM $table"), $first, 'the second is out');
    is(join(' ', map { $_->{event_id} } sort { $a->{n} <=> $b->{n} } $e->deliveries), "$first $second", 'after the first');
    is($lane->{claimed}, 2, 'in the same pass');
};

done_testing();
