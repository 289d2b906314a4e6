# The README's recipe for the delivery log's days with pg_partman and pg_cron, run while a route relays: days are made ahead
# and dropped, no pass fails for want of one, nothing lands in the default partition. And that a log is looked up by index
# (LOG-17).

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $node = new_node('retention', preload => 'pg_cron,outbox_relay',
    conf => "cron.use_background_workers = on\ncron.database_name = 'postgres'\noutbox_relay.interval = '200ms'\n");
my $e = OutboxRelay::Endpoint->start;

sub sql { return $node->safe_psql('postgres', $_[0]); }

open(my $readme, '<', "$FindBin::Bin/../../README.md") or die "README.md: $!";
my ($recipe) = join('', <$readme>) =~ /^```sql retention\n(.*?)^```/ms;
ok($recipe, 'the README has a recipe');
$recipe =~ s/p_type => 'range'/p_type => 'native'/ if sql("SELECT default_version LIKE '4.%' FROM pg_available_extensions WHERE name = 'pg_partman'") eq 't';

make_outbox($node, 'postgres', 'app.billing');
sql("SELECT outbox_ddl('app.unused', delivery_log => 'app.billing_delivered') AS s \\gexec");
create_route($node, 'billing', 'app.billing', $e->url, delivery_log => 'app.billing_delivered');
sql($recipe);

sub days { return sql("SELECT count(*) FROM pg_inherits WHERE inhparent = 'app.billing_delivered'::regclass AND pg_get_expr((SELECT relpartbound FROM pg_class WHERE oid = inhrelid), inhrelid) <> 'DEFAULT'"); }

my $old = 'app.billing_delivered_p' . (sql("SELECT extversion LIKE '4.%' FROM pg_extension WHERE extname = 'pg_partman'") eq 't' ? '2020_01_01' : '20200101');
my $days = days();
cmp_ok($days, '>=', 8, 'today and a week ahead');
insert_rows($node, 'app.billing', 'billing', 50);
wait_empty($node, 'app.billing', endpoint => $e);
is(sql('SELECT count(*) FROM app.billing_delivered'), 50, 'logged');
is(sql('SELECT count(*) FROM app.billing_delivered_default'), 0, 'in the day\'s partition');

# A day of long ago, and none of the days ahead: the job puts both right, while rows go out.
sql("CREATE TABLE $old (LIKE app.billing_delivered);
    INSERT INTO $old SELECT gen_random_uuid(), 'billing', gen_random_uuid(), NULL, '2020-01-01 12:00+00' FROM generate_series(1, 100);
    ALTER TABLE app.billing_delivered ATTACH PARTITION $old FOR VALUES FROM ('2020-01-01 00:00+00') TO ('2020-01-02 00:00+00')");
sql("DO \$\$ DECLARE r regclass; BEGIN
    FOR r IN SELECT inhrelid::regclass FROM pg_inherits WHERE inhparent = 'app.billing_delivered'::regclass
        AND pg_get_expr((SELECT relpartbound FROM pg_class WHERE oid = inhrelid), inhrelid) > 'FOR VALUES FROM (''' || (current_date + 2)::text
    LOOP EXECUTE 'DROP TABLE ' || r; END LOOP; END \$\$");
cmp_ok(days(), '<', $days, 'days ahead are missing');
sql("UPDATE cron.job SET schedule = '* * * * *' WHERE jobname = 'billing log'; SELECT cron.alter_job(jobid, '* * * * *') FROM cron.job");
my $failed = lane($node, 'billing')->{failed_passes};
my $staged = 50;
wait_until(sub {
    $staged += 20;
    insert_rows($node, 'app.billing', 'billing', 20);
    return sql("SELECT to_regclass('$old') IS NULL") eq 't' && days() >= $days;
}, what => 'the job to drop the old day and to make those ahead', timeout => 150, poll_ms => 500,
    diag => sub { sql("SELECT status, return_message FROM cron.job_run_details ORDER BY runid DESC LIMIT 3") });
wait_empty($node, 'app.billing', endpoint => $e);
is(sql("SELECT count(*) FROM app.billing_delivered WHERE published_at > '2021-01-01'"), $staged, 'everything meanwhile is logged');
is($e->count->{events}, $staged, 'and was sent once');
is(lane($node, 'billing')->{failed_passes}, $failed, 'no pass failed');
is(sql('SELECT count(*) FROM app.billing_delivered_default'), 0, 'nothing in the default partition');

# LOG-17.
sql('ANALYZE app.billing_delivered');
my $plan = sql("SET enable_seqscan = off; EXPLAIN SELECT published_at FROM app.billing_delivered WHERE event_id = '00000000-0000-4000-8000-000000000001' AND tenant_id = '00000000-0000-4000-8000-000000000002'");
like($plan, qr/Index Cond: \(event_id = /, 'looked up by the event');
like($plan, qr/Filter: \(tenant_id = /, 'filtered by the tenant');
unlike($plan, qr/Seq Scan/, 'in every partition');

done_testing();
