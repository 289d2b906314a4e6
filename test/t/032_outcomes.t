# Every outcome of a request that concerns the lane: requests to wait, a dead or unsafe endpoint, the breaker, urls with
# placeholders, refused TLS.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use Time::HiRes qw(time);
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $node = new_node('outcomes', conf => "autovacuum = off\n");
my $e = OutboxRelay::Endpoint->start(tls => 1);
my %fast = (interval => '200ms', retry_base_delay => '100ms', retry_max_backoff => '2s', concurrency => 1);

sub scene
{
    my ($name, $url, %columns) = @_;
    $e->reset;
    make_outbox($node, 'postgres', "app.$name");
    create_route($node, $name, "app.$name", $url, %fast, %columns);
    return "app.$name";
}

subtest '429 with Retry-After holds the lane and costs no attempt' => sub {
    my $table = scene('busy', $e->url('/script/busy'));
    $e->script('busy', '/status/429?retry_after=1', '/ok');
    my $started = time();
    stage_many($node, 'busy', 5);
    my $lane = wait_lane($node, 'busy', "state = 'refused'");
    is($e->count->{received}, 1, 'publishing ends');
    # A wake does not shorten it.
    stage($node, 'busy');
    wait_empty($node, $table, all => 1);
    cmp_ok(time() - $started, '>=', 1, 'the lane waits as long as it was asked to');
    is(lane($node, 'busy')->{retried}, 0, 'no attempt');
    like($lane->{last_error}, qr/HTTP 429/, 'and says why');
};

subtest 'bounds: ten years, the past, garbage, 410' => sub {
    for my $case (['429?retry_after=315360000', 1.9, 4], ['410', 1.9, 4], ['429?retry_after=Sun,%2006%20Nov%201994%2008:49:37%20GMT', 0.1, 1.9],
        ['429?retry_after=garbage', 0.1, 1.9], ['503?retry_after=1', 0.9, 1.9])
    {
        my ($answer, $least, $most) = @$case;
        my ($name) = 'b' . join '', $answer =~ /(\d+)/g;
        $name = substr $name, 0, 20;
        my $table = scene($name, $e->url("/script/$name"));
        $e->script($name, "/status/$answer", '/ok');
        stage($node, $name);
        wait_empty($node, $table, all => 1);
        my @times = map { $_->{head_at} } $e->requests;
        cmp_ok($times[1] - $times[0], '>=', $least, "$answer: waits");
        cmp_ok($times[1] - $times[0], '<', $most + 1, "$answer: not for ever");
        $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = '$name'");
    }
};

subtest '503 without Retry-After is an ordinary failure' => sub {
    my $table = scene('plain503', $e->url('/script/plain503'));
    $e->script('plain503', '/status/503', '/ok');
    stage($node, 'plain503');
    wait_empty($node, $table, all => 1);
    is(lane($node, 'plain503')->{retried}, 1, 'an attempt');
};

subtest 'an outage burns no attempt and ends within one backoff step' => sub {
    my $down = OutboxRelay::Endpoint->start;
    my $port = $down->port;
    my $url = $down->url;
    $down->stop;
    my $table = scene('outage', $url, concurrency => 4);
    my @ids = stage_many($node, 'outage', 50);
    my $lane = wait_lane($node, 'outage', 'consecutive_failures >= 3');
    is($lane->{retried} + $lane->{failed}, 0, 'no attempt');
    is(value($node, "SELECT count(*) FROM $table WHERE attempts = 0 AND available_at IS NULL AND last_error IS NULL"), 50,
        'the rows are untouched');
    like($lane->{last_error}, qr/^connect/, 'the reason is shown');
    $down = OutboxRelay::Endpoint->start(port => $port);
    my $started = time();
    wait_empty($node, $table, all => 1);
    cmp_ok(time() - $started, '<', 4, 'within a step');
    is($down->count->{acked}, 50, 'all of them');
    $down->stop;
};

subtest 'the breaker: one probe a step, closed by a success' => sub {
    my $table = scene('broken', $e->url('/status/500'), breaker_threshold => 5, max_attempts => 0);
    stage_many($node, 'broken', 30);
    my $lane = wait_lane($node, 'broken', "breaker = 'open'");
    is($e->count->{received}, 5, 'opened by five failures');
    wait_lane($node, 'broken', 'consecutive_failures >= 3');
    $lane = lane($node, 'broken');
    cmp_ok($e->count->{received}, '<=', 5 + $lane->{consecutive_failures} + 1, 'one probe a backoff step');
    # A worker's death does not close it.
    my $pid = wait_for_worker($node, 'postgres');
    $node->safe_psql('postgres', "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker'");
    wait_for_worker($node, 'postgres', not => $pid);
    is(lane($node, 'broken')->{breaker}, 'open', 'it survives the worker');
    $e->rules({ header => 'ce-type', value => $_, step => '/ok' }) for value($node, "SELECT min(event_type) FROM $table");
    wait_empty($node, $table, all => 1);
    is(lane($node, 'broken')->{breaker}, 'closed', 'closed by a success');
};

subtest 'fail_statuses fail at once, but not while the breaker is open' => sub {
    my $table = scene('strict', $e->url('/status/422'), breaker_threshold => 3, fail_statuses => '{422}');
    stage_many($node, 'strict', 10);
    wait_lane($node, 'strict', 'consecutive_failures >= 2');
    my $failed = value($node, "SELECT count(*) FROM $table WHERE status = 'failed'");
    is($failed, 3, 'three failed before it opened');
    cmp_ok(lane($node, 'strict')->{retried}, '>', 0, 'then an ordinary failed attempt');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'strict'");
};

subtest 'where the url has placeholders a refusal is the row\'s own' => sub {
    my $table = scene('each', $e->url('/status/{event_type}'), breaker_threshold => 10);
    stage($node, 'each', event_type => '429');
    stage($node, 'each', event_type => '200');
    stage($node, 'each', event_type => '410');
    stage($node, 'each', event_type => '201');
    wait_sql($node, 'postgres', "SELECT count(*) = 2 FROM $table");
    # Its next attempt may have come by now.
    is(value($node, "SELECT string_agg(event_type || ':' || least(attempts, 1), ',' ORDER BY event_type) FROM $table"),
        '410:1,429:0', 'held without an attempt, gone with one; the neighbours went out') or diag($node->safe_psql('postgres', "TABLE $table"));
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'each'");
};

subtest 'TLS: what cannot be trusted is refused with its class' => sub {
    my $ca = $e->tls_file('ca.crt');
    my $table = scene('tls', $e->url('/ok', 'tls_good'), ca_file => $ca);
    stage($node, 'tls');
    wait_empty($node, $table, all => 1);
    pass('a private CA is trusted where the route names it');
    for my $bad (qw(tls_wrong_host tls_expired tls_self_signed))
    {
        my $received = $e->count->{received};
        $table = scene($bad, $e->url('/ok', $bad), ca_file => $ca);
        stage($node, $bad);
        my $lane = wait_lane($node, $bad, 'refused > 0');
        like($lane->{last_error}, qr/^tls: /, "$bad: $lane->{last_error}");
        is(value($node, "SELECT attempts FROM $table"), 0, "$bad: no attempt");
        is($e->count->{received}, 0, "$bad: nothing was sent");
        $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = '$bad'");
    }
    # Without the private CA nothing here is trusted.
    $table = scene('untrusted', $e->url('/ok', 'tls_good'));
    stage($node, 'untrusted');
    like(wait_lane($node, 'untrusted', 'refused > 0')->{last_error}, qr/^tls: /, 'not without it');
};

$node->stop;
done_testing();
