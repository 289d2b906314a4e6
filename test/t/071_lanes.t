# Many lanes: more than have a place, idle ones, some that hang, tenants in the order of their list, and a stop among them
# (spec.md section 8; conformance TEN-01, TEN-03, TEN-07, TEN-09, SHD-08, PUB-21; bugreports.md B-20; F-81, F-82).

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use List::Util qw(max sum0);
use Time::HiRes qw(sleep time);
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $lanes = $ENV{LANES} // 300;
my $seconds = $ENV{LANES_SECONDS} // 10;
my $tenants = $ENV{TENANTS} // 400;
my $e = OutboxRelay::Endpoint->start;

sub tenant { return sprintf '00000000-0000-4000-8000-%012d', $_[0]; }

sub tenants_function
{
    my ($node, $name, $from, $to) = @_;
    $node->safe_psql('postgres', "CREATE OR REPLACE FUNCTION app.$name() RETURNS SETOF uuid LANGUAGE sql STABLE AS
        'SELECT (''00000000-0000-4000-8000-'' || lpad(g::text, 12, ''0''))::uuid FROM generate_series($from, $to) AS g ORDER BY g DESC'");
    return "app.$name";
}

sub tenants_scene
{
    my ($node, $name, $from, $to, %columns) = @_;
    $e->reset;
    make_outbox($node, 'postgres', "app.$name", tenants => 1);
    create_route($node, $name, "app.$name", $e->url('/ok?t={tenant_id}'), tenants_function => tenants_function($node, "${name}_list", $from, $to), %columns);
    return "app.$name";
}

sub insert_for
{
    my ($node, $table, $route, $tenant, $count) = @_;
    insert_rows($node, $table, $route, $count, columns => { tenant_id => tenant($tenant) });
    return;
}

sub served { return map { $_->{target} =~ /t=[-0-9a-f]*?0*(\d+)$/ ? $1 : () } $e->requests; }
sub of_lanes { my ($node, $sql) = @_; return $node->safe_psql('postgres', "SELECT $sql FROM outbox_stat_route"); }

# Clock ticks that the extension's processes have used.
sub ticks
{
    my ($node) = @_;
    my $ticks = 0;
    for my $pid (split /\n/, $node->safe_psql('postgres', 'SELECT pid FROM outbox_stat_worker'))
    {
        open my $stat, '<', "/proc/$pid/stat" or next;
        my @fields = split ' ', (<$stat> =~ s/^.*\) //r);
        $ticks += $fields[11] + $fields[12];
    }
    return $ticks;
}

# Counts the polls of a route's lanes every tenth of a second, for so many seconds; then the rates, a second, of stretches
# of WIDTH seconds (by the server's clock, so that a late look at them is none of theirs).
sub make_sampler
{
    my ($node) = @_;
    $node->safe_psql('postgres', <<'SQL');
CREATE FUNCTION app.sample(name text, seconds float8, OUT at float8, OUT polls bigint) RETURNS SETOF record LANGUAGE plpgsql AS $$
DECLARE started timestamptz := clock_timestamp();
BEGIN
    LOOP
        polls := (SELECT coalesce(sum(passes), 0) FROM outbox_stat_route WHERE route = name);
        at := extract(epoch FROM clock_timestamp() - started);
        RETURN NEXT;
        EXIT WHEN at >= seconds;
        PERFORM pg_sleep(0.1 - (at - floor(at * 10) / 10));
    END LOOP;
END $$;
SQL
    return;
}

sub sampled_rates
{
    my ($node, $route, $for_seconds, $width) = @_;
    my ($from, @samples) = map { [ split /\|/ ] } split /\n/, $node->safe_psql('postgres', "SELECT * FROM app.sample('$route', $for_seconds)");
    my @rates;
    for my $sample (@samples)
    {
        next if $sample->[0] - $from->[0] < 0.95 * $width;
        push @rates, ($sample->[1] - $from->[1]) / ($sample->[0] - $from->[0]);
        $from = $sample;
    }
    return @rates;
}

# B-20: what a stall of this machine puts off comes at once behind it, so one stretch in twenty may.
sub few_above
{
    my ($most, $rates, $name) = @_;
    my @above = grep { $_ > $most } @$rates;
    cmp_ok(scalar @above, '<=', @$rates / 20, $name) or diag "of " . @$rates . " above $most a second: @above";
    return;
}

# Kilobytes that a process has in memory of its own.
sub resident
{
    my ($pid) = @_;
    open my $status, '<', "/proc/$pid/status" or return 0;
    return (join '', <$status>) =~ /^RssAnon:\s+(\d+)/m ? $1 : 0;
}

# Lane 17 of 16.
subtest 'more lanes than places' => sub {
    my $node = new_node('overflow', conf => "outbox_relay.max_lanes = 16\noutbox_relay.interval = '300ms'\n");
    make_outbox($node, 'postgres', 'app.outbox');
    create_route($node, "route$_", 'app.outbox', $e->url) for 1 .. 24;
    wait_sql($node, 'postgres', "SELECT count(*) FILTER (WHERE passes > 0) = 16 FROM outbox_stat_route");
    insert_rows($node, 'app.outbox', "route$_", 2) for 1 .. 24;
    wait_empty($node, 'app.outbox');
    insert_rows($node, 'app.outbox', "route$_", 2) for reverse 1 .. 24;
    wait_empty($node, 'app.outbox');
    is($e->count->{events}, 96, 'all are served');
    my @warnings = log_since($node, 0) =~ /(WARNING: .*outbox_relay.max_lanes is used up)/g;
    is(scalar @warnings, 1, 'one WARNING');
    like($warnings[0], qr/route "route\d+" has no lane of its own/, 'which names the first');
    tenants_scene($node, 'many', 1, 40);
    insert_for($node, 'app.many', 'many', $_, 1) for 1 .. 40;
    wait_empty($node, 'app.many');
    is(scalar(grep { !/used up/ } log_since($node, 0) =~ /WARNING: +(.*)/g), 0, 'tenants too, with no other WARNING');
    $node->stop;
};

# F-81 beyond max_lanes, of both kinds of table: those without a place are looked at, and served when they have rows.
for my $own_tables (0, 1)
{
    subtest "$tenants tenants, " . ($own_tables ? 'a table each' : 'one table') => sub {
        my $node = new_node("crowd$own_tables", conf => "autovacuum = off\noutbox_relay.max_lanes = 16\noutbox_relay.interval = '2s'\n");
        my ($table, %columns) = ('app.crowd');
        if ($own_tables)
        {
            $node->safe_psql('postgres', "CREATE SCHEMA app; CREATE FUNCTION app.table_of(tenant uuid) RETURNS text LANGUAGE sql IMMUTABLE AS
                \$\$SELECT 'app.crowd' || ltrim(right(tenant::text, 12), '0')\$\$");
            $node->safe_psql('postgres', "SET client_min_messages = warning; SELECT outbox_ddl('app.crowd' || g) FROM generate_series($_, least($_ + 99, $tenants)) g \\gexec") for map { 1 + 100 * $_ } 0 .. ($tenants - 1) / 100;
            ($table, %columns) = (undef, relation_function => 'app.table_of');
        }
        else
        {
            make_outbox($node, 'postgres', $table, tenants => 1);
        }
        $e->reset;
        create_route($node, 'crowd', $table, $e->url, tenants_function => tenants_function($node, 'crowd_list', 1, $tenants), %columns);
        wait_sql($node, 'postgres', 'SELECT passes > 1 FROM outbox_stat_route WHERE tenant_id IS NULL');
        my @some = map { 1 + int($tenants / 7) * $_ } 0 .. 6;
        my $put = sub { insert_for($node, $own_tables ? "app.crowd$_" : $table, 'crowd', $_, 2) for @some };
        $put->();
        $e->wait_for_count(14, of => 'acked');
        $put->();
        my $from = time;
        $e->wait_for_count(28, of => 'acked');
        my $wait = time - $from;
        cmp_ok($wait, '<', 8, 'rows that nobody woke for are found');
        my ($ticks, $xid) = (ticks($node), value($node, 'SELECT pg_snapshot_xmax(pg_current_snapshot())'));
        $from = time;
        sleep $seconds;
        my $share = (ticks($node) - $ticks) / (time - $from);
        diag sprintf '%d events: %d tenants (%s) with 16 lanes, idle: %.1f %% of a core, %d MB; rows found in %.1f s', 28, $tenants,
          $own_tables ? 'a table each' : 'one table', $share, (max map { resident($_) } split /\n/, value($node, 'SELECT pid FROM outbox_stat_worker')) / 1024, $wait;
        is(value($node, 'SELECT pg_snapshot_xmax(pg_current_snapshot())'), $xid, 'none of them takes a transaction id');
        cmp_ok($share, '<', 25, 'at little cost');
        $node->stop;
    };
}

my $node = new_node('lanes', conf => "autovacuum = off\noutbox_relay.max_lanes = 4096\noutbox_relay.interval = '2s'\n");

# TEN-03 (with one worker), PUB-21.
subtest 'tenants in the order of their list' => sub {
    set_conf($node, 'outbox_relay.workers' => 1);
    my $table = tenants_scene($node, 'ordered', 1, 20, enabled => 0);
    insert_for($node, $table, 'ordered', $_, 1) for 1 .. 20;
    $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = 'ordered'");
    wait_empty($node, $table);
    is_deeply([ served() ], [ reverse 1 .. 20 ], 'their first passes');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'ordered'");
    set_conf($node, 'outbox_relay.workers' => undef);
};

# TEN-07: what fails at the start is seen.
subtest 'a list that fails from the start' => sub {
    make_outbox($node, 'postgres', 'app.blind', tenants => 1);
    $node->safe_psql('postgres', "CREATE FUNCTION app.blind_list() RETURNS SETOF uuid LANGUAGE plpgsql AS \$f\$ BEGIN RAISE EXCEPTION 'no directory'; END \$f\$");
    my $offset = log_offset($node);
    create_route($node, 'blind', 'app.blind', $e->url, tenants_function => 'app.blind_list');
    my $lane = wait_lane($node, 'blind', "state = 'backoff' AND failed_passes > 0");
    like($lane->{last_error}, qr/no directory/, 'in the view');
    wait_log($node, qr/a pass of route "blind" failed: .*no directory/, $offset);
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'blind'");
};

# TEN-01: a table with tenants in it and a route without: one lane serves all.
subtest 'tenants that are only tags' => sub {
    $e->reset;
    make_outbox($node, 'postgres', 'app.tagged');
    create_route($node, 'tagged', 'app.tagged', $e->url('/ok?t={tenant_id}'), interval => '1h');
    wait_lane($node, 'tagged', "passes > 0 AND state = 'idle'");
    $node->safe_psql('postgres', "BEGIN; SELECT outbox_stage('tagged', 'x', '1', tenant_id => v) FROM unnest(ARRAY['" . join("','", map { tenant($_) } 1 .. 3) . "']::uuid[]) AS v; COMMIT");
    wait_empty($node, 'app.tagged');
    is_deeply([ sort(served()) ], [ 1 .. 3 ], 'each under its tenant');
    is_deeply([ sort map { $e->headers($_)->{forze_tenant_id} } $e->requests ], [ map { tenant($_) } 1 .. 3 ], 'in the headers too');
    is(lane($node, 'tagged')->{passes}, 2, 'by one pass');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'tagged'");
};

# A tenant's claim beside 300,000 rows of another, with statistics of before they were there.
subtest 'flat beside another tenant\'s backlog' => sub {
    my $table = tenants_scene($node, 'flat', 1, 2, enabled => 0);
    insert_for($node, $table, 'flat', 2, 10);
    $node->safe_psql('postgres', "ANALYZE $table");
    my $pass = sub { return $node->safe_psql('postgres', "SELECT published, (1000 * extract(epoch FROM clock_timestamp() - statement_timestamp()))::int FROM outbox_relay_pass('flat', 5, '" . tenant(1) . "')") };
    insert_for($node, $table, 'flat', 1, 5);
    $pass->();
    insert_for($node, $table, 'flat', 2, 300_000);
    insert_for($node, $table, 'flat', 1, 5);
    my $blocks = sub { return $node->safe_psql('postgres', "SELECT pg_stat_force_next_flush(); SELECT heap_blks_hit + heap_blks_read + idx_blks_hit + idx_blks_read FROM pg_statio_all_tables WHERE relid = '$table'::regclass") };
    my $before = $blocks->();
    my ($published) = split /\|/, $pass->();
    is($published, 5, 'its rows');
    sleep 0.2;
    my $read = (split /\n/, $blocks->())[-1] - (split /\n/, $before)[-1];
    diag "5 events of a tenant beside 300,000 of another: $read blocks";
    cmp_ok($read, '<', 500, 'read no more than a few blocks');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'flat'; DROP TABLE $table");
};

# B-20 with the numbers of the report: 1,000 lanes, one poll in five seconds of each.
subtest 'a cold start of a thousand lanes' => sub {
    tenants_scene($node, 'cold', 1, 1000, interval => '5s');
    make_sampler($node);
    $node->restart;
    wait_sql($node, 'postgres', 'SELECT sum(passes) > 1 FROM outbox_stat_route');
    my @rates = sampled_rates($node, 'cold', 20, 0.1);
    diag sprintf '%d events: 1000 lanes from a cold start, at most %.0f polls in a tenth of a second, %.0f on average', 0, (max @rates) / 10, sum0(@rates) / @rates / 10;
    few_above(3 * 200, \@rates, 'hardly a tenth of a second with more than three times the average');
    $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = 'cold'; DROP TABLE app.cold");
};

# F-81; B-20: lanes that came together drift apart.
subtest "$lanes idle lanes" => sub {
    # 200 polls a second.
    my $interval = $lanes / 200;
    my $table = tenants_scene($node, 'idle', 1, $lanes, interval => 1000 * $interval . 'ms');
    wait_sql($node, 'postgres', "SELECT count(*) FILTER (WHERE passes > 0) = $lanes + 1 FROM outbox_stat_route WHERE route = 'idle'");
    # For so long that all are due when the workers go on. Nothing is asked meanwhile: one may have stopped with a lock.
    my @pids;
    wait_until(sub { (@pids = worker_pids($node, 'postgres')) == 2 }, what => 'two workers');
    kill 'STOP', @pids;
    sleep 1.5 * $interval;
    kill 'CONT', @pids;
    my ($together) = max(sampled_rates($node, 'idle', 5 * $interval, 0.2));
    my ($ticks, $passes, $xid) = (ticks($node), of_lanes($node, 'sum(passes)'), value($node, 'SELECT pg_snapshot_xmax(pg_current_snapshot())'));
    my $from = time;
    my @rates = sampled_rates($node, 'idle', $seconds, 0.2);
    my $last = of_lanes($node, 'sum(passes)');
    my $elapsed = time - $from;
    my $share = (ticks($node) - $ticks) / $elapsed;
    diag sprintf '%d events: %d idle lanes, %.0f polls a second, %.1f %% of a core, in a fifth of a second at most %.0f behind a stop, %.0f later', 0,
      $lanes, ($last - $passes) / $elapsed, $share, $together / 5, (max @rates) / 5;
    few_above(3 * 200, \@rates, 'five intervals behind a stop they are spread again');
    cmp_ok(($last - $passes) / $elapsed, '>', 0.7 * 200, 'each is polled once an interval');
    is(value($node, 'SELECT pg_snapshot_xmax(pg_current_snapshot())'), $xid, 'without a transaction id');
    cmp_ok($share, '<', 10, 'at little cost');
    # Lanes that are only looked at see rows that no commit woke them for, and those that are parked, in time.
    insert_for($node, $table, 'idle', $_, 1) for 3, 7;
    insert_rows($node, $table, 'idle', 1, columns => { tenant_id => tenant(9), available_at => \"now() + interval '3 s'", attempts => 1 });
    wait_empty($node, $table);
    insert_rows($node, $table, 'idle', 1, columns => { tenant_id => tenant(9), status => 'processing', processing_at => \"now() - interval '1 h'" });
    wait_empty($node, $table);
    pass('and stale ones');
};

# F-82: one in a hundred hangs. The others' latency from the staging call to the request, before and beside.
subtest 'lanes that hang' => sub {
    my $latency = sub {
        my ($count) = @_;
        my %staged;
        for my $n (1 .. $count)
        {
            my $tenant = tenant(1 + int(rand($lanes - 3)));
            my $at = time;
            my $id = stage($node, 'idle', tenant_id => $tenant);
            $staged{$id} = $at;
            sleep 0.02;
        }
        my %at;
        $e->wait_until(sub { $at{ $_->{event_id} } //= $_->{head_at} for grep { exists $staged{ $_->{event_id} } } $e->deliveries; return keys %at == $count });
        my @sorted = sort { $a <=> $b } map { $at{$_} - $staged{$_} } keys %staged;
        return (1000 * $sorted[ $#sorted / 2 ], 1000 * $sorted[ int(0.99 * $#sorted) ]);
    };
    my @before = $latency->(200);
    make_outbox($node, 'postgres', 'app.hang');
    my $holes = max(2, int($lanes / 100));
    create_route($node, "hang$_", 'app.hang', $e->url('/hang'), request_timeout => '1s', connect_timeout => '500ms', interval => '1s') for 1 .. $holes;
    insert_rows($node, 'app.hang', "hang$_", 200) for 1 .. $holes;
    wait_sql($node, 'postgres', "SELECT count(*) = $holes FROM outbox_stat_route WHERE route LIKE 'hang%' AND breaker <> 'closed'");
    my @beside = $latency->(200);
    diag sprintf '%d events: latency ms p50 %.1f p99 %.1f, beside %d lanes that hang p50 %.1f p99 %.1f', 400, @before, $holes, @beside;
    cmp_ok($beside[1], '<', 10 * $before[1] + 500, 'the others do not wait for them');
    is(of_lanes($node, "max(EXTRACT(epoch FROM backoff_until - now())) FILTER (WHERE route = 'idle')"), '', 'nor back off');
    $node->safe_psql('postgres', "DELETE FROM outbox_route");
    $e->release(1000);
    # The table has rows of routes that are no more.
    $node->safe_psql('postgres', 'DROP TABLE app.hang');
};

# TEN-09: a stop in the first tenant's pass leaves the others untouched.
for my $drain (0, 1)
{
    subtest $drain ? 'SHD-08: a stop drains them in order' : 'TEN-09: a stop among tenants' => sub {
        set_conf($node, 'outbox_relay.workers' => 1);
        my $name = "stop$drain";
        my $table = tenants_scene($node, $name, 1, 5, enabled => 0, interval => '1h', drain_on_shutdown => $drain);
        $node->safe_psql('postgres', "UPDATE outbox_route SET url = '" . $e->url('/slow?ms=500&t={tenant_id}') . "' WHERE name = '$name'");
        insert_for($node, $table, $name, $_, 2) for 1 .. 5;
        $node->safe_psql('postgres', "CREATE FUNCTION app.${name}_refuse() RETURNS trigger LANGUAGE plpgsql AS \$f\$ BEGIN RAISE EXCEPTION 'not this one'; END \$f\$;
            CREATE TRIGGER refuse BEFORE DELETE ON $table FOR EACH ROW WHEN (old.tenant_id = '" . tenant(4) . "') EXECUTE FUNCTION app.${name}_refuse()");
        $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = '$name'");
        $e->wait_for_count(2, of => 'inflight');
        $node->stop('fast');
        my @served = served();
        if ($drain)
        {
            is_deeply([ @served[ 0, 2, 4, 6, 8 ] ], [ 5, 4, 3, 2, 1 ], 'each, in the order of the list; one that fails does not stop the rest');
        }
        else
        {
            is_deeply(\@served, [ 5, 5 ], 'the first alone');
        }
        $node->append_conf('postgresql.auto.conf', "outbox_relay.enabled = off\n");
        $node->start;
        my $left = value($node, "SELECT string_agg(DISTINCT ltrim(right(tenant_id::text, 12), '0'), ',') FROM $table");
        is($left, $drain ? '4' : '1,2,3,4', 'rows of the others are there');
        $node->safe_psql('postgres', "DROP TRIGGER refuse ON $table");
        $node->safe_psql('postgres', "DELETE FROM outbox_route WHERE name = '$name'");
        set_conf($node, 'outbox_relay.enabled' => undef, 'outbox_relay.workers' => undef);
    };
}

done_testing();
