# The means of the process tests, tested themselves: without the extension, on a plain cluster, with a small
# sender in this file in the worker's place. What the oracle calls lost, invented, doubled or out of order
# is put there on purpose, and the checks have to find it.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use HTTP::Tiny;
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Node;
use OutboxRelay::Oracle;

my $node = new_node('plain', preload => '');
my $e = OutboxRelay::Endpoint->start(tls => 1);
my $http = HTTP::Tiny->new(timeout => 5);

# Sends one event as the worker would; the answer's status.
sub post
{
    my ($path, $id, $key) = @_;
    my %headers = ('Idempotency-Key' => $id, 'ce-partitionkey' => $key // '');
    return $http->post($e->url($path), { headers => \%headers, content => '{}' })->{status};
}

sub key_of
{
    my ($db, $id) = @_;
    return $node->safe_psql($db, "SELECT ordering_key FROM outbox_truth WHERE event_id = '$id'");
}

# A check that has to fail, or a wait that has to time out: that is expected, its verdict is what is tested.
# (As a todo the failure counts for nothing and its diag stays out of the way.)
sub finds
{
    my ($name, $check) = @_;
    my $builder = Test::More->builder;
    $builder->todo_start('it has to object');
    my $good = eval { $check->() };
    my $error = $@;
    $builder->todo_end;
    die $error if $error && $error !~ /timed out waiting/;
    ok(!$good, $name);
    return;
}

subtest 'table, rows and waits' => sub {
    make_outbox($node, 'postgres', 'app.outbox', trace => 1, hlc => 1, fifo => 1);
    is($node->safe_psql('postgres', q{SELECT count(*) FROM pg_indexes WHERE tablename = 'outbox'}), 5, 'indexes');
    make_outbox($node, 'postgres', 'app.bare', drop => [qw(processing_at published_at)], indexes => 0);
    is($node->safe_psql('postgres',
            q{SELECT count(*) FROM pg_attribute WHERE attrelid = 'app.bare'::regclass AND attnum > 0}),
        16, 'columns left out');
    my @ids = insert_rows($node, 'app.outbox', 'r', 3, keys => 2,
        columns => { attempts => 2, last_error => "o'k\\" });
    is($node->safe_psql('postgres', q{SELECT string_agg(event_id || ordering_key || attempts || last_error, ','
        ORDER BY created_at) FROM app.outbox}), join(',', map { "$ids[$_]" . (qw(k2 k1 k2))[$_] . "2o'k\\" } 0 .. 2),
        'rows in order');
    insert_rows($node, 'app.outbox', 'r', 2, rollback => 1);
    is($node->safe_psql('postgres', 'SELECT count(*) FROM app.outbox'), 3, 'a rolled-back one leaves no rows');
    $node->safe_psql('postgres', q{UPDATE app.outbox SET status = 'failed'});
    ok(wait_empty($node, 'app.outbox'), 'failed rows are not in the way');
    finds('a wait in vain dies', sub { wait_empty($node, 'app.outbox', all => 1, timeout => 0.3) });
    is(worker_pid($node, 'postgres'), undef, 'no worker here');
    my $offset = log_offset($node);
    $node->safe_psql('postgres', q{DO $$ BEGIN RAISE LOG 'marked line'; END $$});
    my $after = wait_log($node, qr/client backend.*marked line/, $offset);
    ok($after > $offset, 'a log line is found');
    finds('but not beyond the offset', sub { wait_log($node, qr/marked line/, $after, timeout => 0.2) });
};

subtest 'SQL of routes and staging' => sub {
    $node->safe_psql('postgres', <<'SQL');
CREATE TABLE outbox_route (name text, relation text, url text, fail_statuses int[], envelope text[], headers jsonb,
    "interval" interval);
CREATE FUNCTION outbox_stage(route text, event_type text, payload jsonb, event_id uuid DEFAULT gen_random_uuid(),
    ordering_key text DEFAULT NULL, available_at timestamptz DEFAULT NULL) RETURNS uuid LANGUAGE sql
    AS $$ SELECT event_id WHERE route = 'r' AND payload <> 'null' $$;
SQL
    create_route($node, 'r', 'app.outbox', $e->url, fail_statuses => [ 400, 404 ],
        envelope => [], headers => { X => "it's" },
        interval => '2s');
    is($node->safe_psql('postgres',
            'SELECT name, relation, fail_statuses, envelope, headers, "interval" FROM outbox_route'),
        q(r|app.outbox|{400,404}|{}|{"X": "it's"}|00:00:02), 'a route');
    my $id = '00000000-0000-0000-0000-00000000000a';
    is(stage($node, 'r', event_id => $id, payload => { a => [1] }, available_at => \'now()'), $id, 'stage');
    is(scalar(my @ids = stage_many($node, 'r', 5, keys => 2)), 5, 'stage_many');
};

subtest 'endpoint' => sub {
    $e->script('s', { status => 500 }, '/status/429?retry_after=1');
    is(post('/script/s', 'a'), $_, "scripted $_") for 500, 429, 200;
    is($e->wait_for_count(1, of => 'events'), 1, 'one event taken');
    is($e->wait_for_count(3, 5), 3, 'three requests');
    is(scalar @{ $e->by_event_id->{a} }, 3, 'by event id');
    my ($first) = $e->requests;
    is($e->headers($first)->{'idempotency-key'}, 'a', 'headers');
    is($first->{body}, '{}', 'body');
    like($e->url('/x', 'tls_good'), qr{^https://127.0.0.1:\d+/x$}, 'TLS url');
    ok(-r $e->tls_file('ca.crt'), 'CA certificate');
    finds('a wait in vain dies', sub { $e->wait_for_count(4, timeout => 0.2) });

    my $raw = IO::Socket::INET->new(PeerAddr => '127.0.0.1', PeerPort => $e->port) or die $!;
    print $raw "POST /hang HTTP/1.1\r\nIdempotency-Key: h\r\nContent-Length: 0\r\n\r\n";
    $raw->flush;
    is($e->wait_for_inflight->{event_id}, 'h', 'a request in flight');
    is($e->release, 1, 'released');
    like(scalar <$raw>, qr/ 200 /, 'answered');
    my $other = OutboxRelay::Endpoint->start;
    my $url = $other->url;
    $other->stop;
    like($http->get($url)->{content}, qr/refused/, 'a stopped endpoint refuses');
};

subtest 'oracle: all well' => sub {
    $node->safe_psql('postgres', 'CREATE DATABASE well');
    make_outbox($node, 'well', 'app.outbox');
    $e->reset;
    my $oracle = OutboxRelay::Oracle->new(node => $node, db => 'well', relation => 'app.outbox', endpoint => $e);
    finds('nothing is known of nothing', sub { $oracle->check_nothing_lost });
    my %on = (db => 'well', truth => $oracle->truth_table);
    my @ids = insert_rows($node, 'app.outbox', 'r', 12, keys => 3, %on);
    insert_rows($node, 'app.outbox', 'r', 3, rollback => 1, %on);
    # Refused once each, and in order: neither is a fault.
    for my $id (@ids[ 0 .. 9 ])
    {
        my $key = key_of('well', $id);
        post('/status/500', $id, $key);
        post('/ok', $id, $key);
        $node->safe_psql('well', "DELETE FROM app.outbox WHERE event_id = '$id'");
    }
    $oracle->check_nothing_lost;
    finds('two rows are left', sub { $oracle->check_nothing_lost(undef, empty => 1) });
    $oracle->check_nothing_invented;
    $oracle->check_duplicates_at_most(0);
    $oracle->check_key_order;
};

subtest 'oracle: everything wrong' => sub {
    $node->safe_psql('postgres', 'CREATE DATABASE wrong');
    make_outbox($node, 'wrong', 'app.outbox');
    $e->reset;
    my $oracle = OutboxRelay::Oracle->new(node => $node, db => 'wrong', relation => 'app.outbox', endpoint => $e);
    my %on = (db => 'wrong', truth => $oracle->truth_table);
    my ($lost, $late, $early, $kept, $refused) = insert_rows($node, 'app.outbox', 'r', 5, keys => 1, %on);
    my ($rolled_back) = insert_rows($node, 'app.outbox', 'r', 1, keys => 1, rollback => 1, %on);
    post('/ok', $_, 'k1') for $early, $late, $late, $late, $rolled_back;
    post('/drop', $early, 'k1');
    post('/status/500', $refused, 'k1');
    $node->safe_psql('wrong', "DELETE FROM app.outbox WHERE event_id <> '$kept'");
    my $found = $oracle->compare;
    is_deeply($found->{lost}, [ $lost, $refused ], 'lost: never sent, and refused');
    is_deeply($found->{invented}, [$rolled_back], 'invented');
    is_deeply($found->{duplicates}, { $late => 2, $early => 1 }, 'duplicates, the unanswered one among them');
    is_deeply($found->{left}, { $kept => 'pending' }, 'left');
    is_deeply($found->{disorder}, ["k1: $late came after $early"], 'disorder');
    is_deeply([ @$found{qw(committed acknowledged)} ], [ 5, 3 ], 'sums');
    finds('the lost are found', sub { $oracle->check_nothing_lost });
    finds('the invented are found', sub { $oracle->check_nothing_invented });
    finds('two duplicates are too few', sub { $oracle->check_duplicates_at_most(2) });
    finds('three, but two of one event', sub { $oracle->check_duplicates_at_most(3, undef, per_event => 1) });
    $oracle->check_duplicates_at_most(3, undef, per_event => 2);
    finds('disorder is found', sub { $oracle->check_key_order });
};

subtest 'oracle: a list as truth, and overlaps' => sub {
    $e->reset;
    my $oracle = OutboxRelay::Oracle->new(
        node => $node, db => 'well', relation => 'app.outbox', route => 'none', endpoint => $e, truth => []);
    $oracle->committed([ 'e1', 'k' ], [ 'e2', 'k' ]);
    my @raw;
    for my $id (qw(e1 e2))
    {
        push @raw, IO::Socket::INET->new(PeerAddr => '127.0.0.1', PeerPort => $e->port);
        $raw[-1]->print("POST /hang HTTP/1.1\r\nIdempotency-Key: $id\r\nContent-Length: 0\r\n\r\n");
        $raw[-1]->flush;
        $e->wait_for_inflight(sub { $_[0]{event_id} eq $id });
    }
    $e->release;
    $e->wait_for_count(2, of => 'acked');
    is(scalar @{ $oracle->compare->{overlaps} }, 1, 'an overlap');
    finds('it is an objection', sub { $oracle->check_key_order });
    $oracle->check_key_order('unless it is allowed', overlap => 1);
    $oracle->check_nothing_lost;
};

done_testing();
