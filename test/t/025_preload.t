# Where no worker may run: the library not preloaded, a hot standby until it is promoted, pg_upgrade's mode.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $e = OutboxRelay::Endpoint->start;

subtest 'without the preload' => sub {
    my $node = new_node('late', preload => '', extension => 1);
    make_outbox($node, 'postgres', 'app.outbox');
    create_route($node, 'r', 'app.outbox', $e->url);
    ok(stage($node, 'r'), 'staging');
    is(value($node, q{SELECT outbox_stage_many('r', '[{"event_type": "t", "payload": 1}]')}), 1, 'and many');
    $node->safe_psql('postgres', 'CREATE TRIGGER w AFTER INSERT ON app.outbox FOR EACH STATEMENT EXECUTE FUNCTION outbox_wake()');
    insert_rows($node, 'app.outbox', 'r', 1, columns => { status => 'failed' });
    is(value($node, "SELECT pending || '/' || failed FROM outbox_depth('r')"), '2/1', 'probes');
    is(value($node, "SELECT outbox_requeue_failed('r')"), 1, 'requeue');
    is(value($node, "SELECT outbox_has_undrained('r')"), 't', 'undrained');
    is(value($node, "SELECT outbox_oldest_pending_age('r') > '0'"), 't', 'age');
    is(value($node, "SELECT count(*) || '/' || max(state) FROM outbox_stat_route"), '1/idle', 'the view');
    is(value($node, 'SELECT count(*) FROM outbox_stat_worker'), 0, 'no worker');
    cmp_ok(value($node, 'SELECT count(*) FROM outbox_route_effective'), '>', 5, 'what holds');
    my ($code, $out, $err) = $node->psql('postgres', '\\set VERBOSITY verbose' . "\nSELECT outbox_stat_reset()");
    like($err, qr/55000: outbox_relay is not preloaded.*HINT/s, 'what needs shared memory says so');
    $node->stop;
};

subtest 'a standby relays when it is promoted' => sub {
    my $primary = new_node('primary', init => { allows_streaming => 1 });
    make_outbox($primary, 'postgres', 'app.outbox');
    create_route($primary, 'r', 'app.outbox', $e->url, enabled => 'false');
    stage_many($primary, 'r', 20);
    $primary->backup('b');
    my $standby = PostgreSQL::Test::Cluster->new('standby');
    $standby->init_from_backup($primary, 'b', has_streaming => 1);
    $standby->start;
    $primary->wait_for_catchup($standby);
    is(value($standby, "SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'outbox_relay%'"), 0, 'nothing runs in recovery');
    is(value($standby, "SELECT pending FROM outbox_depth('r')"), 20, 'probes work there');
    is(value($standby, "SELECT outbox_has_undrained('r')"), 't', 'and this one');
    my ($code, $out, $err) = $standby->psql('postgres', "SELECT outbox_stage('r', 't', '{}')");
    like($err, qr/read-only transaction/, 'staging is refused as any write is');
    $primary->stop;
    $standby->promote;
    $standby->safe_psql('postgres', 'UPDATE outbox_route SET enabled = true');
    wait_sql($standby, 'postgres', 'SELECT count(*) = 0 FROM app.outbox');
    is($e->count->{acked}, 20, 'the promoted server relays');
    $standby->stop;
};

subtest 'in the mode of pg_upgrade nothing is registered' => sub {
    my $node = new_node('upgrade', start => 0, extension => 0);
    $node->append_conf('postgresql.conf', "unix_socket_directories = '" . $node->host . "'");
    my $log = $node->logfile;
    PostgreSQL::Test::Utils::system_or_bail('pg_ctl', '-w', '-D', $node->data_dir, '-l', $log, '-o', '-b', 'start');
    is($node->safe_psql('postgres', "SELECT count(*) FROM pg_stat_activity WHERE backend_type LIKE 'outbox_relay%'"), 0, 'no process of ours');
    PostgreSQL::Test::Utils::system_or_bail('pg_ctl', '-w', '-D', $node->data_dir, 'stop');
};

done_testing();
