# The hybrid logical clock of a server: unique under concurrency, what it needs, and its order across servers.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use IPC::Run ();
use OutboxRelay::Endpoint;
use OutboxRelay::Node;

my $e = OutboxRelay::Endpoint->start;
my $node = new_node('one', conf => "max_connections = 80\n", init => { allows_streaming => 1 });

# The headers of each request so far, in order of arrival.
sub all_headers { return map { $e->headers($_) } sort { $a->{n} <=> $b->{n} } $e->requests; }

sub value { my ($n, $sql) = @_; return $n->safe_psql('postgres', $sql); }

# Runs SQL in COUNT sessions of a node at once; dies where one fails.
sub in_sessions
{
    my ($n, $count, $sql) = @_;
    my @sessions;
    for my $i (1 .. $count)
    {
        my ($in, $out) = ($sql->($i), '');
        push @sessions,
          IPC::Run::start([ 'psql', '-XAtq', '-v', 'ON_ERROR_STOP=1', '-d', $n->connstr('postgres') ],
            '<', \$in, '>&', \my $text);
    }
    my $failed = grep { !$_->finish } @sessions;
    return $failed;
}

# HLC-23: nothing is remembered where no checkpoint is
is(value($node, 'SELECT hlc_last()'), 0, 'a fresh server has given no stamp');
value($node, 'SELECT hlc_now()');
$node->restart;
is(value($node, 'SELECT hlc_last()'), 0, 'nor has a restarted one');

# HLC-20
subtest '50 sessions of 10,000 stamps' => sub {
    value($node, 'CREATE UNLOGGED TABLE stamps (session int, n int, stamp bigint)');
    my $failed = in_sessions($node, 50,
        sub { "INSERT INTO stamps SELECT $_[0], n, hlc_now() FROM generate_series(1, 10000) n;\n" });
    is($failed, 0, 'all sessions end well');
    is(value($node, 'SELECT count(*), count(DISTINCT stamp) FROM stamps'), '500000|500000', 'all are unique');
    is(value($node, <<'SQL'), 't', 'and rise in each session');
SELECT bool_and(stamp > before) FROM (
    SELECT stamp, lag(stamp, 1, 0::bigint) OVER (PARTITION BY session ORDER BY n) AS before FROM stamps) AS s
SQL
    value($node, 'DROP TABLE stamps');
};

# HLC-14: a reaction sorts after its cause, whatever the two servers' clocks say
subtest 'two servers, one four minutes behind, exchange the header' => sub {
    my $faketime = (glob '/usr/lib/*/faketime/libfaketime.so.1')[0];
    ok($faketime, 'libfaketime is here') or return;
    my $behind = new_node('behind', start => 0);
    {
        local $ENV{LD_PRELOAD} = join ' ', grep { defined && length } $ENV{LD_PRELOAD}, $faketime;
        local $ENV{FAKETIME} = '-4m';
        local $ENV{FAKETIME_DONT_FAKE_MONOTONIC} = 1;
        $behind->start;
    }
    $behind->safe_psql('postgres', 'CREATE EXTENSION outbox_relay');
    for ($node, $behind)
    {
        make_outbox($_, 'postgres', 'app.outbox', hlc => 1);
        create_route($_, 'events', 'app.outbox', $e->url, hlc_ordering => 1, interval => '200ms');
    }
    cmp_ok(value($behind, 'SELECT extract(epoch FROM clock_timestamp())::bigint') + 200,
        '<', value($node, 'SELECT extract(epoch FROM clock_timestamp())::bigint'), 'its wall clock is behind');
    my @chain;
    for my $round (1 .. 5)
    {
        for my $server ($node, $behind)
        {
            isnt(value($server, "SELECT hlc_observe('$chain[-1]')"), '', 'the cause is observed') if @chain;
            my $id = stage($server, 'events');
            my $headers = $e->wait_until(sub { (grep { $_->{'ce-id'} eq $id } all_headers())[0] }, what => "event $id");
            is($headers->{'forze_hlc'}, $headers->{'ce-hlc'}, 'both headers carry it');
            push @chain, $headers->{'forze_hlc'};
        }
    }
    like($_, qr/^[0-9]{15}\.[0-9]{5}$/, "the header's form") for @chain[0, 1];
    is_deeply(\@chain, [ sort @chain ], 'each hop sorts after the one before');
    my %seen;
    is(scalar(grep { $seen{$_}++ } @chain), 0, 'strictly');
    $behind->stop;
};

# HLC-22, and the order of what is published (CLM-07)
subtest 'rows go out by (hlc NULLS LAST, created_at, id)' => sub {
    make_outbox($node, 'postgres', 'app.ordered', hlc => 1);
    for my $mode (1, 0)
    {
        my $route = "ordered_$mode";
        create_route($node, $route, 'app.ordered', $e->url, hlc_ordering => $mode, enabled => 0,
            interval => '100ms', concurrency => 1);
        # hlc runs against created_at; two rows without, two with equal stamps
        my @rows = ([ 5, 1 ], [ 4, 2 ], [ 3, 3 ], [ 3, 4 ], [ 1, 5 ], [ undef, 0 ], [ undef, 6 ], [ 2, 7 ]);
        for my $i (0 .. $#rows)
        {
            my ($hlc, $at) = @{ $rows[$i] };
            insert_rows($node, 'app.ordered', $route, 1, type => "r$i",
                columns => { hlc => $hlc, created_at => \"timestamptz '2026-01-01' + interval '$at s'" });
        }
        value($node, "UPDATE outbox_route SET enabled = true WHERE name = '$route'");
        wait_empty($node, 'app.ordered', all => 1, endpoint => $e);
        my @order = map { $_->{'ce-type'} } grep { $_->{'ce-source'} =~ /\/$route$/ } all_headers();
        my @expected = $mode ? qw(r4 r7 r2 r3 r1 r0 r5 r6) : qw(r5 r0 r1 r2 r3 r4 r6 r7);
        is_deeply(\@order, \@expected, $mode ? 'by stamp' : 'mode off: by created_at');
    }
    my @stamped = grep { defined $_->{'ce-hlc'} } all_headers();
    my $with = grep { $_->{'ce-source'} =~ /ordered_1$/ } @stamped;
    my $without = grep { $_->{'ce-source'} =~ /ordered_0$/ } @stamped;
    is($with, 6, 'stamped rows have the header');
    is($without, 0, 'mode off: none has');
};

# A claim in hlc order walks its index, also where nothing was ever analyzed and the other index is the tighter one
subtest 'claims stay flat in the backlog' => sub {
    make_outbox($node, 'postgres', 'app.flat', hlc => 1);
    value($node, 'ALTER TABLE app.flat SET (autovacuum_enabled = off)');
    create_route($node, 'flat', 'app.flat', $e->url, hlc_ordering => 1, enabled => 0, interval => '100ms', max_claim_rows => 200);
    insert_rows($node, 'app.flat', 'flat', 10_000, columns => { hlc => \'20000 - g' });
    insert_rows($node, 'app.flat', 'flat', 10_000, columns => { hlc => \'g', available_at => \q{now() + interval '1 hour'} });
    my $scans = q{SELECT seq_scan || ' ' || idx_tup_fetch || ' ' || n_tup_del FROM pg_stat_user_tables WHERE relid = 'app.flat'::regclass};
    my ($sequential, $fetched) = split / /, value($node, $scans);
    value($node, "UPDATE outbox_route SET enabled = true WHERE name = 'flat'");
    wait_sql($node, 'postgres', q{SELECT n_tup_del = 10000 FROM pg_stat_user_tables WHERE relid = 'app.flat'::regclass});
    my ($sequential_after, $fetched_after) = split / /, value($node, $scans);
    is($sequential_after, $sequential, 'no sequential scan');
    cmp_ok($fetched_after - $fetched, '<', 50_000, 'few more rows are fetched than there are: ' . ($fetched_after - $fetched) . ' for 10,000');
    value($node, "DELETE FROM outbox_route WHERE name = 'flat'");
};

subtest 'what stamping needs' => sub {
    my $late = new_node('late', preload => '', extension => 1);
    make_outbox($late, 'postgres', 'app.outbox', hlc => 1);
    create_route($late, 'plain', 'app.outbox', 'http://127.0.0.1:9/');
    create_route($late, 'stamped', 'app.outbox', 'http://127.0.0.1:9/', hlc_ordering => 1);
    isnt(value($late, "SELECT outbox_stage('plain', 't', '{}')"), '', 'plain staging works without the preload');
    is(value($late, 'SELECT hlc_encode(hlc_pack(9000, 7))'), '000000000009000.00007', 'so do the conversions');
    for my $sql ("SELECT outbox_stage('stamped', 't', '{}')", 'SELECT hlc_now()', 'SELECT hlc_last()',
        'SELECT hlc_update(1)')
    {
        my (undef, undef, $error) = $late->psql('postgres', "\\set VERBOSITY verbose\n$sql");
        like($error, qr/55000: .*preloaded.*HINT:.*shared_preload_libraries/s, "$sql: says what it needs");
    }
    is(value($late, 'SELECT count(*) FROM app.outbox WHERE outbox_route = $$stamped$$'), 0, 'nothing was staged');
    $late->stop;

    $node->backup('base');
    my $standby = PostgreSQL::Test::Cluster->new('standby');
    $standby->init_from_backup($node, 'base', has_streaming => 1);
    $standby->start;
    $node->wait_for_catchup($standby, 'replay');
    my (undef, undef, $error) = $standby->psql('postgres', "\\set VERBOSITY verbose\nSELECT hlc_now()");
    like($error, qr/25006: .*recovery/, 'no stamps in recovery');
    is(value($standby, 'SELECT hlc_last()'), 0, 'a peek works there');
    $standby->stop;
};

done_testing();
