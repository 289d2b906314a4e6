# Nothing repeated without need: what was published and could not be settled is remembered, also across workers;
# a row that alone can't be settled is set aside; a fault of the whole table sets nothing aside. And nothing phantom.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $node = new_node('settling', fsync => 1, conf => "autovacuum = off\n");
my $e = OutboxRelay::Endpoint->start;
my %fast = (interval => '200ms', retry_base_delay => '100ms', retry_max_backoff => '400ms');

sub scene
{
    my ($name, %columns) = @_;
    $e->reset;
    make_outbox($node, 'postgres', "app.$name");
    create_route($node, $name, "app.$name", $e->url, %fast, %columns);
    return "app.$name";
}

# A BEFORE DELETE row trigger that swallows what the condition names.
sub swallow
{
    my ($table, $condition) = @_;
    $node->safe_psql('postgres', <<"SQL");
CREATE OR REPLACE FUNCTION ${table}_swallow() RETURNS trigger LANGUAGE plpgsql AS
    \$\$ BEGIN IF $condition THEN RETURN NULL; END IF; RETURN OLD; END \$\$;
DROP TRIGGER IF EXISTS swallow ON $table;
CREATE TRIGGER swallow BEFORE DELETE ON $table FOR EACH ROW EXECUTE FUNCTION ${table}_swallow();
SQL
    return;
}

# Requests by event type.
sub sent
{
    my %count;
    $count{ $e->headers($_)->{'ce-type'} }++ for $e->requests;
    return \%count;
}

subtest 'one row that cannot be settled is set aside and holds nobody' => sub {
    my $table = scene('poison');
    swallow($table, "OLD.event_type = 'poison'");
    my $offset = log_offset($node);
    $node->safe_psql('postgres', <<'SQL');
BEGIN;
SELECT outbox_stage('poison', 'e' || i, '1') FROM generate_series(1, 3) i;
SELECT outbox_stage('poison', 'poison', '1');
SELECT outbox_stage('poison', 'e' || i, '1') FROM generate_series(4, 6) i;
COMMIT;
SQL
    wait_sql($node, 'postgres', "SELECT count(*) = 1 FROM $table");
    wait_log($node, qr/route "poison" sets row .* of app.poison aside/, $offset);
    my $lane = wait_lane($node, 'poison', 'set_aside = 1');
    is_deeply(sent(), { map { $_ => 1 } qw(e1 e2 e3 e4 e5 e6 poison) }, 'each was published once');
    cmp_ok($lane->{duplicates_avoided}, '>=', 5, 'and the repeats that this saved are counted');
    stage($node, 'poison', event_type => 'later');
    wait_sql($node, 'postgres', "SELECT count(*) = 1 FROM $table");
    is(sent()->{poison}, 1, 'the row set aside is left alone');

    # Changed, it is another version: it goes out again.
    $node->safe_psql('postgres', "DROP TRIGGER swallow ON $table; UPDATE $table SET payload = '2'");
    wait_empty($node, $table, all => 1);
    is(sent()->{poison}, 2, 'changed, it is published anew');
};

subtest 'a fault of the whole table sets nothing aside and publishes each row once' => sub {
    my $table = scene('everything');
    swallow($table, 'true');
    stage_many($node, 'everything', 20);
    wait_passes($node, 'everything', 6);
    my $lane = lane($node, 'everything');
    is($lane->{set_aside}, 0, 'nothing is set aside');
    is($lane->{published}, 0, 'nothing is settled');
    $node->safe_psql('postgres', "DROP TRIGGER swallow ON $table");
    wait_empty($node, $table, all => 1);
    is($e->count->{received}, 20, 'once each');
};

subtest 'a column that no update may leave empty' => sub {
    my $table = scene('notnull', url => $e->url);
    $node->safe_psql('postgres', "UPDATE outbox_route SET url = '" . $e->url('/status/500') . "', max_attempts = 3 WHERE name = 'notnull'");
    $node->safe_psql('postgres', "ALTER TABLE $table ADD CHECK (last_error IS NULL)");
    stage_many($node, 'notnull', 3);
    my $lane = wait_lane($node, 'notnull', 'failed_passes >= 3');
    is($lane->{set_aside}, 0, 'nothing is set aside');
    like($lane->{last_error}, qr/check constraint/, 'the reason is shown');
    $node->safe_psql('postgres', "ALTER TABLE $table DROP CONSTRAINT notnull_last_error_check");
    wait_sql($node, 'postgres', "SELECT bool_and(status = 'failed') FROM $table");
};

subtest 'moved rows are not taken for each other' => sub {
    my $table = scene('moved');
    swallow($table, 'true');
    insert_rows($node, $table, 'moved', 3, type => 'old');
    wait_lane($node, 'moved', 'failed_passes >= 1');
    # The first row is deleted by hand; VACUUM FULL moves the others into its place, under the same xmin.
    $node->safe_psql('postgres', "UPDATE outbox_route SET enabled = false");
    wait_lane($node, 'moved', "state = 'paused'");
    wait_sql($node, 'postgres', "SELECT count(*) = 0 FROM pg_stat_activity WHERE state = 'active' AND backend_type = 'outbox_relay worker'");
    $node->safe_psql('postgres', "DROP TRIGGER swallow ON $table; ALTER TABLE $table DISABLE TRIGGER USER;"
          . "DELETE FROM $table WHERE id = (SELECT id FROM $table ORDER BY ctid LIMIT 1)");
    insert_rows($node, $table, 'moved', 2, type => 'new');
    $node->safe_psql('postgres', "VACUUM FULL $table");
    $node->safe_psql('postgres', 'UPDATE outbox_route SET enabled = true');
    wait_empty($node, $table, all => 1);
    my $sent = sent();
    is($sent->{new}, 2, 'no new row is taken for one that was published');
    cmp_ok($sent->{old}, '>=', 3, 'none is lost');
    cmp_ok($sent->{old}, '<=', 5, 'what moved may be repeated once');
};

subtest 'an event is not published before its transaction is safe from a crash' => sub {
    my $table = scene('phantom', pass_deadline => '20s');
    $node->safe_psql('postgres', "UPDATE outbox_route SET url = '" . $e->url('/hang') . "' WHERE name = 'phantom'");
    $node->safe_psql('postgres', 'CREATE TABLE app.business (id int)');
    # Nothing but the relay flushes: the WAL writer sleeps for ten seconds.
    $node->append_conf('postgresql.conf', "wal_writer_delay = 10s\nwal_writer_flush_after = 1GB");
    $node->restart;
    wait_for_worker($node, 'postgres');
    $node->safe_psql('postgres', <<'SQL');
SET synchronous_commit = off;
BEGIN; INSERT INTO app.business VALUES (1); SELECT outbox_stage('phantom', 't', '1'); COMMIT;
SQL
    $e->wait_for_inflight;
    $node->stop('immediate');
    $node->start;
    is(value($node, 'SELECT count(*) FROM app.business'), 1, 'what the event tells about is there after the crash');
    $e->release(1);
    wait_empty($node, $table, all => 1);
};

$node->stop;
done_testing();
