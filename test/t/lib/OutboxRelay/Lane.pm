package OutboxRelay::Lane;

# What the statistics views say of a lane, and waits for it: passes are the ticks of a test's clock.
#
#   my $before = lane($node, 'r');
#   wait_passes($node, 'r', 3);
#   is(lane($node, 'r')->{claimed} - $before->{claimed}, 3);

use strict;
use warnings;
use Exporter 'import';
use JSON::PP ();
use OutboxRelay::Node;

our @EXPORT = qw(lane wait_passes wait_lane set_conf hold_session value);

# lane(NODE, ROUTE, DB): the row of outbox_stat_route as a hash; undef when there is none. Times are seconds
# since the epoch, under their column's name; now is the server's clock.
sub lane
{
    my ($node, $route, $db) = @_;
    my $name = sql_literal($route);
    my $times = join ', ', map { "'$_', extract(epoch FROM $_)" } qw(due_at backoff_until last_pass_at last_error_at stats_reset);
    my $row = $node->safe_psql($db // 'postgres', <<"SQL");
SELECT to_jsonb(s) || jsonb_build_object('now', extract(epoch FROM clock_timestamp()), $times)
FROM outbox_stat_route AS s WHERE route = $name
SQL
    return $row eq '' ? undef : JSON::PP->new->utf8->decode($row);
}

# wait_lane(NODE, ROUTE, CONDITION, %opts): waits until a condition on outbox_stat_route holds for the route
# (SQL; opts of wait_sql, and db), and returns its lane().
sub wait_lane
{
    my ($node, $route, $condition, %opts) = @_;
    my $db = delete $opts{db} // 'postgres';
    my $name = sql_literal($route);
    wait_sql($node, $db, "SELECT EXISTS (SELECT FROM outbox_stat_route WHERE route = $name AND ($condition))",
        diag => sub { JSON::PP->new->canonical->pretty->encode(lane($node, $route, $db) // {}) }, %opts);
    return lane($node, $route, $db);
}

# wait_passes(NODE, ROUTE, N, %opts): waits until N more passes of the lane have begun and ended, committed or
# not. (The one that may be under way when we are called is not counted.) Returns the lane().
sub wait_passes
{
    my ($node, $route, $count, %opts) = @_;
    my $lane = lane($node, $route, $opts{db});
    my $so_far = $lane ? $lane->{passes} + $lane->{failed_passes} : 0;
    my $more = $count + ($lane && $lane->{state} eq 'running' ? 1 : 0);
    return wait_lane($node, $route, "passes + failed_passes >= $so_far + $more", %opts);
}

# value(NODE, SQL, DB): one value.
sub value { my ($node, $sql, $db) = @_; return $node->safe_psql($db // 'postgres', $sql); }

# set_conf(NODE, %settings): ALTER SYSTEM and reload; undef resets one.
sub set_conf
{
    my ($node, %settings) = @_;
    my @sql = map {
        "ALTER SYSTEM " . (defined $settings{$_} ? "SET $_ = " . sql_literal($settings{$_}) : "RESET $_")
    } sort keys %settings;
    $node->safe_psql('postgres', join(";\n", @sql, 'SELECT pg_reload_conf()'));
    return;
}

# hold_session(NODE, SQL, DB): a session that ran SQL (BEGIN; ...) and stays; end it with query_safe('COMMIT')
# and quit.
sub hold_session
{
    my ($node, $sql, $db) = @_;
    my $session = $node->background_psql($db // 'postgres');
    $session->query_safe($sql);
    return $session;
}

1;
