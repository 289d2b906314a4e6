# The delivery log: a row for each committed delivery, written by the statement that deletes.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $node = new_node('log');
my $e = OutboxRelay::Endpoint->start;
value($node, 'CREATE SCHEMA app');

# A log table as outbox_ddl has it, with the partitions of today and tomorrow; default => 0: no default partition.
sub make_log
{
    my ($name, %opts) = @_;
    value($node, <<"SQL");
DO \$\$
DECLARE statement text;
BEGIN
    FOR statement IN SELECT s FROM outbox_ddl('app.unused', delivery_log => 'app.$name') s WHERE s LIKE '%$name%' LOOP
        EXECUTE statement;
    END LOOP;
END \$\$;
SQL
    value($node, "DROP TABLE app.${name}_default") if exists $opts{default} && !$opts{default};
    add_day($name, $_) for 0 .. ($opts{days} // 2) - 1;
    return "app.$name";
}

sub add_day
{
    my ($log, $day) = @_;
    my $from = value($node, "SELECT date_trunc('day', now()) + interval '$day day'");
    my $to = value($node, "SELECT timestamptz '$from' + interval '1 day'");
    my $name = "app.${log}_d" . value($node, "SELECT to_char(timestamptz '$from', 'YYYYMMDD')");
    value($node, "CREATE TABLE $name (LIKE app.$log); ALTER TABLE app.$log ATTACH PARTITION $name FOR VALUES FROM ('$from') TO ('$to')");
    return $name;
}

sub table_and_route
{
    my ($name, %columns) = @_;
    make_outbox($node, 'postgres', "app.$name");
    create_route($node, $name, "app.$name", delete $columns{url} // $e->url, interval => '100ms', %columns);
    return "app.$name";
}

# LOG-01 to LOG-04, LOG-14, LOG-17
subtest 'a row for each delivery' => sub {
    my $log = make_log('plain');
    $e->script('mixed', { status => 500 });
    my $table = table_and_route('logged', delivery_log => $log, enabled => 0, max_attempts => 1);
    my @ids = stage_many($node, 'logged', 50);
    value($node, "UPDATE $table SET tenant_id = '00000000-0000-4000-8000-000000000007' WHERE event_id = '$ids[3]'; UPDATE outbox_route SET enabled = true WHERE name = 'logged'");
    wait_empty($node, $table, all => 1, endpoint => $e);
    is(value($node, "SELECT count(*) || ' ' || count(DISTINCT event_id) || ' ' || count(DISTINCT published_at) FROM $log"), '50 50 1', 'each once, one published_at a pass');
    is(value($node, "SELECT bool_and(outbox_route = 'logged' AND published_at BETWEEN now() - interval '1 min' AND now()) FROM $log"), 't', 'route and time');
    is(value($node, "SELECT event_id FROM $log WHERE tenant_id = '00000000-0000-4000-8000-000000000007'"), $ids[3], 'the tenant of the row');
    is(value($node, 'SELECT count(*) FROM app.plain_default'), 0, "in the day's partition");

    stage($node, 'logged', event_id => $ids[0]);
    wait_sql($node, 'postgres', "SELECT count(*) = 2 FROM $log WHERE event_id = '$ids[0]'", what => 'the second delivery');
    pass('an event that is staged again has a second row');

    my $some = table_and_route('some', delivery_log => $log, url => $e->url('/script/mixed'), max_attempts => 1, concurrency => 1, enabled => 0, max_payload_bytes => 1000);
    stage_many($node, 'some', 2);
    insert_rows($node, $some, 'some', 1, columns => { payload => \q{to_jsonb(repeat('x', 2000))} });
    value($node, "UPDATE outbox_route SET enabled = true WHERE name = 'some'");
    wait_empty($node, $some);
    is(value($node, "SELECT count(*) FROM $log WHERE outbox_route = 'some'"), 1, 'failed and unsendable rows have none');
};

# LOG-11
subtest 'only inserts' => sub {
    wait_sql($node, 'postgres', "SELECT count(*) > 0 AND sum(n_tup_ins) > 0 AND sum(n_tup_upd) + sum(n_tup_del) = 0 FROM pg_stat_user_tables WHERE relname LIKE 'plain_%'");
    pass('nothing of a log is updated or deleted');
};

# LOG-02, LOG-16
subtest 'a trigger that loses the row fails the pass' => sub {
    $e->reset;
    my $log = make_log('losing');
    value($node, 'CREATE FUNCTION app.lose() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RETURN NULL; END $$');
    my $partition = value($node, "SELECT tableoid::regclass FROM (SELECT 1) x, LATERAL (SELECT inhrelid AS tableoid FROM pg_inherits WHERE inhparent = '$log'::regclass AND inhrelid::regclass::text LIKE '%' || to_char(now(), 'YYYYMMDD')) i");
    value($node, "CREATE TRIGGER lose BEFORE INSERT ON $partition FOR EACH ROW EXECUTE FUNCTION app.lose()");
    # The next pass comes when the trigger is gone: one that settles a single row meanwhile would set another aside.
    my $table = table_and_route('lost', delivery_log => $log, interval => '3s');
    stage_many($node, 'lost', 3);
    my $lane = wait_lane($node, 'lost', 'failed_passes > 0');
    like($lane->{last_error}, qr/only 0 of 3 deleted rows were logged in app.losing/, 'and says so');
    is(value($node, "SELECT count(*) FROM $table WHERE status = 'pending' AND attempts = 0"), 3, 'the rows are as they were');
    value($node, "DROP TRIGGER lose ON $partition");
    wait_empty($node, $table, all => 1);
    is(value($node, "SELECT count(*) FROM $log"), 3, 'logged once it is gone');
    is($e->count->{complete}, 3, 'and not sent again');
};

# LOG-07, LOG-08
subtest 'a missing partition is found before anything is sent' => sub {
    $e->reset;
    my $log = make_log('gaps', default => 0, days => 0);
    my $table = table_and_route('gap', delivery_log => $log);
    stage_many($node, 'gap', 5);
    my $lane = wait_lane($node, 'gap', 'failed_passes >= 2');
    like($lane->{last_error}, qr/delivery log app.gaps has no partition for \d{4}-\d\d-\d\d/, 'the error names log and day');
    is($e->count->{received}, 0, 'nothing was sent');
    is(value($node, "SELECT count(*) FROM $table WHERE attempts = 0 AND status = 'pending'"), 5, 'no attempt is burned');
    value($node, "CREATE TABLE app.gaps_default PARTITION OF $log DEFAULT");
    wait_empty($node, $table, all => 1);
    is(value($node, 'SELECT count(*) FROM app.gaps_default'), 5, 'the default partition catches them');
    is($e->count->{complete}, 5, 'each sent once');
    # Partitions below partitions are looked at as well.
    value($node, "DROP TABLE app.gaps_default; CREATE TABLE app.gaps_all PARTITION OF $log DEFAULT PARTITION BY RANGE (published_at)");
    stage($node, 'gap');
    wait_sql($node, 'postgres', "SELECT last_error LIKE '%has no partition%' AND consecutive_failures > 0 FROM outbox_stat_route WHERE route = 'gap'");
    value($node, 'CREATE TABLE app.gaps_all_rest PARTITION OF app.gaps_all DEFAULT');
    wait_empty($node, $table, all => 1);
};

subtest 'a partition that will be missing when the pass ends' => sub {
    $e->reset;
    my $log = make_log('ending', default => 0, days => 1);
    make_outbox($node, 'postgres', 'app.ends');
    # Rights on columns alone.
    value($node, "CREATE ROLE ends_owner; GRANT USAGE ON SCHEMA app TO ends_owner; ALTER TABLE app.ends OWNER TO ends_owner;"
          . "GRANT INSERT (id, outbox_route, event_id, tenant_id, published_at) ON $log TO ends_owner");
    create_route($node, 'ends', 'app.ends', $e->url, owner => 'ends_owner', delivery_log => $log, interval => '100ms', pass_deadline => '1 day');
    stage($node, 'ends');
    like(wait_lane($node, 'ends', 'failed_passes > 0')->{last_error}, qr/delivery log app.ending has no partition for \d{4}-\d\d-\d\d/, 'tomorrow\'s');
    is($e->count->{received}, 0, 'nothing was sent');
    add_day('ending', 1);
    wait_empty($node, 'app.ends', all => 1);
};

# LOG-05: a pass that is killed logs nothing, its repeat logs once
subtest 'killed before the commit' => sub {
    $e->reset;
    my $log = make_log('killed');
    my $table = table_and_route('killed_pass', delivery_log => $log);
    set_conf($node, 'outbox_relay.fault_point' => 'before_commit=wait');
    stage_many($node, 'killed_pass', 10);
    $e->wait_for_count(10);
    is(value($node, "SELECT count(*) FROM $log"), 0, 'sent, but nothing is logged before the commit');
    my $offset = log_offset($node);
    wait_log($node, qr/fault point before_commit reached/, 0);
    kill_worker($node, 'postgres');
    set_conf_later(undef);
    wait_empty($node, $table, all => 1);
    is(value($node, "SELECT count(*) || ' ' || count(DISTINCT event_id) FROM $log"), '10 10', 'each is logged once');
    is($e->count->{complete}, 20, 'and was sent twice: the crash forgot');
};

sub set_conf_later
{
    wait_until(sub { (eval { value($node, 'SELECT 1') } // 0) == 1 }, what => 'the server after its crash');
    set_conf($node, 'outbox_relay.fault_point' => $_[0]);
}

# LOG-09, LOG-10
subtest 'adding and dropping partitions meanwhile' => sub {
    $e->reset;
    my $log = make_log('changing');
    my $table = table_and_route('changed', delivery_log => $log, pass_statement_timeout => '500ms');
    value($node, "CREATE TABLE app.changing_far (LIKE $log)");
    my $attaching = hold_session($node, "BEGIN; ALTER TABLE $log ATTACH PARTITION app.changing_far FOR VALUES FROM ('2099-01-01') TO ('2099-01-02')");
    stage($node, 'changed');
    wait_empty($node, $table, all => 1, timeout => 10);
    is(lane($node, 'changed')->{failed_passes}, 0, 'ATTACH PARTITION does not delay a pass whose rows go elsewhere');
    $attaching->quit;
    my $dropping = hold_session($node, "BEGIN; LOCK TABLE $log IN ACCESS EXCLUSIVE MODE");
    stage($node, 'changed');
    wait_lane($node, 'changed', 'failed_passes > 0');
    is(value($node, "SELECT count(*) FROM $table WHERE attempts = 0"), 1, 'a lock that is held longer than the limit fails the pass');
    $dropping->quit;
    wait_empty($node, $table, all => 1);
    is($e->count->{complete}, 2, 'and nothing was sent in vain');
};

subtest 'rights and kinds' => sub {
    $e->reset;
    value($node, 'CREATE ROLE app_owner; CREATE ROLE log_owner; GRANT USAGE, CREATE ON SCHEMA app TO app_owner, log_owner');
    my $log = make_log('foreign_log');
    my $table = table_and_route('strangers', delivery_log => $log, enabled => 0);
    value($node, "ALTER TABLE $table OWNER TO app_owner; GRANT INSERT ON $log TO app_owner; ALTER TABLE app.foreign_log_default OWNER TO log_owner;
        UPDATE outbox_route SET owner = 'app_owner', enabled = true WHERE name = 'strangers'");
    stage($node, 'strangers');
    like(wait_lane($node, 'strangers', 'failed_passes > 0')->{last_error}, qr/may not run passes on delivery log/, 'a partition of somebody else\'s');
    is($e->count->{received}, 0, 'nothing was sent');
    value($node, "ALTER TABLE app.foreign_log_default OWNER TO app_owner; ALTER TABLE $log OWNER TO app_owner; SELECT format('ALTER TABLE %s OWNER TO app_owner', inhrelid::regclass) FROM pg_inherits WHERE inhparent = '$log'::regclass");
    wait_empty($node, $table, all => 1);
    is(value($node, "SELECT count(*) FROM $log"), 1, 'logged as the owner');

    value($node, 'CREATE TABLE app.no_log (id uuid); CREATE VIEW app.view_log AS SELECT 1 AS id');
    for my $bad (qw(app.no_log app.view_log app.nowhere))
    {
        my (undef, undef, $error) = $node->psql('postgres', "UPDATE outbox_route SET delivery_log = '$bad' WHERE name = 'strangers'");
        like($error, qr/ERROR:.*(no_log has no column "outbox_route"|neither an ordinary nor|"app.nowhere" does not exist)/, "$bad is refused");
    }
    my (undef, undef, $error) = $node->psql('postgres', "UPDATE outbox_route SET storage = 'retain' WHERE name = 'strangers'");
    like($error, qr/ERROR:.*delivery_log/, 'so is a log with retain'); # SCH-17
};

done_testing();
