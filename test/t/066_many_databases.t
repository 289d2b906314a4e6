# Databases that others hold, and more of them than there is room for (12 in this build): each with routes is found and
# served.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Test::More;
use Time::HiRes qw(time);
use OutboxRelay::Endpoint;
use OutboxRelay::Lane;
use OutboxRelay::Node;

my $node = new_node('databases', conf => "autovacuum = off\noutbox_relay.workers = 1\noutbox_relay.interval = 1s\n");
my $e = OutboxRelay::Endpoint->start;

# Extension, table, route and an event in a database.
sub equip
{
    my ($db) = @_;
    $node->safe_psql($db, 'CREATE EXTENSION outbox_relay');
    make_outbox($node, $db, 'app.outbox');
    create_route($node, $db, 'app.outbox', $e->url, db => $db);
    stage($node, $db, db => $db);
    return;
}

# A database that was just equipped is served, and in time.
sub served
{
    my ($db) = @_;
    my $began = time();
    wait_empty($node, 'app.outbox', db => $db, all => 1, timeout => 30);
    cmp_ok(time() - $began, '<', 10, "$db: within ten seconds");
    return;
}

subtest 'a start that waits for the lock of its database holds up no other' => sub {
    $node->safe_psql('postgres', 'CREATE DATABASE held');
    equip('held');
    served('held');
    my $holder = hold_session($node, 'BEGIN; ALTER DATABASE held RENAME TO moved');
    wait_sql($node, 'postgres', "SELECT count(*) > 0 FROM outbox_stat_worker WHERE phase = 'starting'");
    $node->safe_psql('postgres', 'CREATE DATABASE fresh');
    equip('fresh');
    served('fresh');
    $holder->query_safe('ROLLBACK');
    $holder->quit;
    wait_for_worker($node, 'held');
};

my @crowd = map { "crowd_$_" } 1 .. 14;

subtest 'more databases than there is room for, few of them with routes' => sub {
    $node->safe_psql('postgres', "CREATE DATABASE $_") for @crowd;
    wait_sql($node, 'postgres', "SELECT bool_and(xact_commit > 0) FROM pg_stat_database WHERE datname LIKE 'crowd%'");
    for my $db (@crowd[0, 1, 13])
    {
        equip($db);
        served($db);
    }
    is(log_since($node, 0) =~ /more databases have routes/ ? 1 : 0, 0, 'nothing to warn of');
};

subtest 'more with routes' => sub {
    my $offset = log_offset($node);
    equip($_) for @crowd[2 .. 12];
    wait_log($node, qr/WARNING:.*more databases have routes of outbox_relay than the 12/, $offset);
    my %waiting = map { $_ => 1 } @crowd, qw(held fresh);
    my $longest = time() + 60;
    while (%waiting && time() < $longest)
    {
        for my $db (sort keys %waiting)
        {
            next if value($node, 'SELECT count(*) FROM app.outbox', $db);
            $node->safe_psql($db, 'DELETE FROM outbox_route');
            delete $waiting{$db};
        }
        select undef, undef, undef, 0.2;
    }
    is(join(' ', sort keys %waiting), '', 'those beyond are served when others have no routes any more');
    my @said = log_since($node, $offset) =~ /more databases have routes/g;
    is(scalar @said, 1, 'said once');
};

$node->stop;
done_testing();
