# Probes in READ ONLY transactions and on a real standby, and what they read: never a published row, whatever the
# statistics say.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $node = new_node('probes', init => { allows_streaming => 1 },
    conf => "autovacuum = off\nsession_preload_libraries = 'auto_explain'\nwal_level = replica\n");
make_outbox($node, 'postgres', 'app.outbox');
make_outbox($node, 'postgres', 'app.hlc', hlc => 1);
my @routes = qw(orders drained empty);
create_route($node, $_, 'app.outbox', 'http://127.0.0.1:9/', enabled => 0) for @routes;
create_route($node, 'stamped', 'app.hlc', 'http://127.0.0.1:9/', enabled => 0, hlc_ordering => 1);

# A row for each in 1 .. COUNT.
sub put
{
    my ($route, $status, $count, %columns) = @_;
    my $table = $route eq 'stamped' ? 'app.hlc' : 'app.outbox';
    my %row = (id => \'gen_random_uuid()', outbox_route => $route, event_id => \'gen_random_uuid()', event_type => 't', occurred_at => \'now()',
        payload => '1', status => $status, created_at => \q{now() - interval '1 h'}, %columns);
    my @names = sort keys %row;
    $node->safe_psql('postgres', "INSERT INTO $table (" . join(', ', @names) . ') SELECT ' . join(', ', map { sql_literal($row{$_}) } @names) . " FROM generate_series(1, $count) g");
    return;
}

for my $route ('orders', 'drained', 'stamped')
{
    put($route, 'published', 5000);
    put($route, 'failed', 3);
}
for my $route ('orders', 'stamped')
{
    put($route, 'pending', 20);
    put($route, 'pending', 5, available_at => \q{now() + interval '1 h'});
    put($route, 'processing', 2);
}

# Ten million published rows in the statistics: as many a page as it takes.
$node->safe_psql('postgres', <<'SQL');
ANALYZE app.outbox, app.hlc;
UPDATE pg_class SET reltuples = 1e7 WHERE oid IN ('app.outbox'::regclass, 'app.hlc'::regclass);
SQL

my %calls = (
    outbox_depth => '25|2|3', outbox_has_undrained => 't', outbox_oldest_pending_age => undef);

# Each statement that a call runs, as auto_explain logs it: the plan, and the rows that its scans gave.
sub plans
{
    my ($call) = @_;
    my $offset = log_offset($node);
    my $result = $node->safe_psql('postgres', <<"SQL");
SET auto_explain.log_min_duration = 0; SET auto_explain.log_analyze = on; SET auto_explain.log_timing = off;
SET auto_explain.log_nested_statements = on; SET auto_explain.log_format = 'text';
SELECT * FROM $call;
SQL
    wait_log($node, qr/Query Text: SELECT \* FROM \Q$call\E/, $offset);
    my $log = log_since($node, $offset);
    return ($result, $log);
}

subtest 'no probe reads a published row' => sub {
    is(value($node, q{SELECT reltuples::bigint FROM pg_class WHERE oid = 'app.outbox'::regclass}), 10_000_000, 'ten million, says the planner');
    for my $route ('orders', 'stamped')
    {
        for my $function (sort keys %calls)
        {
            my ($result, $log) = plans("$function('$route')");
            is($result, $calls{$function}, "$function of $route") if defined $calls{$function};
            unlike($log, qr/Seq Scan|Bitmap|Sort/, 'neither the whole table nor a sort');
            my @scans = $log =~ /Index (?:Only )?Scan.*?actual rows=(\d+)/g;
            ok(@scans > 0, 'by the index');
            my @conditions = $log =~ /Index Cond: (.*)/g;
            is(scalar(grep { !/status = '(?:pending|processing|failed)'/ } @conditions), 0, 'each scan names a status that is not published');
            is(scalar(() = $log =~ /Rows Removed by Filter/g), 0, 'and reads what it counts alone');
        }
        my (undef, $log) = plans("outbox_has_undrained('$route')");
        my @read = grep { $_ > 0 } $log =~ /Scan using \S+ on \S+ .*?actual rows=(\d+)/g;
        is("@read", '1', "outbox_has_undrained of $route: one row of one seek");
        like($log, qr/never executed/, 'the second is not needed');
    }
    my ($result, $log) = plans(q{outbox_has_undrained('drained')});
    is($result, 'f', 'a drained route');
    is(scalar(grep { $_ > 0 } $log =~ /Scan using \S+ on \S+ .*?actual rows=(\d+)/g), 0, 'reads nothing');

    # A requeue reads the failed rows alone, by the planner's choice.
    my $offset = log_offset($node);
    $node->safe_psql('postgres', q{SET auto_explain.log_min_duration = 0; SET auto_explain.log_nested_statements = on; BEGIN; SELECT outbox_requeue_failed('orders'); ROLLBACK});
    wait_log($node, qr/Query Text: SELECT outbox_requeue_failed/, $offset);
    unlike(log_since($node, $offset), qr/Seq Scan/, 'outbox_requeue_failed neither');
};

# The documented indexes suffice for every statement of a retain pass, the reclaim too.
subtest 'no retain pass reads the table from end to end' => sub {
    my $e = OutboxRelay::Endpoint->start;
    my $own = new_node('retain_plans', preload => 'auto_explain,outbox_relay', conf => "autovacuum = off\noutbox_relay.interval = '200ms'\n");
    make_outbox($own, 'postgres', 'app.outbox');
    create_route($own, 'kept', 'app.outbox', $e->url, storage => 'retain', enabled => 0, reclaim_stale_after => '1 min', max_claim_rows => 40);
    my $row = sub { my ($status, $count, $more) = @_; $own->safe_psql('postgres', "INSERT INTO app.outbox (id, outbox_route, event_id, event_type, occurred_at, payload, status, created_at, processing_at)
        SELECT gen_random_uuid(), 'kept', gen_random_uuid(), 't', now(), '1', '$status', now(), $more FROM generate_series(1, $count)") };
    $row->('published', 20_000, 'NULL');
    $own->safe_psql('postgres', "ANALYZE app.outbox; UPDATE pg_class SET reltuples = 1e7 WHERE oid = 'app.outbox'::regclass");
    $row->('pending', 100, 'NULL');
    $row->('processing', 5, "now() - interval '1 h'");
    $own->safe_psql('postgres', "ALTER SYSTEM SET auto_explain.log_min_duration = 0; ALTER SYSTEM SET auto_explain.log_nested_statements = on");
    $own->safe_psql('postgres', 'SELECT pg_reload_conf()');
    my $offset = log_offset($own);
    $own->safe_psql('postgres', "UPDATE outbox_route SET enabled = true WHERE name = 'kept'");
    wait_sql($own, 'postgres', "SELECT count(*) = 105 FROM app.outbox WHERE published_at IS NOT NULL");
    my @plans = grep { /outbox_relay worker LOG:  duration/ && /app\.outbox/ } split /^(?=\d{4}-)/m, log_since($own, $offset);
    cmp_ok(scalar @plans, '>=', 5, 'claims, marks and the reclaim were seen');
    is(join("\n", grep { /Seq Scan|Bitmap Heap Scan/ } @plans), '', 'each by an index or by the rows\' places');
    $own->stop;
};

# ADM-07
sub probe_all
{
    my ($where, $before) = @_;
    my @answers = map { "outbox_depth('$_'), outbox_has_undrained('$_'), outbox_oldest_pending_age('$_') > '59 min'" } @routes, 'stamped';
    is($where->safe_psql('postgres', ($before // '') . 'SELECT ' . join(', ', @answers)),
        '(25,2,3)|t|t|(0,0,3)|f||(0,0,0)|f||(25,2,3)|t|t', $where->name . ': ' . ($before // 'as it is'));
    return;
}

my $state = q{SELECT md5(string_agg(ctid::text || xmin || xmax, ',' ORDER BY ctid)) FROM app.outbox};
my $before = value($node, $state);
probe_all($node);
probe_all($node, 'BEGIN READ ONLY; ');
probe_all($node, 'BEGIN ISOLATION LEVEL SERIALIZABLE READ ONLY DEFERRABLE; ');
is(value($node, $state), $before, 'nothing was claimed, locked or changed');

subtest 'on a standby' => sub {
    $node->backup('copy');
    my $standby = PostgreSQL::Test::Cluster->new('standby');
    $standby->init_from_backup($node, 'copy', has_streaming => 1);
    $standby->start;
    $node->wait_for_catchup($standby);
    probe_all($standby);
    is($standby->safe_psql('postgres', 'SELECT count(*) FROM outbox_stat_worker'), 0, 'neither launcher nor workers');
    for my $call (q{outbox_relay_pass('orders')}, q{outbox_requeue_failed('orders')}, q{outbox_stage('orders', 't', '1')})
    {
        my ($code, $out, $err) = $standby->psql('postgres', "\\set VERBOSITY verbose\nSELECT $call");
        like($err, qr/ERROR:  25006/, "$call: read only");
    }
    # What commits on the primary is seen.
    put('empty', 'pending', 1);
    $node->wait_for_catchup($standby);
    is($standby->safe_psql('postgres', q{SELECT outbox_has_undrained('empty')}), 't', 'a new row');
    create_route($node, 'later', 'app.outbox', 'http://127.0.0.1:9/', enabled => 0);
    $node->wait_for_catchup($standby);
    is($standby->safe_psql('postgres', q{SELECT outbox_has_undrained('later')}), 'f', 'a new route');
    $standby->promote;
    is($standby->safe_psql('postgres', q{SELECT outbox_requeue_failed('orders')}), 3, 'promoted, it writes');
    $standby->stop;
};

$node->stop;
done_testing();
