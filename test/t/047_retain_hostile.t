# Retain passes among people and clocks that mean no good: the table is swapped while requests are out, marks are slow,
# fail for good or wait for locks, the extension is dropped, the worker cancelled and evicted in the middle.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use Time::HiRes qw(time);
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;
use OutboxRelay::Oracle;

my $node = new_node('retain_hostile', conf => "autovacuum = off\noutbox_relay.workers = 1\n");
my $e = OutboxRelay::Endpoint->start;
my %fast = (storage => 'retain', interval => '100ms', retry_base_delay => '50ms', retry_max_backoff => '400ms');

sub table_and_route
{
    my ($name, %columns) = @_;
    $e->reset;
    make_outbox($node, 'postgres', "app.$name", owner => delete $columns{table_owner});
    create_route($node, $name, "app.$name", delete $columns{url} // $e->url, %fast, %columns);
    return "app.$name";
}

sub set_route { my ($name, $what) = @_; return value($node, "UPDATE outbox_route SET $what WHERE name = '$name'"); }

# How many rows have which status.
sub statuses { return value($node, "SELECT string_agg(status || ' ' || n, ', ' ORDER BY status) FROM (SELECT status, count(*) AS n FROM $_[0] GROUP BY 1) s"); }

# T-02, T-07: whoever owns the schema may put another table in the place of the one that preflight has checked.
subtest 'a table that is replaced while requests are out' => sub {
    value($node, 'CREATE ROLE tenant; CREATE ROLE landlord; CREATE TABLE public.seen (who text); GRANT INSERT ON public.seen TO PUBLIC;
        CREATE SCHEMA app; ALTER SCHEMA app OWNER TO landlord; GRANT ALL ON SCHEMA app TO tenant; GRANT USAGE ON SCHEMA app TO PUBLIC');
    my $table = table_and_route('replaced', url => $e->url('/hang'), pass_deadline => '60s', table_owner => 'tenant', owner => 'tenant');
    stage_many($node, 'replaced', 3);
    $e->wait_for_count(3, of => 'inflight');
    value($node, <<"SQL");
SET ROLE landlord;
DROP TABLE $table;
CREATE TABLE $table (id uuid, outbox_route text, status text, published_at timestamptz, processing_at timestamptz, last_error text,
    attempts int, available_at timestamptz);
CREATE FUNCTION app.spy() RETURNS trigger LANGUAGE plpgsql AS \$\$ BEGIN INSERT INTO public.seen VALUES (current_user); RETURN NULL; END \$\$;
CREATE TRIGGER spy BEFORE UPDATE ON $table FOR EACH STATEMENT EXECUTE FUNCTION app.spy();
GRANT ALL ON $table TO PUBLIC;
SQL
    set_route('replaced', 'interval = $$1h$$');
    $e->release(1);
    my $lane = wait_lane($node, 'replaced', 'failed_passes > 0');
    is(value($node, 'SELECT string_agg(who, $$ $$) FROM public.seen'), '', 'no trigger of the new table has run as the route\'s owner');
    like($lane->{last_error}, qr/relation app\.replaced was replaced while a pass of route "replaced" was under way|has no column/, 'the pass fails and says why');

    # The same table, given to somebody else.
    $table = table_and_route('given', url => $e->url('/hang'), pass_deadline => '60s', table_owner => 'tenant', owner => 'tenant');
    value($node, "GRANT ALL ON $table TO PUBLIC");
    stage_many($node, 'given', 3);
    $e->wait_for_count(3, of => 'inflight');
    value($node, "ALTER TABLE $table OWNER TO landlord");
    value($node, "SET ROLE landlord; CREATE TRIGGER spy BEFORE UPDATE ON $table FOR EACH STATEMENT EXECUTE FUNCTION app.spy()");
    $e->release(1);
    $lane = wait_lane($node, 'given', 'failed_passes > 0');
    is(value($node, 'SELECT string_agg(who, $$ $$) FROM public.seen'), '', 'a table of another owner is not written either');
    value($node, "DELETE FROM outbox_route WHERE name IN ('replaced', 'given'); ALTER SCHEMA app OWNER TO postgres");
};

# The lock that a consume pass holds on its table does not keep the schema's name.
subtest 'a schema that is replaced while requests are out' => sub {
    value($node, 'CREATE SCHEMA rented AUTHORIZATION landlord; GRANT CREATE ON DATABASE postgres TO landlord; GRANT ALL ON SCHEMA rented TO tenant');
    $e->reset;
    make_outbox($node, 'postgres', 'rented.outbox', owner => 'tenant');
    create_route($node, 'rented', 'rented.outbox', $e->url('/hang'), interval => '1h', owner => 'tenant', pass_deadline => '60s');
    stage_many($node, 'rented', 3);
    $e->wait_for_count(3, of => 'inflight');
    my $offset = log_offset($node);
    value($node, <<'SQL');
SET ROLE landlord;
ALTER SCHEMA rented RENAME TO sold;
CREATE SCHEMA rented;
GRANT ALL ON SCHEMA rented TO PUBLIC;
CREATE TABLE rented.outbox (id uuid, outbox_route text, event_id uuid, tenant_id uuid);
CREATE FUNCTION rented.spy() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN RAISE LOG 'spy runs as %', current_user; RETURN NULL; END $$;
CREATE TRIGGER spy BEFORE DELETE ON rented.outbox FOR EACH STATEMENT EXECUTE FUNCTION rented.spy();
GRANT ALL ON rented.outbox TO PUBLIC;
SQL
    $e->release(1);
    my $lane = wait_lane($node, 'rented', 'failed_passes > 0');
    unlike(log_since($node, $offset), qr/spy runs as/, 'no trigger of the new table has run');
    like($lane->{last_error}, qr/was replaced under its name/, 'the pass fails and says why');
    value($node, "DELETE FROM outbox_route WHERE name = 'rented'");
};

# Marks hold up the loop for longer than a request may take: an answer that came meanwhile is an answer.
subtest 'marks slower than request_timeout and connect_timeout' => sub {
    my $table = table_and_route('slow_marks', url => $e->url('/slow?ms=60'), request_timeout => '500ms', connect_timeout => '500ms', max_attempts => 1, enabled => 0);
    value($node, "CREATE FUNCTION app.slow() RETURNS trigger LANGUAGE plpgsql AS \$\$ BEGIN PERFORM pg_sleep(0.024); RETURN NEW; END \$\$;
        CREATE TRIGGER slow BEFORE UPDATE ON $table FOR EACH ROW WHEN (NEW.status = 'published') EXECUTE FUNCTION app.slow()");
    my @ids = stage_many($node, 'slow_marks', 100);
    set_route('slow_marks', 'enabled = true');
    wait_empty($node, $table, endpoint => $e);
    is(statuses($table), 'published 100', 'all are published');
    my $oracle = OutboxRelay::Oracle->new(node => $node, relation => $table, endpoint => $e, truth => \@ids);
    $oracle->check_duplicates_at_most(0);
};

# RET-07 for some rows alone: they hold up nobody, fail no pass for good, and are not sent again.
subtest 'rows that can not be marked stay, the lane goes on' => sub {
    my $table = table_and_route('unmarkable', reclaim_stale_after => '300ms', enabled => 0);
    value($node, "ALTER TABLE $table ADD CONSTRAINT no_bad CHECK (event_type <> 'bad' OR status <> 'published')");
    set_route('unmarkable', 'enabled = true');
    stage_many($node, 'unmarkable', 2, type => 'bad');
    like(wait_lane($node, 'unmarkable', 'failed_passes > 0')->{last_error}, qr/no_bad/, 'the error is shown');
    my $offset = log_offset($node);
    stage($node, 'unmarkable', event_type => 'good');
    wait_sql($node, 'postgres', "SELECT status = 'published' FROM $table WHERE event_type = 'good'");
    my $lane = wait_lane($node, 'unmarkable', 'set_aside = 2 AND consecutive_failures = 0');
    like(log_since($node, $offset), qr/sets row \S+ of app\.unmarkable aside: it can't be settled, others can: .*no_bad/, 'each is named with its error');
    # Longer than they are stale.
    wait_sql($node, 'postgres', "SELECT min(processing_at) < now() - interval '2 s' FROM $table WHERE status = 'processing'");
    wait_passes($node, 'unmarkable', 3);
    is(statuses($table), 'processing 2, published 1', 'they are not reclaimed');
    is(value($node, "SELECT reclaimed FROM outbox_relay_pass('unmarkable')"), 0, 'nor by a pass on demand');
    is($e->count->{received}, 3, 'nothing was sent twice');
    is(lane($node, 'unmarkable')->{failed_passes}, $lane->{failed_passes}, 'they fail no pass any more');
    value($node, "ALTER TABLE $table DROP CONSTRAINT no_bad");
    wait_empty($node, $table, endpoint => $e);
    is($e->count->{received}, 3, 'and are marked once that is possible');
    wait_lane($node, 'unmarkable', 'set_aside = 0 AND published = 3 AND duplicates_avoided = 2');
};

# What was counted is what was marked, in a pass that fails too.
subtest 'a failed pass counts what it has settled' => sub {
    my $table = table_and_route('counted', interval => '1h', concurrency => 1, enabled => 0);
    my @ids = stage_many($node, 'counted', 50);
    value($node, "ALTER TABLE $table ADD CONSTRAINT not_this CHECK (status <> 'published' OR event_id <> '$ids[20]')");
    set_route('counted', 'enabled = true');
    my $lane = wait_lane($node, 'counted', 'failed_passes > 0');
    is_deeply([ @$lane{qw(claimed published failed retried set_aside)} ], [ 49, 49, 0, 0, 1 ], 'forty-nine');

    # And where the table refuses everything from some time on.
    $table = table_and_route('counted_chunks', interval => '1h', concurrency => 1, enabled => 0);
    stage_many($node, 'counted_chunks', 40);
    value($node, "CREATE SEQUENCE app.marks; CREATE FUNCTION app.first_32() RETURNS trigger LANGUAGE plpgsql AS \$\$
        BEGIN IF nextval('app.marks') > 32 THEN RAISE 'no more marks'; END IF; RETURN NEW; END \$\$;
        CREATE TRIGGER first_32 BEFORE UPDATE ON $table FOR EACH ROW WHEN (NEW.status = 'published') EXECUTE FUNCTION app.first_32()");
    set_route('counted_chunks', 'enabled = true');
    $lane = wait_lane($node, 'counted_chunks', 'failed_passes > 0');
    is_deeply([ @$lane{qw(claimed published)} ], [ 32, 32 ], 'the first chunk');
};

# Row locks that outlast reclaim_stale_after: what was acknowledged is not stale, whoever reclaims.
sub acknowledged_under_locks
{
    my ($name, $count, %columns) = @_;
    my $table = table_and_route($name, url => $e->url('/hang'), pass_statement_timeout => '200ms', pass_deadline => '60s', reclaim_stale_after => '500ms', %columns);
    my @ids = stage_many($node, $name, $count);
    $e->wait_for_count($count, of => 'inflight');
    my $session = hold_session($node, "BEGIN; SELECT FROM $table FOR UPDATE");
    set_route($name, "url = '" . $e->url . "'");
    $e->release(1);
    wait_lane($node, $name, 'failed_passes >= 2');
    wait_sql($node, 'postgres', "SELECT min(processing_at) < now() - interval '1 s' FROM $table");
    return ($table, $session, OutboxRelay::Oracle->new(node => $node, relation => $table, endpoint => $e, truth => \@ids));
}

subtest 'row locks for longer than reclaim_stale_after' => sub {
    my ($table, $session, $oracle) = acknowledged_under_locks('stale_locked', 12);
    $session->quit;
    wait_empty($node, $table, endpoint => $e);
    $oracle->check_nothing_lost;
    $oracle->check_duplicates_at_most(0);
    is(lane($node, 'stale_locked')->{reclaimed}, 0, 'nothing was reclaimed');
};

subtest 'a pass on demand reclaims nothing that is acknowledged' => sub {
    my ($table, $session, $oracle) = acknowledged_under_locks('on_demand', 5, interval => '1h', retry_max_backoff => '1h');
    set_route('on_demand', 'enabled = false');
    wait_sql($node, 'postgres', "SELECT count(*) = 0 FROM outbox_stat_worker WHERE route = 'on_demand'");
    $session->quit;
    is(value($node, "SELECT claimed || ' ' || reclaimed FROM outbox_relay_pass('on_demand')"), '0 0', 'nothing');
    # The same wait that a failed pass has to bear as ever.
    set_route('on_demand', "enabled = true, interval = '100ms', retry_max_backoff = '400ms'");
    wait_empty($node, $table, endpoint => $e);
    $oracle->check_duplicates_at_most(0);
};

subtest 'a route that changes to consume settles what it has sent' => sub {
    for my $reclaims (1, 0)
    {
        my $name = "to_consume_$reclaims";
        my ($table, $session, $oracle) = acknowledged_under_locks($name, 5);
        set_route($name, "storage = 'consume'" . ($reclaims ? '' : ", reclaim_stale_after = '0'"));
        wait_passes($node, $name, 1);
        $session->quit;
        stage($node, $name);
        wait_empty($node, $table, all => 1, endpoint => $e);
        is($e->count->{received}, 6, $reclaims ? 'nothing was sent twice' : 'nor where reclaim is off');
        wait_lane($node, $name, 'duplicates_avoided = 5 AND published = 6');
    }
};

# With reclaim off nobody else would ever give them back.
subtest 'rows that were not sent go back as soon as that is possible' => sub {
    my $table = table_and_route('unsent', url => $e->url('/hang'), concurrency => 2, pass_statement_timeout => '200ms', pass_deadline => '60s', reclaim_stale_after => '0');
    my @ids = stage_many($node, 'unsent', 6);
    $e->wait_for_count(2, of => 'inflight');
    my $session = hold_session($node, "BEGIN; LOCK TABLE $table IN SHARE ROW EXCLUSIVE MODE");
    my $pid = worker_pid($node, 'postgres');
    set_route('unsent', "url = '" . $e->url . "'");
    value($node, "SELECT pg_cancel_backend($pid)");
    wait_lane($node, 'unsent', 'failed_passes >= 2');
    is(statuses($table), 'processing 6', 'a lock is in the way');
    $session->quit;
    wait_empty($node, $table, endpoint => $e);
    is(value($node, "SELECT count(*) FROM $table WHERE status = 'published' AND attempts = 0"), 6, 'then all go out, and no attempt is counted');

    # Without a lock a cancelled pass gives back at once what is in flight, too.
    $e->reset;
    set_route('unsent', "url = '" . $e->url('/hang') . "', reclaim_stale_after = '1h', interval = '1h'");
    stage_many($node, 'unsent', 3);
    $e->wait_for_count(2, of => 'inflight');
    set_route('unsent', 'enabled = false');
    value($node, "SELECT pg_cancel_backend($pid)");
    wait_sql($node, 'postgres', "SELECT count(*) = 3 FROM $table WHERE status = 'pending' AND processing_at IS NULL AND attempts = 0");
    pass('nothing stays processing');
};

subtest 'DROP EXTENSION waits for a pass that publishes' => sub {
    my $table = table_and_route('dropped', url => $e->url('/hang'), concurrency => 2, pass_deadline => '60s');
    stage_many($node, 'dropped', 5);
    $e->wait_for_count(2, of => 'inflight');
    my $dropper = $node->background_psql('postgres', on_error_stop => 0);
    $dropper->query_until(qr/^going$/m, "\\echo going\nDROP EXTENSION outbox_relay;\n");
    wait_sql($node, 'postgres', "SELECT count(*) = 1 FROM pg_locks WHERE NOT granted AND locktype = 'object'");
    $e->release(5);
    wait_empty($node, $table, endpoint => $e);
    is(statuses($table), 'published 5', 'all is sent and marked');
    wait_sql($node, 'postgres', "SELECT count(*) = 0 FROM pg_extension WHERE extname = 'outbox_relay'");
    $dropper->quit;
    $node->safe_psql('postgres', 'CREATE EXTENSION outbox_relay');

    # A pass that is cancelled, and one whose worker is told to leave, hold it no longer.
    for my $end (qw(pg_cancel_backend pg_terminate_backend))
    {
        $table = table_and_route("dropped_$end", url => $e->url('/hang'), pass_deadline => '60s');
        stage_many($node, "dropped_$end", 2);
        $e->wait_for_count(2, of => 'inflight');
        my $pid = worker_pid($node, 'postgres');
        set_route("dropped_$end", 'enabled = false');
        value($node, "SELECT $end($pid)");
        wait_sql($node, 'postgres', "SELECT count(*) = 2 FROM $table WHERE status = 'pending'");
        wait_sql($node, 'postgres', "SELECT count(*) = 0 FROM pg_locks WHERE classid = 'pg_extension'::regclass");
        pass("$end leaves no lock");
    }
};

# SHD-15
subtest 'an eviction while marks wait for a lock' => sub {
    my $table = table_and_route('evicted', url => $e->url('/hang'), pass_statement_timeout => '1s', pass_deadline => '60s');
    my @ids = stage_many($node, 'evicted', 32);
    $e->wait_for_count(32, of => 'inflight');
    my $session = hold_session($node, "BEGIN; SELECT FROM $table FOR UPDATE");
    set_route('evicted', "url = '" . $e->url . "'");
    $e->release(1);
    my $pid = worker_pid($node, 'postgres');
    wait_sql($node, 'postgres', "SELECT wait_event_type = 'Lock' FROM pg_stat_activity WHERE pid = $pid");
    my $started = time();
    value($node, "SELECT pg_terminate_backend($pid)");
    wait_until(sub { !kill 0, $pid }, what => 'the worker to leave');
    cmp_ok(time() - $started, '<', 4, 'takes less than five seconds');
    $session->quit;
    wait_empty($node, $table, endpoint => $e);
    OutboxRelay::Oracle->new(node => $node, relation => $table, endpoint => $e, truth => \@ids)->check_duplicates_at_most(0);
};

# A table that tenants share has an index that statements are tied to: it is looked up again behind a mark that failed.
subtest 'a mark that fails on a table that tenants share' => sub {
    $e->reset;
    my $tenant = '11111111-1111-1111-1111-111111111111';
    value($node, "CREATE FUNCTION app.tenants() RETURNS SETOF uuid LANGUAGE sql AS \$\$ SELECT '$tenant'::uuid \$\$");
    make_outbox($node, 'postgres', 'app.shared', tenants => 1);
    create_route($node, 'shared', 'app.shared', $e->url, %fast, tenants_function => 'app.tenants', enabled => 0);
    stage($node, 'shared', tenant_id => $tenant, event_type => $_) for qw(good bad good);
    value($node, "ALTER TABLE app.shared ADD CONSTRAINT no_bad CHECK (event_type <> 'bad' OR status <> 'published')");
    set_route('shared', 'enabled = true');
    wait_sql($node, 'postgres', "SELECT count(*) = 2 FROM app.shared WHERE status = 'published'");
    is(statuses('app.shared'), 'processing 1, published 2', 'the others have their marks');
    unlike(log_since($node, 0), qr/was terminated by signal/, 'and no process died of it');
};

done_testing();
