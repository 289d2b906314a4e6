# Staging and passes on demand behind pgbouncer: session and transaction pooling, where nothing of ours stays behind in
# the server's session for the next client; and what is left of it under statement pooling.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;
use OutboxRelay::Wait ();

my ($pgbouncer) = grep { -x } map { "$_/pgbouncer" } split(/:/, $ENV{PATH}), '/usr/sbin';
plan skip_all => 'no pgbouncer here' if !$pgbouncer;

my $node = new_node('pooled', conf => "autovacuum = off\n");
my $e = OutboxRelay::Endpoint->start;
make_outbox($node, 'postgres', 'app.outbox');
create_route($node, 'orders', 'app.outbox', $e->url, enabled => 0, interval => '1h');
$node->safe_psql('postgres', 'CREATE TABLE app.orders (id int)');

my $folder = PostgreSQL::Test::Utils::tempdir_short();
my $user = value($node, 'SELECT current_user');
my $pid;

# Runs pgbouncer in this mode with a single connection to the server; ends the one before.
sub pooling
{
    my ($mode) = @_;
    leave();
    open(my $file, '>', "$folder/pgbouncer.ini") or die "$folder: $!";
    print $file <<"INI";
[databases]
postgres = host=@{[ $node->host ]} port=@{[ $node->port ]} user=$user
[pgbouncer]
listen_addr =
listen_port = 6432
unix_socket_dir = $folder
auth_type = any
pool_mode = $mode
default_pool_size = 1
pidfile = $folder/pid
logfile = $folder/log
INI
    close $file;
    $pid = fork() // die "fork: $!";
    if (!$pid)
    {
        open(STDOUT, '>', "$folder/out") && open(STDERR, '>&', \*STDOUT) && exec { $pgbouncer } $pgbouncer, '-q', "$folder/pgbouncer.ini";
        POSIX::_exit(127);
    }
    OutboxRelay::Wait::wait_until(sub { -S "$folder/.s.PGSQL.6432" }, what => 'pgbouncer to listen', diag => sub { slurp("$folder/out") . slurp("$folder/log") });
    return;
}

sub slurp { my ($name) = @_; open(my $file, '<', $name) or return ''; local $/; return <$file> // ''; }

sub leave
{
    return if !$pid;
    local $?;
    kill 'TERM', $pid;
    waitpid $pid, 0;
    undef $pid;
    return;
}

# A client of its own: what it says on stdout, and its errors. It goes on after one: pgbouncer closes the connection of
# a client that leaves in the middle of a transaction.
sub client
{
    my ($sql) = @_;
    my ($out, $err) = ('', '');
    my @command = ('psql', '-XAtq', '-h', $folder, '-p', 6432, '-U', $user, '-d', 'postgres', '-f', '-');
    IPC::Run::run(\@command, '<', \$sql, '>', \$out, '2>', \$err);
    chomp $out;
    return "$out$err";
}

my $session = q{SELECT pg_backend_pid() || ' ' || string_agg(name || '=' || setting, ',' ORDER BY name) FROM pg_settings
    WHERE name ~ 'timeout|search_path|^enable_|^jit$|outbox_relay|synchronous_commit|row_security|role'};

for my $mode ('session', 'transaction')
{
    subtest "$mode pooling" => sub {
        pooling($mode);
        my $before = client($session);
        is(client(<<'SQL'), "3\n0\n3", 'staged and passed, each in its transaction');
BEGIN; SET LOCAL outbox_relay.tenant_id = '00000000-0000-0000-0000-000000000001';
SELECT count(outbox_stage('orders', 't', '1')) FROM generate_series(1, 3); SELECT claimed FROM outbox_relay_pass('orders'); COMMIT;
SELECT published FROM outbox_relay_pass('orders');
SQL
        is(client($session), $before, 'the next client has the same session, as it was');
        is(client(<<'SQL'), "2\n2", 'a rollback returns every row');
SELECT count(outbox_stage('orders', 't', '1')) FROM generate_series(1, 2);
BEGIN; SELECT published FROM outbox_relay_pass('orders'); ROLLBACK;
SQL
        like(client('BEGIN; INSERT INTO app.orders VALUES (1); SELECT outbox_relay_pass(NULL); COMMIT'), qr/must not be NULL/, 'an error');
        is(client('SELECT count(*) FROM app.orders'), 0, 'undoes the client\'s transaction');
        is(client($session), $before, 'and leaves nothing behind');
        is(client("BEGIN ISOLATION LEVEL REPEATABLE READ; SELECT published FROM outbox_relay_pass('orders'); COMMIT"), 2, 'the next client relays');
        # What a client in the same session prepared or dropped does not matter.
        is(client("DISCARD ALL; SELECT count(outbox_stage('orders', 't', '1')); SELECT published FROM outbox_relay_pass('orders')"), "1\n1", 'after DISCARD ALL');
        is(client($session), $before, 'the session is still as it was');
    };
}

subtest 'statement pooling' => sub {
    pooling('statement');
    my $before = client($session);
    is(client("SELECT count(outbox_stage('orders', 't', '1')) FROM generate_series(1, 2)"), 2, 'a statement stages, in a transaction of its own');
    is(client("SELECT published FROM outbox_relay_pass('orders')"), 2, 'and a statement is a whole pass');
    is(client($session), $before, 'nothing stays behind');
    like(client('BEGIN; SELECT 1; COMMIT'), qr/not allowed|closed/i, 'but there are no transactions: an event can not be part of one');
    $node->safe_psql('postgres', "UPDATE outbox_route SET require_transaction = true WHERE name = 'orders'");
    like(client("SELECT outbox_stage('orders', 't', '1')"), qr/requires a transaction block/, 'which require_transaction says');
    is(client(q{DO $$ BEGIN INSERT INTO app.orders VALUES (2); PERFORM outbox_stage('orders', 't', '1'); END $$; SELECT count(*) FROM app.orders}), 1,
        'a function or DO block is one');
    is($e->count->{malformed}, 0, 'all requests are whole');
};

END { leave() }
$node->stop;
done_testing();
