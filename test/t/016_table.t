# What the relay does to the application's table, and what it does not: no DDL, no column written that it does not own,
# one transaction a pass, one index walked.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $node = new_node('table', conf => "autovacuum = off\noutbox_relay.workers = 1\nmax_prepared_transactions = 2\n");
my $e = OutboxRelay::Endpoint->start;
my %fast = (interval => '100ms', retry_base_delay => '100ms', retry_max_backoff => '200ms');

# SCH-01
my $catalog = <<'SQL';
SELECT md5(string_agg(x, E'\n' ORDER BY x)) FROM (
    SELECT c.oid::regclass || ' ' || c.relfilenode || ' ' || c.relkind::text || ' ' || coalesce(c.relacl::text, '') AS x FROM pg_class c
        WHERE relnamespace = 'app'::regnamespace
    UNION ALL SELECT indexrelid::text FROM pg_index JOIN pg_class c ON c.oid = indrelid WHERE relnamespace = 'app'::regnamespace
    UNION ALL SELECT concat(attrelid, attname, atttypid, attnum) FROM pg_attribute JOIN pg_class c ON c.oid = attrelid
        WHERE relnamespace = 'app'::regnamespace) s
SQL
make_outbox($node, 'postgres', 'app.outbox');
my $before = value($node, $catalog);
create_route($node, 'r', 'app.outbox', $e->url, %fast);
for (1 .. 3)
{
    stage_many($node, 'r', 50);
    wait_empty($node, 'app.outbox', all => 1);
}
$node->restart;
stage($node, 'r');
wait_empty($node, 'app.outbox', all => 1);
is(value($node, $catalog), $before, 'SCH-01: the table, its indexes and columns are as they were');

# CON-01, CON-02
subtest 'only pending and failed rows, and two columns that are never written' => sub {
    $node->safe_psql('postgres', "UPDATE outbox_route SET url = '" . $e->url('/status/500') . "', max_attempts = 2 WHERE name = 'r'");
    $node->safe_psql('postgres', <<'SQL');
CREATE TABLE app.audit (status text, touched boolean);
CREATE FUNCTION app.audit_f() RETURNS trigger LANGUAGE plpgsql AS
    $$ BEGIN INSERT INTO app.audit VALUES (NEW.status, NEW.processing_at IS NOT NULL OR NEW.published_at IS NOT NULL); RETURN NEW; END $$;
CREATE TRIGGER audit AFTER INSERT OR UPDATE ON app.outbox FOR EACH ROW EXECUTE FUNCTION app.audit_f();
SQL
    stage_many($node, 'r', 5);
    wait_sql($node, 'postgres', "SELECT count(*) = 5 FROM app.outbox WHERE status = 'failed'");
    is(value($node, "SELECT string_agg(DISTINCT status, ',' ORDER BY status) || bool_or(touched) FROM app.audit"), 'failed,pendingfalse',
        'never processing, never published, neither column touched');
    $node->safe_psql('postgres', 'DROP TRIGGER audit ON app.outbox; TRUNCATE app.outbox; DROP FUNCTION app.audit_f');
    $e->reset;
};

# CON-03
subtest 'what a pass does becomes visible at once' => sub {
    $node->safe_psql('postgres', "UPDATE outbox_route SET url = '" . $e->url('/ok') . "', interval = '1h', max_attempts = 20 WHERE name = 'r'");
    $e->rules(map { { header => 'ce-type', value => $_, step => '/status/500' } } 'bad');
    # 40 to publish and 10 to retry in one pass: a reader sees 50 untouched rows or 10 retried ones.
    my $reader = hold_session($node, <<'SQL');
CREATE TABLE public.views (pending int, retried int);
CREATE PROCEDURE public.watch() LANGUAGE plpgsql AS $$
DECLARE p int; r int;
BEGIN
    LOOP
        SELECT count(*), count(*) FILTER (WHERE attempts > 0) INTO p, r FROM app.outbox;
        INSERT INTO public.views SELECT p, r WHERE NOT EXISTS (SELECT FROM public.views WHERE (pending, retried) = (p, r));
        COMMIT;
        EXIT WHEN r > 0 OR p = 0 AND EXISTS (SELECT FROM public.views WHERE pending = 50);
    END LOOP;
END $$;
SQL
    wait_lane($node, 'r', "state = 'idle'");
    my $watch = $node->background_psql('postgres');
    $watch->query_until(qr/started/, "\\echo started\nCALL public.watch();\n");
    $node->safe_psql('postgres', q{BEGIN; SELECT outbox_stage('r', 'good', '1') FROM generate_series(1, 40);}
          . q{SELECT outbox_stage('r', 'bad', '1') FROM generate_series(1, 10); COMMIT});
    wait_sql($node, 'postgres', 'SELECT count(*) > 0 FROM public.views WHERE retried > 0');
    is(value($node, q{SELECT string_agg(pending || '/' || retried, ' ' ORDER BY pending) FROM public.views WHERE pending > 0}),
        '10/10 50/0', 'nothing in between');
    $watch->quit;
    $reader->quit;
    $node->safe_psql('postgres', 'TRUNCATE app.outbox');
    $e->reset;
};

# BKO-08
subtest 'failing rows do not slow the lane down' => sub {
    $node->safe_psql('postgres', "UPDATE outbox_route SET url = '" . $e->url('/status/500') . "', interval = '200ms', breaker_threshold = 1000 WHERE name = 'r'");
    stage_many($node, 'r', 3);
    my $first = wait_passes($node, 'r', 2);
    my $later = wait_passes($node, 'r', 10);
    is($later->{consecutive_failures}, 0, 'no failed pass');
    cmp_ok($later->{now} - $first->{now}, '<', 10 * 0.5 + 1, 'the next polls come on time');
    $node->safe_psql('postgres', 'TRUNCATE app.outbox');
};

$node->stop;
done_testing();
