# The memory of a worker stays flat: MEMORY_EVENTS (50000) events through an endpoint that fails in every way, with
# passes that fail in the database and statements that are cancelled. At most 10 MB between a worker's first fifth and
# the end.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $events = $ENV{MEMORY_EVENTS} // 50_000;
my $node = new_node('memory', conf => "outbox_relay.workers = 2\nmax_wal_size = 4GB\n");
my $e = OutboxRelay::Endpoint->start(max_seconds => 7200);
$e->script('dice', ('/ok') x 180, '/status/500?body=no', '/status/503', '/drop', '/rst', '/rst-head', '/garbage', '/no-status',
    '/half-headers', '/early', '/nul-header', '/big-body?bytes=300000', '/big-reason', '/flood-1xx?n=3', '/obs-fold', '/dirty-body',
    '/gzip?bytes=1000000&status=200', '/rst-at=20', '/rst-answer', '/status/429?retry_after=0', '/close-after=1');
make_outbox($node, 'postgres', 'app.outbox');
# One settling in a thousand rows fails, for that time.
$node->safe_psql('postgres', <<'SQL');
CREATE FUNCTION app.dice() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN IF random() < 0.001 THEN RAISE EXCEPTION 'dice' USING DETAIL = repeat('x', 10000); END IF; RETURN OLD; END $$;
CREATE TRIGGER dice BEFORE DELETE ON app.outbox FOR EACH ROW EXECUTE FUNCTION app.dice();
SQL
my @lanes = qw(one two three four);
create_route($node, $_, 'app.outbox', $e->url('/script/dice?then=random'), interval => '100ms', retry_base_delay => '50ms',
    retry_max_backoff => '100ms', max_attempts => 0, breaker_threshold => 0) for @lanes;

# What the processes have for themselves, in kB, by pid: shared buffers, touched one after another, are not theirs.
sub memory
{
    my %of;
    for my $pid (worker_pids($node, 'postgres'))
    {
        ($of{$pid}) = PostgreSQL::Test::Utils::slurp_file("/proc/$pid/status") =~ /^RssAnon:\s+(\d+)/m;
    }
    return \%of;
}

# Stages so many and waits until nearly all are gone, so that the backlog stays small; a cancelled statement now and
# then.
sub relay
{
    my ($count) = @_;
    while ($count > 0)
    {
        my $some = $count < 2000 ? $count : 2000;
        $node->safe_psql('postgres', "SELECT count(outbox_stage((ARRAY['one', 'two', 'three', 'four'])[1 + g % 4], 'test.event',"
              . " jsonb_build_object('n', g, 'a', repeat('x', g % 1000)), ordering_key => 'k' || g % 100)) FROM generate_series(1, $some) AS g");
        $node->safe_psql('postgres', "SELECT pg_cancel_backend(pid) FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker'");
        $count -= $some;
        wait_sql($node, 'postgres', 'SELECT count(*) < 1000 FROM app.outbox', timeout => 180);
    }
    return;
}

relay(int($events / 5));
wait_until(sub { worker_pids($node, 'postgres') == 2 }, what => 'two workers');
my $warm = memory();
is(scalar keys %$warm, 2, 'two workers');
relay($events - int($events / 5));
my $end = memory();
for my $pid (sort keys %$warm)
{
    my $grown = defined $end->{$pid} ? $end->{$pid} - $warm->{$pid} : 'it is gone';
    ok(defined $end->{$pid} && $grown < 10_240, "worker $pid has grown by less than 10 MB over $events events")
      or diag($grown, "\n", join "\n", grep { /FATAL|ERROR|exited with/ } split /\n/, log_since($node, 0));
    diag("$events events: a worker's own memory was $warm->{$pid} kB, then $end->{$pid} kB") if $end->{$pid};
}
# A row that met the dice alone is set aside, and is let go when it changes.
wait_sql($node, 'postgres', 'SELECT (SELECT count(*) FROM app.outbox) <= (SELECT sum(set_aside) FROM outbox_stat_route)', timeout => 180);
my $aside = value($node, 'UPDATE app.outbox SET ordering_key = NULL; SELECT sum(set_aside) FROM outbox_stat_route');
wait_empty($node, 'app.outbox', endpoint => $e, timeout => 180);
diag("$aside rows were set aside");
my $counts = value($node, 'SELECT sum(published) || $$ published, $$ || sum(retried) || $$ retried, $$ || sum(failed_passes) || $$ failed passes$$ FROM outbox_stat_route');
diag($counts);
cmp_ok(value($node, 'SELECT sum(failed_passes) FROM outbox_stat_route'), '>', 5, 'passes failed too');
cmp_ok($e->count->{events}, '>=', $events, 'all came through');

$node->stop;
done_testing();
