# Standbys: a synchronous one that is gone does not hold up a shutdown or the end of a worker, nor does its absence lose or
# repeat what was committed here (F-25). A failover to an asynchronous one sends again what it had not heard of.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use Time::HiRes qw(time);
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $e = OutboxRelay::Endpoint->start;

# Rows of a session that does not wait for the standby.
sub put
{
    my ($node, $table, $route, $count) = @_;
    $node->safe_psql('postgres', "SET synchronous_commit = local; INSERT INTO $table (id, outbox_route, event_id, event_type, occurred_at, payload, status, created_at)
        SELECT gen_random_uuid(), '$route', gen_random_uuid(), 't', now(), '1', 'pending', now() FROM generate_series(1, $count)");
    return;
}

sub waits_for_standby
{
    my ($node) = @_;
    wait_sql($node, 'postgres', "SELECT EXISTS (SELECT FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker' AND wait_event = 'SyncRep')");
    return worker_pid($node, 'postgres', );
}

for my $storage (qw(consume retain))
{
    for my $drain (0, 1)
    {
        subtest "a synchronous standby that is gone, $storage" . ($drain ? ', drained' : '') => sub {
            $e->reset;
            my $node = new_node("sync_${storage}_$drain", conf => "outbox_relay.workers = 1\noutbox_relay.interval = '200ms'\n", init => { allows_streaming => 1 });
            make_outbox($node, 'postgres', 'app.outbox');
            create_route($node, 'orders', 'app.outbox', $e->url, storage => $storage, drain_on_shutdown => $drain, max_claim_rows => 5);
            wait_lane($node, 'orders', 'passes > 0');
            set_conf($node, synchronous_standby_names => 'gone');
            put($node, 'app.outbox', 'orders', 10);
            my $pid = waits_for_standby($node);
            my $start = time;
            if (!$drain)
            {
                value($node, "SELECT pg_terminate_backend($pid)");
                wait_sql($node, 'postgres', "SELECT NOT EXISTS (SELECT FROM pg_stat_activity WHERE pid = $pid)");
                cmp_ok(time - $start, '<', 10, 'a terminated worker leaves');
                wait_log($node, qr/cancel?ing (?:the )?wait for synchronous replication/, 0);
                waits_for_standby($node);
            }
            $start = time;
            $node->stop('fast');
            cmp_ok(time - $start, '<', 12, 'a fast shutdown is not held up');
            $node->append_conf('postgresql.auto.conf', "synchronous_standby_names = ''\n");
            $node->start;
            wait_empty($node, 'app.outbox', endpoint => $e);
            $e->wait_for_count(10, of => 'events');
            is($e->count->{events}, 10, 'every event arrived');
            my %seen;
            $seen{ $_->{event_id} }++ for $e->deliveries;
            is(scalar(grep { $_ > 1 } values %seen), 0, 'and none twice');
            $node->stop;
        };
    }
}

# Asynchronous replication loses what it had not sent: what was acknowledged and deleted after that is delivered again.
subtest 'failover to an asynchronous standby' => sub {
    $e->reset;
    my $node = new_node('primary', conf => "outbox_relay.workers = 1\noutbox_relay.interval = '200ms'\n", init => { allows_streaming => 1 });
    make_outbox($node, 'postgres', 'app.outbox');
    create_route($node, 'orders', 'app.outbox', $e->url, enabled => 0);
    $node->backup('copy');
    my $standby = PostgreSQL::Test::Cluster->new('asynchronous');
    $standby->init_from_backup($node, 'copy', has_streaming => 1);
    $standby->start;
    my @ids = stage_many($node, 'orders', 50);
    $node->wait_for_catchup($standby);
    # From here on the standby hears nothing.
    $standby->safe_psql('postgres', "ALTER SYSTEM SET primary_conninfo = ''");
    $standby->safe_psql('postgres', 'SELECT pg_reload_conf()');
    wait_sql($standby, 'postgres', 'SELECT NOT EXISTS (SELECT FROM pg_stat_wal_receiver)');
    value($node, "UPDATE outbox_route SET enabled = true WHERE name = 'orders'");
    my $unheard = stage($node, 'orders');
    wait_empty($node, 'app.outbox', endpoint => $e);
    is($e->count->{events}, 51, 'all were delivered by the primary');
    $node->stop('immediate');
    $standby->promote;
    is(value($standby, 'SELECT count(*) FROM app.outbox'), 50, 'the standby has those that it had heard of');
    value($standby, "UPDATE outbox_route SET enabled = true WHERE name = 'orders'");
    wait_empty($standby, 'app.outbox', endpoint => $e);
    my %seen;
    $seen{ $_->{event_id} }++ for $e->deliveries;
    is(join(',', sort map { $seen{$_} } @ids), join(',', (2) x 50), 'and sends each once more');
    is($seen{$unheard}, 1, 'what only the primary knew went out from there');
    $standby->stop;
};

done_testing();
