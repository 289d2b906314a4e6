# What others do with the server and the tables while the relay works: copies of the server, locks and deletions that
# meet a pass, a reload in its middle, prepared transactions.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $node = new_node('citizen', init => { allows_streaming => 1 }, conf => "autovacuum = off\noutbox_relay.interval = '200ms'\nmax_prepared_transactions = 2\n");
my $e = OutboxRelay::Endpoint->start;

sub sql { return $node->safe_psql('postgres', $_[0]); }

sub table_and_route
{
    my ($name, %columns) = @_;
    $e->reset;
    make_outbox($node, 'postgres', "app.$name");
    create_route($node, $name, "app.$name", delete $columns{url} // $e->url, %columns);
    wait_lane($node, $name, 'passes > 0');
    return "app.$name";
}

# A pass that waits for its endpoint, with this many rows.
sub publishing
{
    my ($name, $rows, %columns) = @_;
    my $table = table_and_route($name, url => $e->url('/hang'), pass_deadline => '30s', %columns);
    stage_many($node, $name, $rows);
    $e->wait_for_count(1, of => 'inflight');
    return $table;
}

# A session that begins a statement which has to wait for a lock.
sub waits_for_lock
{
    my ($statement) = @_;
    my $session = $node->background_psql('postgres');
    $session->query_until(qr/begun/, "\\echo begun\n$statement;\n\\echo done\n");
    wait_sql($node, 'postgres', "SELECT count(*) > 0 FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND backend_type = 'client backend'");
    return $session;
}

sub drop_route { sql("DELETE FROM outbox_route WHERE name = '$_[0]'"); return; }

# F-36
for my $what (['TRUNCATE', 'TRUNCATE app.%s'], ['DELETE', 'DELETE FROM app.%s'])
{
    my ($verb, $statement) = @$what;
    subtest "$verb of rows that are being sent" => sub {
        my $name = 'gone_' . lc $verb;
        my $table = publishing($name, 3);
        my $operator = waits_for_lock(sprintf $statement, $name);
        $e->release(1);
        $operator->query_until(qr/done/, '');
        $operator->quit;
        wait_lane($node, $name, "published = 3 AND state <> 'running'");
        is(sql("SELECT count(*) FROM $table"), 0, 'the table is empty');
        is($e->count->{received}, 3, 'each row was sent once');
        is(lane($node, $name)->{failed_passes}, 0, 'no pass failed');
        drop_route($name);
    };
}

# F-27
subtest 'an ALTER TABLE that comes behind the claim waits, and holds nothing up' => sub {
    my $table = publishing('altered', 2);
    my $operator = waits_for_lock("ALTER TABLE $table ADD COLUMN more int");
    $e->release(1);
    $operator->query_until(qr/done/, '');
    $operator->quit;
    wait_empty($node, $table, all => 1);
    is(lane($node, 'altered')->{failed_passes}, 0, 'the pass settles what it sent');
    stage($node, 'altered');
    wait_empty($node, $table, all => 1);
    is($e->count->{received}, 3, 'and relaying goes on');
    drop_route('altered');
};

# F-44
subtest 'a reload in the middle of a pass is for the next' => sub {
    set_conf($node, 'outbox_relay.concurrency' => 1);
    my $table = publishing('reloaded', 3, url => $e->url('/slow?ms=400'));
    my $offset = log_offset($node);
    set_conf($node, 'outbox_relay.concurrency' => 3);
    wait_log($node, qr/received SIGHUP/, $offset);
    my $most = 0;
    $e->wait_until(sub { my $now = $e->count; $most = $now->{inflight} if $now->{inflight} > $most; $now->{acked} == 3 }, what => 'three answers');
    is($most, 1, 'one request at a time to its end');
    wait_empty($node, $table, all => 1);
    $e->reset;
    stage_many($node, 'reloaded', 3);
    $e->wait_for_count(3, of => 'inflight');
    pass('three at a time afterwards');
    wait_empty($node, $table, all => 1);
    set_conf($node, 'outbox_relay.concurrency' => undef);
    drop_route('reloaded');
};

# F-45
subtest 'a row that a prepared transaction holds is passed over' => sub {
    my $table = table_and_route('prepared', enabled => 1);
    sql("UPDATE outbox_route SET enabled = false WHERE name = 'prepared'");
    my @ids = insert_rows($node, $table, 'prepared', 3);
    sql("BEGIN; SELECT FROM $table WHERE event_id = '$ids[0]' FOR UPDATE; PREPARE TRANSACTION 'holds'");
    sql("UPDATE outbox_route SET enabled = true WHERE name = 'prepared'");
    wait_sql($node, 'postgres', "SELECT count(*) = 1 FROM $table");
    is(sql("SELECT event_id FROM $table"), $ids[0], 'the others go out');
    sql("ROLLBACK PREPARED 'holds'");
    wait_empty($node, $table, all => 1);
    is(lane($node, 'prepared')->{failed_passes}, 0, 'then it does; no pass failed');
    drop_route('prepared');
};

subtest 'a physical copy that is started with relaying off sends nothing' => sub {
    my $table = table_and_route('copied', interval => '1h');
    insert_rows($node, $table, 'copied', 2);
    $node->backup('copy');
    my $copy = PostgreSQL::Test::Cluster->new('copy');
    $copy->init_from_backup($node, 'copy');
    $copy->append_conf('postgresql.conf', "outbox_relay.enabled = off\n");
    $copy->start;
    wait_sql($copy, 'postgres', "SELECT count(*) = 1 FROM outbox_stat_worker WHERE phase = 'launcher'");
    is($copy->safe_psql('postgres', "SELECT state FROM outbox_stat_route WHERE route = 'copied'"), 'idle', 'it takes itself for the server');
    is($copy->safe_psql('postgres', "SELECT count(*) FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker'"), 0, 'there is no worker');
    $copy->safe_psql('postgres', "UPDATE outbox_route SET enabled = false");
    set_conf($copy, 'outbox_relay.enabled' => 'on');
    is($e->count->{received}, 0, 'and nothing is sent: the copy\'s routes can be paused before relaying is turned on');
    is($copy->safe_psql('postgres', "SELECT count(*) FROM $table"), 2, 'the rows are there');
    $copy->stop;
    drop_route('copied');
};

subtest 'a server with another environment than its routes' => sub {
    my $table = table_and_route('elsewhere');
    my $offset = log_offset($node);
    $node->append_conf('postgresql.conf', "outbox_relay.environment = 'staging'\n");
    $node->restart;
    wait_log($node, qr/WARNING:.*route "elsewhere" is bound to another database/, $offset);
    insert_rows($node, $table, 'elsewhere', 1);
    # Each change has a worker look at the routes again.
    for my $rows (11 .. 13)
    {
        sql("UPDATE outbox_route SET max_claim_rows = $rows");
        wait_log($node, qr/(?:outbox_relay worker" \(PID \d+\) exited.*?){@{[ $rows - 10 ]}}/s, $offset);
    }
    is(sql("SELECT state FROM outbox_stat_route"), 'foreign', 'they are foreign');
    is($e->count->{received}, 0, 'nothing is sent');
    my @said = log_since($node, $offset) =~ /is bound to another database/g;
    is(scalar @said, 1, 'one WARNING');
    $node->append_conf('postgresql.conf', "outbox_relay.environment = ''\n");
    $node->restart;
    wait_empty($node, $table, all => 1);
    pass('at home again they are relayed');
};

$node->stop;
done_testing();
