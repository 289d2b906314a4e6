# A hostile world, end to end: endpoints that answer without end, compressed, drop by drop, broken off at any byte or
# not at all, names that do not resolve, ports that do not answer, kept connections that die under a request. Each
# attempt has one outcome, in bounded time and memory, with a clean last_error, and holds no other lane. And whatever
# happens, nothing of an event, a header, a url's query or an answer is in the server's log.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use File::Temp ();
use IO::Socket::INET;
use Test::More;
use Time::HiRes qw(time);
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

# A resolver that the test steers, in front of the C library's: getaddrinfo of a name under .test does what the file of
# that name says: hang, fail, or an address.
my $names = File::Temp->newdir;
chmod 0755, "$names";

sub resolves
{
    my ($name, $to) = @_;
    open(my $out, '>', "$names/$name.new") or die "$names/$name: $!";
    print $out "$to\n";
    close $out or die "$names/$name: $!";
    rename "$names/$name.new", "$names/$name" or die "$names/$name: $!";
    return;
}

sub build_resolver
{
    my $source = <<"C";
#define _GNU_SOURCE
#include <dlfcn.h>
#include <netdb.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

int getaddrinfo(const char *host, const char *service, const struct addrinfo *hints, struct addrinfo **result) {
    int (*real)(const char *, const char *, const struct addrinfo *, struct addrinfo **) =
        (int (*)(const char *, const char *, const struct addrinfo *, struct addrinfo **))dlsym(RTLD_NEXT, "getaddrinfo");
    size_t size = host == NULL ? 0 : strlen(host);
    char path[300], says[100] = "fail";
    if (size < 5 || strcmp(host + size - 5, ".test") != 0)
        return real(host, service, hints, result);
    for (int i = 0; i < 200; i++) {
        snprintf(path, sizeof(path), "$names/%s", host);
        FILE *file = fopen(path, "r");
        if (file != NULL) {
            if (fscanf(file, "%99s", says) != 1)
                strcpy(says, "fail");
            fclose(file);
        }
        if (strcmp(says, "hang") != 0)
            break;
        usleep(100000);
    }
    if (strcmp(says, "fail") == 0 || strcmp(says, "hang") == 0)
        return EAI_AGAIN;
    return real(says, service, hints, result);
}
C
    open(my $out, '>', "$names/resolver.c") or die $!;
    print $out $source;
    close $out or die $!;
    system($ENV{CC} || 'cc', '-shared', '-fPIC', '-o', "$names/resolver.so", "$names/resolver.c", '-ldl') == 0
      or die 'the resolver could not be compiled';
    return "$names/resolver.so";
}

my $node = new_node('hostile', conf => "autovacuum = off\noutbox_relay.workers = 3\n", start => 0);
{
    local $ENV{LD_PRELOAD} = build_resolver();
    $node->start;
}
$node->safe_psql('postgres', 'CREATE EXTENSION outbox_relay');
my $e = OutboxRelay::Endpoint->start(tls => 1);
make_outbox($node, 'postgres', 'app.outbox');
my $limit_ms = 700;
my %fast = (interval => '200ms', retry_base_delay => '100ms', retry_max_backoff => '400ms', request_timeout => "${limit_ms}ms",
    connect_timeout => '500ms');
create_route($node, 'good', 'app.outbox', $e->url('/ok'), %fast);

# Names and numbers from /proc/PID/status of all workers: VmHWM, Threads, ...
sub of_workers
{
    my ($name) = @_;
    my %value;
    for my $pid (worker_pids($node, 'postgres'))
    {
        ($value{$pid}) = PostgreSQL::Test::Utils::slurp_file("/proc/$pid/status") =~ /^$name:\s+(\d+)/m;
    }
    return \%value;
}

# A neighbour's event gets through, meanwhile, as ever.
sub neighbour_is_well
{
    my ($what) = @_;
    my $id = stage($node, 'good');
    my $started = time();
    $e->wait_until(sub { grep { $_->{event_id} eq $id && $_->{acked} } $e->deliveries }, what => 'the neighbour');
    return cmp_ok(time() - $started, '<', 1.5, "$what: another lane is not held");
}

my $clean = "octet_length(last_error) <= 500 AND last_error !~ '[\\x01-\\x1f\\x7f-\\x9f]'"
  . " AND convert_from(convert_to(last_error, 'UTF8'), 'UTF8') = last_error";

stage($node, 'good') for 1 .. 3;
wait_empty($node, 'app.outbox', all => 1);
is(scalar worker_pids($node, 'postgres'), 3, 'three workers') if wait_sql($node, 'postgres',
    "SELECT count(*) = 3 FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker'");

subtest 'each attempt has one outcome' => sub {
    my $large = q{jsonb_build_object('a', repeat('x', 1000000))};
    my $huge = q{jsonb_build_object('a', repeat('x', 40000000))};    # more than the sockets' buffers take
    my @cases = (
        # path                                what becomes of the one attempt       payload
        ['/endless-headers',                  'malformed response: '],
        ['/endless-body?status=200',          'published'],
        ['/endless-body?status=500',          'HTTP 500'],
        ['/gzip?status=200',                  'published'],
        ['/gzip?status=500',                  'HTTP 500'],
        ['/big-body?bytes=20000000',          'HTTP 500'],
        ['/dirty-body',                       'HTTP 500'],
        ['/flood-1xx',                        'malformed response: '],
        ['/flood-1xx?n=3',                    'published'],
        ['/flood-1xx?n=1&code=101',           'malformed response: '],
        ['/drip?pause=1',                     'published'],
        ['/drip?pause=100',                   'timeout: '],
        ['/hang',                             'timeout: '],
        ['/hang-headers',                     'timeout: '],
        ['/half-headers',                     'no answer'],
        ['/hang-body?status=200',             'published'],
        ['/hang-body?status=500',             'HTTP 500'],
        ['/garbage',                          'malformed response: '],
        ['/no-status',                        'malformed response: '],
        ['/nul-header',                       'malformed response: '],
        # Newer libcurls refuse it, as RFC 9112, section 6.3, has it.
        ['/conflicting-length',               'published|malformed response: '],
        ['/obs-fold',                         'published'],
        ['/big-reason?bytes=10000',           'HTTP 500'],
        ['/big-reason?bytes=900000',          'malformed response: '],
        ['/rst-head',                         'connection lost: ', $large],
        (map { [ "/rst-at=$_", 'connection lost: ' ] } 0, 1, 8, 12, 15, 17, 30, 36, 37),
        (map { [ "/rst-at=$_", 'published' ] } 38, 39),
        ['memory'],
        ['/early?status=200&then=close',      'HTTP 200 before the body was sent|connection lost: ', $huge],
        ['/early?status=200&then=stall',      'HTTP 200 before the body was sent|timeout: ', $huge],
        ['/early?status=413&then=close',      'HTTP 413|connection lost: ', $huge],
        ['/stall-read',                       'timeout: ', $huge]);
    my $warm = of_workers('VmHWM');
    my $number = 0;
    for (@cases)
    {
        my ($path, $outcome, $payload) = @$_;
        if ($path eq 'memory')
        {
            my $now = of_workers('VmHWM');
            cmp_ok(($now->{$_} // 0) - $warm->{$_}, '<', 12_000, "worker $_ has not grown by more than 12 MB") for sort keys %$warm;
            next;
        }
        my $name = 'case_' . ++$number;
        # What the endpoint answers at once may take it longer on a busy machine.
        my %patient = "$path $outcome" =~ /hang|drip|stall|endless|half|timeout/ ? () : (request_timeout => '3s', pass_deadline => '5s');
        create_route($node, $name, 'app.outbox', $e->url($path), %fast, max_attempts => 1, max_payload_bytes => 50_000_000, %patient);
        my $id = stage($node, $name, payload => \($payload // q{'{}'}));
        neighbour_is_well($path) if $number % 4 == 0;
        wait_lane($node, $name, 'published + failed > 0');
        my ($status, $error, $is_clean) = split /\|/, value($node,
            "SELECT status, last_error, $clean FROM app.outbox WHERE event_id = '$id'");
        like($status ? $error : 'published', qr/^(?:$outcome)/, "$path: $outcome");
        is($is_clean, 't', 'with a clean reason') if $status;
        my $lane = lane($node, $name);
        cmp_ok($lane->{last_pass_ms}, '<', %patient ? 6500 : $limit_ms + 1500, 'in bounded time');
        is($lane->{published} + $lane->{failed} + $lane->{retried} + $lane->{refused}, 1, 'one outcome');
        my @requests = grep { $_->{event_id} eq $id } $e->deliveries, $e->inflight;
        is(scalar @requests, 1, 'one request');
        is($requests[0]{acked} && $requests[0]{complete} ? 1 : 0, $outcome eq 'published' ? 1 : 0, "$path: the endpoint sees it so too")
          if $path !~ /endless|early|101|conflicting/;
        $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = '$name'");
        $e->release;
    }
};

subtest 'a port that does not answer' => sub {
    my $deaf = IO::Socket::INET->new(LocalAddr => '127.0.0.1', Proto => 'tcp', Listen => 1) or die "listen: $@";
    # Fills the queue of those who wait to be accepted; from then on a SYN is dropped.
    my @waiting = map {
        IO::Socket::INET->new(PeerAddr => '127.0.0.1', PeerPort => $deaf->sockport, Proto => 'tcp', Blocking => 0)
    } 1 .. 8;
    create_route($node, 'hole', 'app.outbox', 'http://127.0.0.1:' . $deaf->sockport . '/', %fast);
    my @ids = stage_many($node, 'hole', 5);
    neighbour_is_well('a SYN that nobody answers');
    my $lane = wait_lane($node, 'hole', "refused > 0 AND state = 'refused'");
    like($lane->{last_error}, qr/^connect: /, 'nothing was sent');
    cmp_ok($lane->{last_pass_ms}, '<', 2500, 'the connect timeout ends it');
    is(value($node, "SELECT count(*) FROM app.outbox WHERE outbox_route = 'hole' AND attempts = 0 AND available_at IS NULL"), 5,
        'no row is touched');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'hole'; DELETE FROM app.outbox WHERE outbox_route = 'hole'");
};

# M6: what libcurl sends a second time by itself, since it takes the death of a kept connection for one before the
# request. It is the only repeat that no counter of ours shows: at most one an attempt.
subtest 'a kept connection that dies under a request' => sub {
    create_route($node, 'kept', 'app.outbox', $e->url('/drop-reused?after=1'), %fast, concurrency => 1);
    my @ids = stage_many($node, 'kept', 10);
    my $lane = wait_lane($node, 'kept', 'published = 10');
    is($lane->{failed} + $lane->{refused}, 0, 'all go out');
    my %requests = map { $_ => 0 } @ids;
    exists $requests{ $_->{event_id} } and $requests{ $_->{event_id} }++ for grep { $_->{complete} } $e->deliveries;
    my ($attempts, $requests) = (10 + $lane->{retried}, 0);
    $requests += $_ for values %requests;
    # A connection whose death comes as a reset is an ordinary failed attempt.
    cmp_ok($requests - $attempts, '>=', 5, "the endpoint got $requests requests for $attempts attempts");
    cmp_ok($requests, '<=', 2 * $attempts, 'at most one more an attempt');
    cmp_ok($requests{$_}, '<=', 2 * (1 + $lane->{retried}), 'and an event') for @ids;
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'kept'");
};

subtest 'names' => sub {
    my $port = $e->port;
    resolves('fails.test', 'fail');
    resolves('hangs.test', 'hang');
    # There listens nobody: not on that port of this address.
    resolves('moves.test', '127.0.0.77');
    for my $name (qw(fails hangs moves))
    {
        create_route($node, $name, 'app.outbox', "http://$name.test:$port/ok", %fast);
        stage_many($node, $name, 3);
    }
    neighbour_is_well('names that do not resolve');
    my %class = (fails => 'resolve', hangs => 'resolve', moves => 'connect');
    for my $name (sort keys %class)
    {
        my $lane = wait_lane($node, $name, "refused >= 3 AND consecutive_failures >= 2");
        like($lane->{last_error}, qr/^$class{$name}: /, "$name: $lane->{last_error}");
        cmp_ok($lane->{last_pass_ms}, '<', 2500, "$name: bounded");
        is(value($node, "SELECT count(*) FROM app.outbox WHERE outbox_route = '$name' AND attempts = 0 AND available_at IS NULL"), 3,
            "$name: no attempt");
    }
    neighbour_is_well('names that do not resolve, for a while');
    cmp_ok((sort { $b <=> $a } values %{ of_workers('Threads') })[0], '<', 40, 'threads of hanging look-ups do not pile up');
    # DROP DATABASE and the like need an answer from every process: not after the resolver's patience.
    my @took;
    for (1 .. 3)
    {
        $node->safe_psql('postgres', "CREATE DATABASE other");
        my $started = time();
        $node->safe_psql('postgres', "DROP DATABASE other");
        push @took, time() - $started;
    }
    cmp_ok((sort { $a <=> $b } @took)[0], '<', 1, 'DROP DATABASE is not held by a name that hangs');
    resolves("$_.test", '127.0.0.1') for sort keys %class;
    for my $name (sort keys %class)
    {
        my $healed = time();
        wait_empty($node, 'app.outbox', route => $name, timeout => 30);
        cmp_ok(time() - $healed, '<', 5, "$name: cured, it goes out within a backoff step");
    }
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name IN ('fails', 'hangs', 'moves')");
};

# FLR-07: a deployment fault is nobody's attempt.
subtest 'a ca_file that is not there' => sub {
    create_route($node, 'ca', 'app.outbox', $e->url('/ok', 'tls_good'), %fast, ca_file => '/nowhere/ca.crt');
    stage_many($node, 'ca', 2);
    my $lane = wait_lane($node, 'ca', 'consecutive_failures >= 2');
    is($lane->{published} + $lane->{failed} + $lane->{retried}, 0, 'no attempt');
    is(value($node, "SELECT count(*) FROM app.outbox WHERE outbox_route = 'ca' AND attempts = 0 AND available_at IS NULL AND last_error IS NULL"),
        2, 'the rows are as they were');
    like($lane->{last_error}, qr{^tls: .*/nowhere/ca\.crt}, 'the lane says what is wrong');
    $node->safe_psql('postgres', 'UPDATE outbox_route SET ca_file = ' . sql_literal($e->tls_file('ca.crt')) . " WHERE name = 'ca'");
    wait_empty($node, 'app.outbox', route => 'ca');
};

# The log: the processes of the relay write nothing of what passes through them, whatever is asked of the server.
subtest 'nothing secret in the log' => sub {
    set_conf($node, log_min_messages => 'debug5', log_statement => 'all', log_min_duration_statement => 0,
        log_parameter_max_length => -1, log_parameter_max_length_on_error => -1, log_error_verbosity => 'verbose', log_duration => 'on',
        debug_print_parse => 'on', debug_print_plan => 'on', log_line_prefix => '@@%b@@ ');
    my $offset = log_offset($node);
    my %event = (event_type => 'canary-type', ordering_key => 'canary-key', payload => { secret => 'canary-payload' });
    resolves('canary.test', 'fail');
    my $dead = OutboxRelay::Endpoint->start;
    my $dead_port = $dead->port;
    $dead->stop;
    my %urls = (
        fine => $e->url('/ok?token=canary-query'), echo => $e->url('/status/500?body=canary-answer&reason=canary-reason&token=canary-query'),
        wait => $e->url('/status/429?header=Retry-After:%20canary-retry&token=canary-query'), gone => $e->url('/garbage?token=canary-query'),
        drop => $e->url('/drop?token=canary-query'), nul => $e->url('/nul-header?token=canary-query'),
        slow => $e->url('/hang?token=canary-query'), dead => "http://127.0.0.1:$dead_port/?token=canary-query",
        dns => 'http://canary.test/?token=canary-query', tls => $e->url('/ok?token=canary-query', 'tls_expired'));
    for my $name (sort keys %urls)
    {
        create_route($node, $name, 'app.outbox', $urls{$name}, %fast, headers => { 'X-Secret' => 'canary-header' });
        stage($node, $name, %event);
    }
    wait_lane($node, $_, 'published + retried + refused > 0') for sort keys %urls;
    # Passes that fail in the database: the server's own errors quote rows.
    my %faults = (
        checked => [ '/status/500', 'ALTER TABLE app.checked ADD CHECK (attempts = 0)', 'violates check constraint' ],
        unique => [ '/status/500', "CREATE UNIQUE INDEX ON app.unique ((payload->>'secret'), attempts) WHERE attempts > 0", 'duplicate key' ],
        cast => [ '/ok', q{CREATE FUNCTION app.cast() RETURNS trigger LANGUAGE plpgsql AS
            $$ BEGIN PERFORM (OLD.payload->>'secret')::int; RETURN OLD; END $$;
            CREATE TRIGGER c BEFORE DELETE ON app.cast FOR EACH ROW EXECUTE FUNCTION app.cast()}, 'invalid input syntax' ]);
    for my $name (sort keys %faults)
    {
        my ($path, $sql, $error) = @{ $faults{$name} };
        make_outbox($node, 'postgres', "app.$name");
        $node->safe_psql('postgres', $sql);
        create_route($node, $name, "app.$name", $e->url($path), %fast);
        insert_rows($node, "app.$name", $name, 1, columns => { status => 'failed', attempts => 1, payload => $event{payload} }) if $name eq 'unique';
        stage($node, $name, %event);
        like(wait_lane($node, $name, 'failed_passes > 1')->{last_error}, qr/$error/, "$name: what is wrong is shown in the view");
    }
    set_conf($node, map { $_ => undef } qw(log_min_messages log_statement log_min_duration_statement log_parameter_max_length
          log_parameter_max_length_on_error log_error_verbosity log_duration debug_print_parse debug_print_plan log_line_prefix));
    my @entries = split /^(?=@@)/m, log_since($node, $offset);
    my @ours = grep { /^@\@outbox_relay/ } @entries;
    cmp_ok(scalar @ours, '>', 500, 'the relay has written ' . @ours . ' entries');
    ok((grep { /failed/ && /"checked"/ } @ours), 'the failed pass among them');
    my @told = grep { /canary-/ } @ours;
    is(scalar @told, 0, 'none with anything of an event, a header, a query or an answer') or diag(join '', map { substr $_, 0, 2000 } @told[ 0 .. ($#told > 4 ? 4 : $#told) ]);
};

$node->stop;
done_testing();
