# Kills under load: three lanes, sessions that go on staging, and at each place of a pass the worker, another backend,
# the checkpointer or the postmaster killed, or an immediate shutdown. The oracle compares what committed, what the
# endpoint acknowledged and what the table holds. Repeats are not allowed "some": the workers stand still at the place
# when the blow falls, so what was acknowledged and not yet settled is known, and these come once more, no others.
# FAULTS_FULL=1: every blow at every place. Then a full disk.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use File::Temp ();
use POSIX qw(_exit);
use Test::More;
use Time::HiRes qw(usleep);
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;
use OutboxRelay::Oracle;

my $batch = 10;
my @lanes = qw(one two three);
my $workers = 2;
my $node = new_node('faults', fsync => 1, conf => "outbox_relay.workers = $workers\nautovacuum = off\ninclude 'fault.conf'\n", start => 0);
write_conf('');
$node->start;
$node->safe_psql('postgres', 'CREATE EXTENSION outbox_relay');
my $e = OutboxRelay::Endpoint->start;
make_outbox($node, 'postgres', 'app.outbox');
create_route($node, $_, 'app.outbox', $e->url, interval => '100ms', retry_base_delay => '100ms', retry_max_backoff => '400ms',
    concurrency => 4, max_claim_rows => $batch) for @lanes;
my $oracle = OutboxRelay::Oracle->new(node => $node, relation => 'app.outbox', endpoint => $e);

# The parameters that are changed while the server is down or has no time for ALTER SYSTEM.
sub write_conf
{
    my ($lines) = @_;
    my $file = $node->data_dir . '/fault.conf';
    open(my $out, '>', "$file.new") or die "$file: $!";
    print $out "$lines\n";
    close $out or die "$file: $!";
    rename "$file.new", $file or die "$file: $!";
    return;
}

# A session that goes on staging, two events a transaction, some rolled back, and writes down which it was told have
# committed; a new session when the server comes back. Ends with this process or stop_stagers().
my $scratch = File::Temp->newdir;
my @stagers;

sub start_stager
{
    my ($number) = @_;
    my $script = "$scratch/stage_$number.sql";
    open(my $out, '>', $script) or die "$script: $!";
    for my $turn (1 .. 200)
    {
        my $lane = $lanes[ ($turn + $number) % @lanes ];
        my $calls = join ', ', map { "outbox_stage('$lane', 'load', '{}', ordering_key => 'k' || $_ + 2 * $number) AS e$_" } 1, 2;
        print $out $turn % 20 == 0
          ? "BEGIN; SELECT $calls \\gset\nROLLBACK;\n"
          : "BEGIN; SELECT $calls \\gset\nINSERT INTO " . $oracle->truth_table
          . " (event_id, ordering_key) VALUES (:'e1', NULL), (:'e2', NULL);\nCOMMIT;\n\\echo :e1 :e2\nSELECT pg_sleep(0.01) \\g /dev/null\n";
    }
    close $out or die "$script: $!";
    my $pid = fork() // die "fork: $!";
    if (!$pid)
    {
        setpgrp;
        # The servers are the parent's: newer test modules stop them when a signal ends us.
        local @SIG{qw(TERM INT)} = ('DEFAULT') x 2;
        local $ENV{PGAPPNAME} = 'stager';
        open(STDOUT, '>>', "$scratch/told_$number") && open(STDERR, '>', '/dev/null') or _exit(1);
        while (getppid() != 1)
        {
            system 'psql', '-X', '-q', '-A', '-t', '-v', 'ON_ERROR_STOP=1', '-d', $node->connstr('postgres'), '-f', $script;
            usleep(50_000) if $? != 0;
        }
        _exit(0);
    }
    push @stagers, $pid;
    return;
}

sub stop_stagers
{
    kill 'TERM', -$_ for @stagers;
    waitpid $_, 0 for splice @stagers;
    wait_sql($node, 'postgres', q{SELECT count(*) = 0 FROM pg_stat_activity WHERE application_name = 'stager'});
    return;
}

END { kill 'TERM', -$_ for @stagers; }

# What was acknowledged and has still its row: while the workers stand still and nothing is in flight, exactly what a
# crash repeats. An event that has not been sent again since the round before does not count anew.
my %expected;    # event id => the rounds that repeat it
my %sent;        # event id => how often it had been sent when it was noted last

sub note_unsettled
{
    my ($round) = @_;
    $e->wait_until(sub { $e->count->{inflight} == 0 }, what => 'nothing in flight');
    my %times;
    $times{ $_->{event_id} }++ for grep { $_->{complete} && $_->{acked} } $e->deliveries;
    my @unsettled = grep { $times{$_} && $times{$_} > ($sent{$_} // 0) }
      split /\n/, $node->safe_psql('postgres', 'SELECT event_id FROM app.outbox');
    for my $event (@unsettled)
    {
        push @{ $expected{$event} }, $round;
        $sent{$event} = $times{$event};
    }
    return scalar @unsettled;
}

sub other_process { return value($node, "SELECT pid FROM pg_stat_activity WHERE backend_type = '$_[0]'"); }

# Kills a child of the postmaster; returns when the postmaster knows, and so has told all the others to quit.
sub kill_child
{
    my ($pid) = @_;
    kill 'KILL', $pid or die "kill $pid: $!";
    wait_until(sub { !kill 0, $pid }, what => 'the postmaster to see the death');
    write_conf('');
    $node->reload;
    return;
}

my %blows = (
    backend => sub {
        my $other = $node->background_psql('postgres');
        my $pid = $other->query_safe('SELECT pg_backend_pid()');
        kill_child($pid);
        eval { $other->quit };
    },
    checkpointer => sub { kill_child(other_process('checkpointer')); },
    immediate => sub {
        $node->stop('immediate');
        write_conf('');
        $node->start;
    },
    postmaster => sub {
        my ($postmaster) = PostgreSQL::Test::Utils::slurp_file($node->data_dir . '/postmaster.pid') =~ /^(\d+)/;
        my @children = split ' ', `ps -o pid= --ppid $postmaster`;
        $node->kill9;
        write_conf('');
        # As long as one is there, a new server does not start.
        wait_until(sub { !grep { kill 0, $_ } @children }, what => 'the children to follow their postmaster');
        $node->start;
    });

# How many rows of one lane have been acknowledged and not settled when its pass stands at a place: least and most.
my %place = (
    after_begin => [ 0, 0 ], after_claim => [ 0, 0 ], 'after_publish:3' => [ 3, 7 ], before_settle => [ 1, $batch ],
    in_settle => [ 1, $batch ], before_commit => [ 1, $batch ], after_commit => [ 0, 0 ]);

# All workers stand at the place, then the blow.
sub blow_at
{
    my ($place, $blow) = @_;
    my ($name) = $place =~ /^(\w+)/;
    my $offset = log_offset($node);
    write_conf("outbox_relay.fault_point = '$place=wait'");
    $node->reload;
    wait_log($node, qr/(?:fault point $name reached: wait.*){$workers}/s, $offset);
    my $unsettled = note_unsettled("$blow at $place");
    my ($least, $most) = map { $_ * $workers } @{ $place{$place} };
    ok($least <= $unsettled && $unsettled <= $most, "$blow at $place: repeats $unsettled, within $least and $most")
      or diag($e->summary);
    $blows{$blow}->();
    wait_for_server($node);
    return;
}

# A worker kills itself at the place, wherever the other one is.
sub suicide_at
{
    my ($place) = @_;
    my ($name) = $place =~ /^(\w+)/;
    my $offset = log_offset($node);
    write_conf("outbox_relay.fault_point = '$place=kill'");
    $node->reload;
    wait_log($node, qr/fault point $name reached: kill/, $offset);
    my ($pid) = log_since($node, $offset) =~ /\[(\d+)\] \S+ .*fault point $name reached: kill/;
    # Nothing relays until the repeats are known.
    write_conf('outbox_relay.enabled = off');
    wait_until(sub { !kill 0, $pid }, what => 'the postmaster to see the death');
    $node->reload;
    wait_for_server($node);
    my $unsettled = note_unsettled("worker at $place");
    # The other worker may have been anywhere, or at the same place.
    my $most = $place{$place}[1] + $batch * ($workers - 1);
    cmp_ok($unsettled, '<=', $most, "worker at $place: repeats $unsettled, at most $most") or diag($e->summary);
    write_conf('');
    $node->reload;
    return;
}

my @places = ('after_begin', 'after_claim', 'after_publish:3', 'before_settle', 'in_settle', 'before_commit', 'after_commit');
my @kinds = sort keys %blows;
my @rounds = $ENV{FAULTS_FULL}
  ? map { my $place = $_; map { [ $place, $_ ] } 'worker', @kinds } @places
  : map { ([ $places[$_], 'worker' ], [ $places[$_], $kinds[ $_ % @kinds ] ]) } 0 .. $#places;

start_stager($_) for 1 .. 3;
for (@rounds)
{
    my ($place, $blow) = @$_;
    wait_for_worker($node, 'postgres');
    $blow eq 'worker' ? suicide_at($place) : blow_at($place, $blow);
}
stop_stagers();
wait_empty($node, 'app.outbox', endpoint => $e);

$oracle->check_nothing_lost(undef, empty => 1);
$oracle->check_nothing_invented;
my %truth = map { $_ => 1 } split /\n/, $node->safe_psql('postgres', 'SELECT event_id FROM ' . $oracle->truth_table);
my @told = map { split ' ', PostgreSQL::Test::Utils::slurp_file($_) } glob "$scratch/told_*";
is(scalar(grep { !$truth{$_} } @told), 0, 'what a client was told has committed survived (' . @told . ' events)');
cmp_ok(scalar @told, '>', 100, 'there was a load');
my $repeated = $oracle->compare->{duplicates};
my @wrong = map {
    my ($is, $should) = ($repeated->{$_} // 0, scalar @{ $expected{$_} // [] });
    $is == $should ? () : "$_: $is repeats, not $should" . ($should ? " (@{ $expected{$_} })" : '');
} sort keys %{ { %$repeated, %expected } };
my $times = 0;
$times += @$_ for values %expected;
is(scalar @wrong, 0, "$times repeats, each where a crash explains it, and every one of these")
  or diag(join "\n", splice @wrong, 0, 20);
is(value($node, 'SELECT count(*) FROM outbox_stat_route WHERE set_aside > 0'), 0, 'no row was blamed');

# F-47: the disk of the outbox and of what a trigger writes at its deletion is full.
subtest 'a full disk' => sub {
    my $disk = $ENV{OUTBOX_RELAY_SMALL_DISK};
    plan skip_all => 'no small disk: it takes a user who may mount one, see scripts/check-process' if !$disk;
    $e->reset;
    mkdir "$disk/space" or die "$disk/space: $!";
    $node->safe_psql('postgres', "CREATE TABLESPACE small LOCATION '$disk/space'");
    make_outbox($node, 'postgres', 'app.full');
    $node->safe_psql('postgres', <<'SQL');
ALTER TABLE app.full SET TABLESPACE small;
CREATE TABLE app.archive (event_id uuid, filler text) TABLESPACE small;
ALTER TABLE app.archive ALTER filler SET STORAGE EXTERNAL;
CREATE FUNCTION app.archive() RETURNS trigger LANGUAGE plpgsql AS $$
    BEGIN INSERT INTO app.archive VALUES (OLD.event_id, repeat('x', 20000)); RETURN NULL; END $$;
CREATE TRIGGER archive AFTER DELETE ON app.full FOR EACH ROW EXECUTE FUNCTION app.archive();
SQL
    create_route($node, 'full', 'app.full', $e->url, interval => '100ms', retry_base_delay => '100ms', retry_max_backoff => '400ms',
        enabled => 'false');
    my @ids = stage_many($node, 'full', 30);
    my $judge = OutboxRelay::Oracle->new(node => $node, relation => 'app.full', endpoint => $e, truth => \@ids);

    # Fills the file system to its last block; returns the file.
    my $fill = sub {
        my $ballast = "$disk/ballast";
        open(my $out, '>', $ballast) or die "$ballast: $!";
        1 while syswrite $out, 'x' x 4096;
        die "$ballast: $!" if !$!{ENOSPC};
        close $out;
        return $ballast;
    };
    my $ballast = $fill->();
    my $offset = log_offset($node);
    $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = 'full'");
    my $lane = wait_lane($node, 'full', 'failed_passes >= 3');
    like($lane->{last_error}, qr/No space left on device/, 'passes fail and say why');
    is($lane->{set_aside}, 0, 'no row is blamed');
    is(value($node, "SELECT count(*) FROM app.full WHERE status = 'pending' AND attempts = 0"), 30, 'the rows are as they were');
    my ($out, $err) = ('', '');
    $node->psql('postgres', q{SELECT outbox_stage('full', 'late', jsonb_build_object('a', repeat('x', 1000))) FROM generate_series(1, 2000)},
        stdout => \$out, stderr => \$err);
    like($err, qr/No space left on device/, 'staging fails as a whole, with the reason');
    unlink $ballast or die "$ballast: $!";
    wait_empty($node, 'app.full', all => 1, endpoint => $e);
    $judge->check_nothing_lost('with space again all is delivered', empty => 1);
    $judge->check_nothing_invented('and nothing of the staging that failed');
    $judge->check_duplicates_at_most(0, 'each event was published once');
    is(value($node, 'SELECT count(*) FROM app.archive'), 30, 'and archived once');

    # The same where a failed request can't be written down.
    $node->safe_psql('postgres', "DROP TRIGGER archive ON app.full; UPDATE outbox_route SET url = '" . $e->url('/status/500')
          . "', breaker_threshold = 0, max_attempts = 0 WHERE name = 'full'; VACUUM FULL app.full");
    $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = false WHERE name = 'full'");
    push @ids, stage_many($node, 'full', 30);
    $ballast = $fill->();
    # The pages that the table has are filled as well.
    $node->psql('postgres', q{DO $$ BEGIN LOOP PERFORM outbox_stage('full', 'filler', '{}', available_at => 'infinity'); COMMIT; END LOOP; END $$},
        stderr => \$err);
    like($err, qr/No space left on device/, 'the table is full');
    $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = 'full'");
    $lane = wait_lane($node, 'full', 'failed_passes >= 6');
    like($lane->{last_error}, qr/No space left on device/, 'passes fail where a retry has to be written');
    is(value($node, "SELECT count(*) FROM app.full WHERE available_at IS NULL AND attempts = 0"), 30, 'no attempt is counted');
    unlink $ballast or die "$ballast: $!";
    $node->safe_psql('postgres', "UPDATE outbox_route SET url = '" . $e->url . "' WHERE name = 'full'");
    wait_sql($node, 'postgres', "SELECT count(*) = 0 FROM app.full WHERE available_at IS DISTINCT FROM 'infinity'");
    $node->safe_psql('postgres', "DELETE FROM app.full WHERE event_type = 'filler'");
    $judge->check_nothing_lost('with space again all of these too', empty => 1);
};

$node->stop;
done_testing();
