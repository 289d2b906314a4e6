package OutboxRelay::Endpoint;

# The scripted receiver (test/endpoint/endpoint.py) for Perl tests: start, stop, steer, read its records.
# Core modules only. What the scenarios are: test/endpoint/README.md.
#
#   my $e = OutboxRelay::Endpoint->start;
#   create_route($node, 'r', 'app.outbox', $e->url('/status/500'));
#   $e->wait_for_count(3);

use strict;
use warnings;
use Carp;
use Cwd qw(abs_path);
use File::Basename qw(basename dirname);
use File::Temp ();
use HTTP::Tiny;
use JSON::PP ();
use POSIX qw(WNOHANG);
use OutboxRelay::Wait ();

my $home = dirname(abs_path(__FILE__)) . '/../../../endpoint';
my $json = JSON::PP->new->utf8->allow_nonref;
my $started = 0;

# start(tls => 1, port => N, max_seconds => N, args => [...]): runs an endpoint and waits until it listens.
# With PostgreSQL::Test its files go to tmp_check/log, where they stay for the reader of a failure; else to a
# temporary folder. It ends with this object, with this process, or after max_seconds.
sub start
{
    my ($class, %opts) = @_;
    my $self = bless { owner => $$, deliveries => [] }, $class;
    $started++;
    my $prefix;
    if (defined $PostgreSQL::Test::Utils::log_path)
    {
        $prefix = abs_path($PostgreSQL::Test::Utils::log_path) . '/' . basename($0, '.pl', '.t') . "_endpoint_$started";
    }
    else
    {
        $self->{folder} = File::Temp->newdir;
        $prefix = "$self->{folder}/endpoint";
    }
    @$self{qw(log output port_file)} = ("$prefix.jsonl", "$prefix.out", "$prefix.ports");
    unlink @$self{qw(log output port_file)};
    my @command = (
        $ENV{PYTHON} || 'python3', "$home/endpoint.py", '--log', $self->{log}, '--port-file', $self->{port_file},
        '--parent-pid', $$, '--max-seconds', $opts{max_seconds} // 1800);
    push @command, '--port', $opts{port} if $opts{port};
    push @command, '--tls-dir', $self->_certificates if $opts{tls};
    push @command, @{ $opts{args} || [] };
    $self->_launch(@command);
    OutboxRelay::Wait::wait_until(
        sub { $self->_read_ports || $self->_gone },
        what => 'the endpoint to listen', diag => sub { $self->output });
    croak 'the endpoint did not start: ' . $self->output if !$self->{ports};
    return $self;
}

# The folder of the test certificates, made once a process (ca.crt, client.crt, client.key, ...).
my $tls_folder;

sub _certificates
{
    my ($self) = @_;
    if (!$tls_folder)
    {
        $tls_folder = File::Temp->newdir;
        # The server reads ca_file, and may run as somebody else.
        chmod 0755, "$tls_folder";
        system("$home/certs.sh", "$tls_folder") == 0 or croak 'certs.sh failed';
    }
    $self->{tls} = $tls_folder;
    return "$tls_folder";
}

# tls_file(NAME): the path of a certificate or key that start(tls => 1) made.
sub tls_file
{
    my ($self, $name) = @_;
    croak 'started without tls' if !$self->{tls};
    return "$self->{tls}/$name";
}

sub _launch
{
    my ($self, @command) = @_;
    $self->{pid} = fork() // croak "fork: $!";
    return if $self->{pid};
    open(STDIN, '<', '/dev/null') && open(STDOUT, '>', $self->{output}) && open(STDERR, '>&', \*STDOUT)
      && exec { $command[0] } @command;
    # Not exit(): the END blocks of the parent's modules are not this child's.
    POSIX::_exit(127);
}

sub _gone
{
    my ($self) = @_;
    return 1 if !$self->{pid};
    local $?;
    return 0 if waitpid($self->{pid}, WNOHANG) == 0;
    delete $self->{pid};
    return 1;
}

sub _read_ports
{
    my ($self) = @_;
    open(my $file, '<', $self->{port_file}) or return 0;
    my %ports = map { /^(\w+)=(\d+)$/ ? ($1 => $2) : () } <$file>;
    $self->{ports} = \%ports;
    return 1;
}

# stop(): ends the endpoint; what hangs is recorded as unanswered. Its port refuses connections from then on.
sub stop
{
    my ($self) = @_;
    return if !$self->{pid} || $self->{owner} != $$;
    kill 'TERM', $self->{pid};
    eval {
        OutboxRelay::Wait::wait_until(sub { $self->_gone }, what => 'the endpoint to end', timeout => 10);
        1;
    } or do {
        kill 'KILL', $self->{pid};
        local $?;
        waitpid $self->{pid}, 0;
        delete $self->{pid};
    };
    return;
}

sub DESTROY
{
    my ($self) = @_;
    local ($@, $?, $!);
    $self->stop;
    return;
}

sub port { my ($self, $listener) = @_; return $self->{ports}{ $listener // 'http' } // croak 'no such listener'; }

sub log_file { return $_[0]{log}; }

# What the endpoint process itself printed.
sub output
{
    my ($self) = @_;
    open(my $file, '<', $self->{output}) or return "no output: $!";
    local $/;
    return <$file> // '';
}

# url(PATH, LISTENER): a URL of this endpoint; LISTENER is http (default) or tls_good, tls_expired, ...
sub url
{
    my ($self, $path, $listener) = @_;
    $listener //= 'http';
    return ($listener eq 'http' ? 'http' : 'https') . '://127.0.0.1:' . $self->port($listener) . ($path // '/ok');
}

# control(METHOD, PATH, DATA): one call of the control API; the answer's body. Dies when it is refused.
sub control
{
    my ($self, $method, $path, $data) = @_;
    my $answer = HTTP::Tiny->new(timeout => 30, proxy => undef, http_proxy => undef, keep_alive => 0)->request(
        $method,
        'http://127.0.0.1:' . $self->port('control') . $path,
        defined $data ? { content => $json->encode($data) } : {});
    croak "$method $path: $answer->{status} $answer->{content}" if !$answer->{success};
    return $answer->{content};
}

# count(): a hash of received, complete, acked (complete and 2xx), events (distinct acked event ids),
# finished, inflight, malformed, connections.
sub count { return $json->decode($_[0]->control('GET', '/count')); }

# inflight(): a list of hashes of the requests that are not over: n, target, event_id, complete, scenario, ...
sub inflight { return @{ $json->decode($_[0]->control('GET', '/inflight')) }; }

# requests(SINCE): a list of hashes, one a finished request, in the order in which they ended; SINCE skips so
# many. Whole and slow to decode: for thousands of requests take deliveries().
sub requests
{
    my ($self, $since) = @_;
    return map { $json->decode($_) } split /\n/, $self->control('GET', '/requests?since=' . ($since // 0));
}

# headers(REQUEST): the headers of one of requests(), a hash by lower-case name; the first of each name
# counts.
sub headers
{
    my ($self, $request) = @_;
    my %headers;
    for my $line (@{ $request->{headers} })
    {
        my ($name, $value) = split /:\s*/, $line, 2;
        $headers{ lc $name } //= $value;
    }
    return \%headers;
}

# by_event_id(): the finished requests as a hash of lists by Idempotency-Key ('' for those without).
sub by_event_id
{
    my ($self) = @_;
    my %by;
    push @{ $by{ $self->headers($_)->{'idempotency-key'} // '' } }, $_ for $self->requests;
    return \%by;
}

# deliveries(): all finished requests in short: hashes of n, head_at, answer_at, complete, acked, status,
# event_id, key; in the order in which they ended. Cheap: only new ones are fetched.
sub deliveries
{
    my ($self) = @_;
    my $all = $self->{deliveries};
    for my $line (split /\n/, $self->control('GET', '/deliveries?since=' . @$all))
    {
        my %delivery;
        @delivery{qw(n head_at answer_at complete acked status event_id key)} = split /\t/, $line, -1;
        push @$all, \%delivery;
    }
    return @$all;
}

# script(NAME, STEP...): the steps for requests to /script/NAME, for example { status => 500 }, '/rst'.
sub script
{
    my ($self, $name, @steps) = @_;
    return $self->control('POST', "/script/$name", \@steps);
}

# rules({ header => NAME, value => TEXT, step => STEP, times => N }, ...): answers by header, whatever the
# path.
sub rules { my ($self, @rules) = @_; return $self->control('POST', '/rules', \@rules); }

# release(ALWAYS): hanging requests get their answer; with ALWAYS those to come do not hang either.
sub release
{
    my ($self, $always) = @_;
    return $json->decode($self->control('POST', '/release', $always ? { always => 1 } : {}))->{released};
}

# reset(): forgets records, scripts and rules, drops what is in flight.
sub reset
{
    my ($self) = @_;
    $self->control('POST', '/reset');
    $self->{deliveries} = [];
    return;
}

# wait_until(CODE, %opts): OutboxRelay::Wait's, with the endpoint's counters and last requests in the diag.
# CODE gets the endpoint.
sub wait_until
{
    my ($self, $condition, %opts) = @_;
    my $more = delete $opts{diag};
    return OutboxRelay::Wait::wait_until(
        sub { $condition->($self) },
        %opts,
        diag => sub { $self->summary . ($more ? "\n" . $more->() : '') });
}

# wait_for_count(N, timeout => S, of => NAME): waits until a counter of count() is at least N, and returns it.
# NAME: complete (default), received, acked, events, inflight, finished, ... N may be followed by a bare
# timeout.
sub wait_for_count
{
    my ($self, $n, @rest) = @_;
    my %opts = @rest == 1 ? (timeout => $rest[0]) : @rest;
    my $of = delete $opts{of} // 'complete';
    my $got;
    $self->wait_until(
        sub { $got = $self->count->{$of} // croak "no counter $of"; $got >= $n },
        what => "$n requests ($of)", %opts);
    return $got;
}

# wait_for_inflight(CODE, %opts): waits for a request that is under way and for which CODE (given its hash) is
# true (default: its body is complete); returns the hash.
sub wait_for_inflight
{
    my ($self, $wanted, %opts) = @_;
    $wanted //= sub { $_[0]{complete} };
    return $self->wait_until(
        sub { (grep { $wanted->($_) } $self->inflight)[0] },
        what => 'a request under way', %opts);
}

# summary(): counters, what is in flight and the last ten requests, as text for a diag.
sub summary
{
    my ($self) = @_;
    return 'the endpoint is gone: ' . $self->output if $self->_gone;
    my @lines = ('endpoint: ' . JSON::PP->new->canonical->encode($self->count));
    push @lines, "in flight: $_->{n} $_->{target} $_->{event_id}" for $self->inflight;
    my @deliveries = $self->deliveries;
    splice @deliveries, 0, -10 if @deliveries > 10;
    push @lines, join ' ', 'ended:', @$_{qw(n event_id key status)} for @deliveries;
    return join "\n", @lines;
}

1;
