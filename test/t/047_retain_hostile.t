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

done_testing();
