# ALTER EXTENSION … UPDATE while relaying (F-37): it does not wait for a pass, and what is of another version than the
# loaded library waits, says so, and goes on once both fit again.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use Time::HiRes qw(time);
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $node = new_node('update', conf => "outbox_relay.interval = '300ms'\n");
my $e = OutboxRelay::Endpoint->start;
my $version = value($node, "SELECT extversion FROM pg_extension WHERE extname = 'outbox_relay'");

# Update scripts of versions that do not exist; the server's programs are this run's own copy.
my $folder = $node->config_data('--sharedir') . '/extension';
my @scripts = map { "$folder/outbox_relay--$_.sql" } "$version--999.0", "999.0--$version";
for my $script (@scripts)
{
    open my $file, '>', $script or die "$script: $!";
    print $file "COMMENT ON FUNCTION outbox_relay_pass(text, integer, uuid) IS 'of an update';\n";
    close $file;
}
END { unlink @scripts }

make_outbox($node, 'postgres', 'app.outbox');
create_route($node, 'main', 'app.outbox', $e->url('/hang'), pass_deadline => '60s');
stage_many($node, 'main', 3);
$e->wait_for_count(3, of => 'inflight');

my $offset = log_offset($node);
my $start = time;
value($node, "ALTER EXTENSION outbox_relay UPDATE TO '999.0'");
cmp_ok(time - $start, '<', 1, 'the update does not wait for the pass');
$e->release(3);
wait_sql($node, 'postgres', 'SELECT count(*) = 0 FROM app.outbox');
is($e->count->{acked}, 3, 'which ends as it would have');

wait_log($node, qr/WARNING: .*extension "outbox_relay" in database "postgres" is not of the loaded library's version \Q$version\E/, $offset);
pass('the difference is called out');
is(lane($node, 'main')->{state}, 'broken', 'and shown');
value($node, "UPDATE outbox_route SET url = '" . $e->url . "'");
stage_many($node, 'main', 5);
my $pid = wait_for_worker($node, 'postgres');
ok($pid, 'a worker is there');
my $passes = lane($node, 'main')->{passes};
sleep 1;
is(value($node, 'SELECT count(*) FROM app.outbox'), 5, 'what is staged waits');
is(lane($node, 'main')->{passes}, $passes, 'no pass is made');

value($node, "ALTER EXTENSION outbox_relay UPDATE TO '$version'");
wait_empty($node, 'app.outbox', endpoint => $e);
is($e->count->{acked}, 8, 'once both fit, it goes out, without a restart');
isnt(lane($node, 'main')->{state}, 'broken', 'and the state says so');

# The same across a restart: whoever starts finds the difference at once.
value($node, "ALTER EXTENSION outbox_relay UPDATE TO '999.0'");
$node->restart;
$offset = log_offset($node);
stage_many($node, 'main', 1);
wait_for_worker($node, 'postgres');
is(lane($node, 'main')->{state}, 'broken', 'after a restart too');
value($node, "ALTER EXTENSION outbox_relay UPDATE TO '$version'");
wait_empty($node, 'app.outbox', endpoint => $e);
is($e->count->{acked}, 9, 'and goes on');

done_testing();
