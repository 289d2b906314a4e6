# Copies of a database: a dump restored where an owner is missing and nothing is preloaded, and where everything is
# there. Both routes come back as they were written, and nothing is sent.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $source = new_node('source');
my $e = OutboxRelay::Endpoint->start;
$source->safe_psql('postgres', 'CREATE ROLE first_owner; CREATE ROLE second_owner');
for my $name (qw(first second))
{
    make_outbox($source, 'postgres', "$name.outbox", owner => "${name}_owner");
    create_route($source, $name, "$name.outbox", $e->url, owner => "${name}_owner", enabled => 'true',
        max_claim_rows => 7, headers => { 'X-Key' => 'v' });
}
my $columns = 'name, relation, url, owner, bound_to, max_claim_rows, headers, enabled';
my $rows = value($source, "SELECT array_agg(r ORDER BY name) FROM (SELECT $columns FROM outbox_route) r");
# Rows that are not for now are in the dump too.
insert_rows($source, "$_.outbox", $_, 3, columns => { available_at => \q{now() + interval '1 hour'} }) for qw(first second);
value($source, "INSERT INTO outbox_secret (name, owner, value) VALUES ('key', 'first_owner', 'canary-7f3a')");
my $dump = $source->backup_dir . '/dump.sql';
mkdir $source->backup_dir;
$source->command_ok([ 'pg_dump', '--file', $dump, $source->connstr('postgres') ], 'dumped');
unlike(PostgreSQL::Test::Utils::slurp_file($dump), qr/canary-7f3a/, 'without the secrets');
$e->reset;

# Not preloaded, one owner missing.
my $bare = new_node('bare', preload => '', extension => 0);
$bare->safe_psql('postgres', 'CREATE ROLE first_owner; CREATE DATABASE restored');
$bare->run_log([ 'psql', '-X', '-q', '-d', $bare->connstr('restored'), '-f', $dump ]);
is(value($bare, "SELECT array_agg(r ORDER BY name) FROM (SELECT $columns FROM outbox_route) r", 'restored'), $rows,
    'both routes are there as they were');
is(value($bare, 'SELECT (SELECT count(*) FROM first.outbox) + (SELECT count(*) FROM second.outbox)', 'restored'), 6,
    'and their rows');
is(value($bare, "SELECT string_agg(DISTINCT state, ',') FROM outbox_stat_route", 'restored'), 'foreign',
    'bound to where they came from');
# What an application needs works at once.
isnt(value($bare, "SELECT outbox_stage('first', 't', '{}')", 'restored'), '', 'staging works');
$bare->stop;

# Preloaded: the worker looks, warns once, and relays nothing.
my $full = new_node('full', extension => 0);
$full->safe_psql('postgres', 'CREATE ROLE first_owner; CREATE ROLE second_owner; CREATE DATABASE restored');
my $offset = log_offset($full);
$full->command_ok([ 'psql', '-X', '-q', '-v', 'ON_ERROR_STOP=1', '-d', $full->connstr('restored'), '-f', $dump ], 'restored');
$full->safe_psql('restored', "UPDATE first.outbox SET available_at = NULL");
wait_log($full, qr/WARNING:.*route "first" is bound to another database/, $offset);
wait_log($full, qr/WARNING:.*route "second" is bound to another database/, $offset);
is(value($full, "SELECT string_agg(DISTINCT state, ',') FROM outbox_stat_route", 'restored'), 'foreign', 'foreign');
wait_sql($full, 'postgres', "SELECT count(*) = 0 FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker'");
is($e->count->{received}, 0, 'nothing was sent');
my @warnings = log_since($full, $offset) =~ /WARNING:.*bound to another database/g;
is(scalar @warnings, 2, 'one warning a route');

# Adopted, it is bound here.
is(value($full, "SELECT outbox_adopt('first')", 'restored'), 1, 'adopted');
wait_sql($full, 'restored', "SELECT count(*) = 0 FROM first.outbox");
is($e->count->{acked}, 3, 'and relays');

$full->stop;
$source->stop;
done_testing();
