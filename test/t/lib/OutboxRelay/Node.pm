package OutboxRelay::Node;

# A thin layer over PostgreSQL::Test::Cluster: a scratch cluster with outbox_relay loaded, an application's
# outbox table, routes, staging, and waits for what the worker does. Every node argument is a
# PostgreSQL::Test::Cluster.
#
#   use FindBin;
#   use lib "$FindBin::Bin/lib";
#   use OutboxRelay::Node;
#   my $node = new_node('main');
#   make_outbox($node, 'postgres', 'app.outbox');

use strict;
use warnings;
use Carp;
use Exporter 'import';
use JSON::PP ();
use OutboxRelay::Wait qw(wait_until default_timeout);

# Runs before PostgreSQL::Test is loaded: finds it, and what it needs, through pg_config.
my %config;

BEGIN
{
    my $pg_config = $ENV{PG_CONFIG} || 'pg_config';
    for my $what (qw(bindir pkglibdir))
    {
        $config{$what} = `$pg_config --$what`;
        die "$pg_config --$what failed: is the PostgreSQL server-dev package installed?\n" if $?;
        chomp $config{$what};
    }
    unshift @INC, "$config{pkglibdir}/pgxs/src/test/perl";
    $ENV{PATH} = "$config{bindir}:$ENV{PATH}";
    $ENV{PG_REGRESS} ||= "$config{pkglibdir}/pgxs/src/test/regress/pg_regress";
}

use PostgreSQL::Test::Cluster;
use PostgreSQL::Test::Utils ();

our @EXPORT = qw(new_node make_outbox create_route stage stage_many insert_rows wait_sql wait_empty
  wait_for_server wait_for_worker worker_pid worker_pids kill_worker log_offset wait_log log_tail log_since sql_literal wait_until);

# new_node(NAME, %opts): a cluster, started, with the extension in `db` (postgres).
#   conf       more lines of postgresql.conf             preload    default outbox_relay; '' for none
#   fsync      1: as in production (default 0)           extension  0: no CREATE EXTENSION (default: with a preload)
#   start      0: only initialised                       init       hash for Cluster's init (allows_streaming ...)
sub new_node
{
    my ($name, %opts) = @_;
    my $node = PostgreSQL::Test::Cluster->new($name);
    my $preload = $opts{preload} // 'outbox_relay';
    $node->init(%{ $opts{init} || {} });
    $node->append_conf('postgresql.conf', _conf($preload, $opts{fsync}) . ($opts{conf} // ''));
    return $node if !($opts{start} // 1);
    $node->start;
    $node->safe_psql($opts{db} // 'postgres', 'CREATE EXTENSION outbox_relay')
      if $opts{extension} // ($preload =~ /outbox_relay/);
    return $node;
}

# restart_after_crash: Cluster turns it off, but to come back after a kill is what many tests are about.
sub _conf
{
    my ($preload, $fsync) = @_;
    my $durability = $fsync ? "fsync = on\nfull_page_writes = on\n" : "fsync = off\nfull_page_writes = off\n";
    return $durability . <<"CONF";
shared_preload_libraries = '$preload'
restart_after_crash = on
max_worker_processes = 16
log_line_prefix = '%m [%p] %b %q%a '
log_statement = 'none'
log_min_messages = info
log_checkpoints = off
TimeZone = 'UTC'
CONF
}

# sql_literal(VALUE): SQL text of a value: undef NULL, a list an array literal, a hash its JSON, else a quoted
# literal (of no type yet, so that it becomes the column's). \'SQL' stands for itself: calls such as now().
sub sql_literal
{
    my ($value) = @_;
    return 'NULL' if !defined $value;
    return $$value if ref $value eq 'SCALAR';
    if (ref $value eq 'ARRAY')
    {
        $value = '{' . join(',', map { defined $_ ? '"' . s/(["\\])/\\$1/gr . '"' : 'NULL' } @$value) . '}';
    }
    if (ref $value)
    {
        $value = JSON::PP->new->canonical->allow_nonref->encode($value);
        # Texts here are bytes in UTF-8. What the encoder gives back is marked as characters, which psql's pipe
        # would get encoded once more.
        utf8::downgrade($value);
    }
    $value =~ s/'/''/g;
    return $value =~ /\\/ ? q{E'} . ($value =~ s/\\/\\\\/gr) . q{'} : "'$value'";
}

# make_outbox(NODE, DB, 'schema.table', %opts): the application's table with the documented columns and
# indexes.
#   hlc, trace   with the optional column (and the index of hlc)     drop   list of columns to leave out
#   columns      more column definitions, SQL                        indexes   0: without the claim index
#   fifo         with the index of ordering fifo and strict          owner  role that shall own schema and table
sub make_outbox
{
    my ($node, $db, $relation, %opts) = @_;
    my ($schema, $table) = split /\./, $relation, 2;
    my %left_out = map { $_ => 1 } @{ $opts{drop} || [] };
    my @columns = grep { !$left_out{ (split ' ')[0] } } _outbox_columns();
    push @columns, 'traceparent text' if $opts{trace};
    push @columns, 'hlc bigint' if $opts{hlc};
    push @columns, @{ $opts{columns} || [] }, 'UNIQUE (outbox_route, event_id)';
    my $authorization = $opts{owner} ? "AUTHORIZATION $opts{owner}" : '';
    my @sql = (
        "CREATE SCHEMA IF NOT EXISTS $schema $authorization",
        "CREATE TABLE $relation (" . join(', ', @columns) . ')');
    my $index = sub { push @sql, "CREATE INDEX ON $relation (outbox_route, status, $_[0])" };
    $index->('available_at, created_at') if $opts{indexes} // 1;
    $index->('available_at, hlc, created_at, id') if $opts{hlc};
    $index->('ordering_key, created_at, id') if $opts{fifo};
    $index->($opts{hlc} ? 'tenant_id, available_at, hlc, created_at, id' : 'tenant_id, available_at, created_at') if $opts{tenants};
    push @sql, "ALTER TABLE $relation OWNER TO $opts{owner}" if $opts{owner};
    $node->safe_psql($db, join(";\n", @sql));
    return;
}

sub _outbox_columns
{
    return (
        'id uuid PRIMARY KEY',
        'outbox_route text NOT NULL',
        'event_id uuid NOT NULL',
        'event_type text NOT NULL',
        'tenant_id uuid',
        'execution_id uuid',
        'correlation_id uuid',
        'causation_id uuid',
        'occurred_at timestamptz NOT NULL',
        'payload jsonb NOT NULL',
        'status text NOT NULL',
        'created_at timestamptz NOT NULL',
        'published_at timestamptz',
        'processing_at timestamptz',
        'last_error text',
        'attempts int NOT NULL DEFAULT 0',
        'available_at timestamptz',
        'ordering_key text');
}

# create_route(NODE, NAME, RELATION, URL, %columns): a row of outbox_route; the other columns by name,
# values as sql_literal takes them. db names the database (postgres).
sub create_route
{
    my ($node, $name, $relation, $url, %columns) = @_;
    my $db = delete $columns{db} // 'postgres';
    my %row = (%columns, name => $name, relation => $relation, url => $url);
    my @names = sort keys %row;
    $node->safe_psql($db,
        'INSERT INTO outbox_route (' . join(', ', @names) . ') VALUES ('
          . join(', ', map { sql_literal($row{$_}) } @names) . ')');
    return;
}

# stage(NODE, ROUTE, %arguments): one outbox_stage() in a transaction of its own; the event id. Arguments by
# name (event_type and payload have defaults); db names the database.
sub stage
{
    my ($node, $route, %arguments) = @_;
    my $db = delete $arguments{db} // 'postgres';
    %arguments = (event_type => 'test.event', payload => {}, %arguments, route => $route);
    return $node->safe_psql($db,
        'SELECT outbox_stage('
          . join(', ', map { "$_ => " . sql_literal($arguments{$_}) } sort keys %arguments) . ')');
}

# stage_many(NODE, ROUTE, COUNT, %opts): COUNT events, one statement, one transaction, staged in order.
#   keys      number of ordering keys k1 ... in turn (default: no key)    db      database (postgres)
#   truth     table made by OutboxRelay::Oracle that notes them in the same transaction
#   rollback  1: the transaction is rolled back                           type    event_type
# Returns the event ids in staging order, those of a rolled-back transaction too.
sub stage_many
{
    my ($node, $route, $count, %opts) = @_;
    my $key = _key_sql(%opts);
    my $call = sprintf 'outbox_stage(route => %s, event_type => %s, payload => %s, ordering_key => %s)',
      sql_literal($route), sql_literal($opts{type} // 'test.event'), q{jsonb_build_object('n', g)}, $key;
    return _in_one_transaction($node,
        "INSERT INTO noted (event_id, ordering_key) SELECT $call, $key FROM generate_series(1, $count) AS g;",
        %opts);
}

# insert_rows(NODE, RELATION, ROUTE, COUNT, %opts): the same by plain INSERT, as any application may write.
# More opts: columns, a hash of further columns (values as sql_literal takes them; \'SQL' may use the number
# g).
sub insert_rows
{
    my ($node, $relation, $route, $count, %opts) = @_;
    my $key = _key_sql(%opts);
    my %row = (
        id => \'gen_random_uuid()',
        outbox_route => $route,
        event_id => \'event_id',
        event_type => $opts{type} // 'test.event',
        occurred_at => \'clock_timestamp()',
        payload => \q{jsonb_build_object('n', g)},
        status => 'pending',
        created_at => \q{clock_timestamp() + g * interval '1 microsecond'},
        ordering_key => \'ordering_key',
        %{ $opts{columns} || {} });
    my @names = sort keys %row;
    my ($names, $values) = (join(', ', @names), join(', ', map { sql_literal($row{$_}) } @names));
    return _in_one_transaction($node, <<"SQL", %opts);
INSERT INTO noted (event_id, ordering_key) SELECT gen_random_uuid(), $key FROM generate_series(1, $count) AS g;
INSERT INTO $relation ($names) SELECT $values FROM noted ORDER BY g;
SQL
}

sub _key_sql { my (%opts) = @_; return $opts{keys} ? "'k' || (1 + g % $opts{keys})" : 'NULL::text'; }

# Runs SQL that stages and fills the table noted (event_id, ordering_key, g), puts that down in the truth
# table if there is one, all in one transaction, and returns the event ids.
sub _in_one_transaction
{
    my ($node, $sql, %opts) = @_;
    my $end = $opts{rollback} ? 'ROLLBACK' : 'COMMIT';
    my $noted = 'SELECT event_id, ordering_key FROM noted ORDER BY g';
    my $truth = $opts{truth} ? "INSERT INTO $opts{truth} (event_id, ordering_key) $noted;" : '';
    return split /\n/, $node->safe_psql($opts{db} // 'postgres', <<"SQL");
BEGIN;
CREATE TEMP TABLE noted (event_id uuid, ordering_key text, g bigserial) ON COMMIT DROP;
$sql
$truth
SELECT event_id FROM noted ORDER BY g;
$end;
SQL
}

# wait_sql(NODE, DB, QUERY, %opts): waits until the query gives `expected` (t); timeout in seconds. Dies
# with the server log's end when it does not. A server that is not there counts as one that gives something else.
sub wait_sql
{
    my ($node, $db, $query, %opts) = @_;
    my $expected = $opts{expected} // 't';
    my $last = '';
    return wait_until(
        sub {
            # psql may be gone before it was given the query; newer IPC::Run then dies of it. So no poll_query_until.
            my ($status, $output, $error) = eval { $node->psql($db, $query) };
            ($status, $output, $error) = (-1, '', $@) if !defined $status;
            $last = "$output $error";
            $status == 0 && $output eq $expected && $error eq '';
        },
        what => $opts{what} // $query,
        timeout => $opts{timeout}, poll_ms => 50,
        diag => sub {
            join "\n", "the query gave: $last", $opts{diag} ? $opts{diag}->() : (), "end of the server log:", log_tail($node);
        });
}

# wait_empty(NODE, RELATION, %opts): waits until the table holds no pending or processing row (with all: no
# row). route narrows it down; db, timeout; endpoint: its summary joins the diag.
sub wait_empty
{
    my ($node, $relation, %opts) = @_;
    my $db = $opts{db} // 'postgres';
    my @where = $opts{all} ? () : ("status IN ('pending', 'processing')");
    push @where, 'outbox_route = ' . sql_literal($opts{route}) if defined $opts{route};
    my $where = @where ? 'WHERE ' . join(' AND ', @where) : '';
    my $left = "SELECT status, attempts, left(last_error, 200), count(*) FROM $relation GROUP BY 1, 2, 3 LIMIT 20";
    return wait_sql($node, $db, "SELECT NOT EXISTS (SELECT FROM $relation $where)",
        timeout => $opts{timeout},
        what => "$relation to be empty",
        diag => sub {
            "left in $relation (status, attempts, last_error, count):\n" . $node->safe_psql($db, $left)
              . ($opts{endpoint} ? "\n" . $opts{endpoint}->summary : '');
        });
}

# wait_for_server(NODE, %opts): waits until a server that crashed takes connections again. (A psql that is refused
# at once may end before its query is written to it: poll_query_until() dies of that.)
sub wait_for_server
{
    my ($node, %opts) = @_;
    return wait_until(
        sub { (eval { $node->safe_psql('postgres', 'SELECT true') } // '') eq 't' },
        what => 'the server to come back', poll_ms => 50, diag => sub { log_tail($node) }, %opts);
}

# worker_pids(NODE, DB): the pids of the relay workers of a database, possibly none.
sub worker_pids
{
    my ($node, $db) = @_;
    return split /\n/, $node->safe_psql('postgres',
        "SELECT pid FROM pg_stat_activity WHERE backend_type = 'outbox_relay worker' AND datname = "
          . sql_literal($db // 'postgres') . ' ORDER BY backend_start, pid');
}

# worker_pid(NODE, DB): the eldest of them, or undef.
sub worker_pid { return (worker_pids(@_))[0]; }

# wait_for_worker(NODE, DB, not => PID, timeout => S): waits for a worker (other than PID), returns its pid.
# A server that is just restarting after a crash counts as one without a worker.
sub wait_for_worker
{
    my ($node, $db, %opts) = @_;
    return wait_until(
        sub {
            my @pids = eval { worker_pids($node, $db) };
            (grep { !$opts{not} || $_ != $opts{not} } @pids)[0];
        },
        what => 'a relay worker of ' . ($db // 'postgres'),
        timeout => $opts{timeout}, poll_ms => 50, diag => sub { log_tail($node) });
}

# kill_worker(NODE, DB, SIGNAL): signals the eldest worker (KILL); returns its pid. A SIGKILL restarts the
# cluster.
sub kill_worker
{
    my ($node, $db, $signal) = @_;
    my $pid = worker_pid($node, $db) // croak 'no worker to kill';
    kill($signal // 'KILL', $pid) or croak "kill $pid: $!";
    return $pid;
}

# log_offset(NODE): where the server log ends now; what comes later is looked for from there.
sub log_offset { return -s $_[0]->logfile || 0; }

# log_since(NODE, OFFSET): the log's text from there.
sub log_since { return PostgreSQL::Test::Utils::slurp_file($_[0]->logfile, $_[1]); }

# wait_log(NODE, REGEXP, OFFSET, %opts): waits until the log has a match beyond OFFSET; returns the offset
# after what was read, to go on from.
sub wait_log
{
    my ($node, $regexp, $offset, %opts) = @_;
    my $end;
    wait_until(
        sub {
            my $text = log_since($node, $offset);
            $end = $offset + length $text;
            $text =~ $regexp;
        },
        what => "the log to match $regexp", diag => sub { log_tail($node) }, %opts);
    return $end;
}

# log_tail(NODE, LINES): the last lines (30) of the server log.
sub log_tail
{
    my ($node, $count) = @_;
    my @lines = split /\n/, log_since($node, 0);
    splice @lines, 0, -($count // 30) if @lines > ($count // 30);
    return join "\n", @lines;
}

1;
