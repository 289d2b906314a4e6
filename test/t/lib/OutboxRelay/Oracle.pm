package OutboxRelay::Oracle;

# The oracle of process tests. It compares three records that know nothing of each other:
#   truth      the events whose transaction committed: a table written in the staging transaction, or a list
#   endpoint   the requests that arrived, with what was answered (by Idempotency-Key)
#   table      the rows that the outbox holds at the end
# and says what was lost, invented, delivered more than once, or out of its key's order. Ask when all is
# quiet.
#
#   my $oracle = OutboxRelay::Oracle->new(node => $node, relation => 'app.outbox', endpoint => $e);
#   stage_many($node, 'r', 1000, keys => 50, truth => $oracle->truth_table);
#   wait_empty($node, 'app.outbox');
#   $oracle->check_nothing_lost;

use strict;
use warnings;
use Carp;
use Test::More ();

# new(%opts): node, db (postgres), relation, endpoint, and either
#   truth   a list of [event id, key] or of plain event ids, in staging order, or
#   table   the truth table's name (default outbox_truth), which is made if it is not there.
# route narrows the table's rows to one route.
sub new
{
    my ($class, %opts) = @_;
    $opts{$_} // croak "$_ is missing" for qw(node relation endpoint);
    my $self = bless { db => 'postgres', %opts }, $class;
    if (!$opts{truth})
    {
        $self->{table} //= 'outbox_truth';
        $self->_sql("SET client_min_messages = warning; CREATE TABLE IF NOT EXISTS $self->{table}"
              . ' (seq bigserial PRIMARY KEY, event_id uuid NOT NULL UNIQUE, ordering_key text)');
    }
    return $self;
}

# truth_table(): the name to give to stage_many(truth => ...), or to INSERT (event_id, ordering_key) into.
sub truth_table { return $_[0]{table} // croak 'the truth of this oracle is a list'; }

# committed(EVENT...): more events that are known to have committed, where the truth is a list.
sub committed { my ($self, @events) = @_; push @{ $self->{truth} }, @events; return; }

sub _sql { my ($self, $sql) = @_; return split /\n/, $self->{node}->safe_psql($self->{db}, $sql); }

sub _truth
{
    my ($self) = @_;
    my @events = $self->{truth}
      ? map { ref $_ ? $_ : [ $_, undef ] } @{ $self->{truth} }
      : map { [ split /\|/, $_, 2 ] } $self->_sql("SELECT event_id, ordering_key FROM $self->{table} ORDER BY seq");
    my $place = 0;
    return map { $_->[0] => { place => $place++, key => $_->[1] } } @events;
}

# The event ids that rows still hold, with their status.
sub _rows
{
    my ($self) = @_;
    my $where = '';
    if (defined $self->{route})
    {
        my $route = $self->{route} =~ s/'/''/gr;
        $where = "WHERE outbox_route = '$route'";
    }
    return map { split /\|/, $_, 2 } $self->_sql("SELECT event_id, status FROM $self->{relation} $where");
}

# compare(): a hash of
#   lost         committed events that were never acknowledged and have no row
#   invented     event ids that reached the endpoint whole although they did not commit
#   duplicates   hash: event id => how often more than once it may have been taken (see check_duplicates_at_most)
#   disorder     texts: events of a key that were first taken out of staging order
#   overlaps     texts: a request of a key that began before the one before it was answered
#   left         hash: event id => status of the rows at the end
#   committed, acknowledged   how many events
# An acknowledgement is a complete request that was answered 2xx.
sub compare
{
    my ($self) = @_;
    my %truth = $self->_truth;
    # The rows before the endpoint: a row deleted in between was acknowledged before, and is seen to be.
    my %left = $self->_rows;
    my @taken = sort { $a->{n} <=> $b->{n} }
      grep { $_->{complete} && $_->{event_id} ne '' } $self->{endpoint}->deliveries;
    my %acknowledged = map { $_->{event_id} => 1 } grep { $_->{acked} } @taken;
    my %whole = map { $_->{event_id} => 1 } @taken;
    my %times;
    $times{ $_->{event_id} }++ for grep { $_->{acked} || !$_->{status} } @taken;
    return {
        committed => scalar(keys %truth),
        acknowledged => scalar(keys %acknowledged),
        left => \%left,
        lost => [ sort { $truth{$a}{place} <=> $truth{$b}{place} }
              grep { !$acknowledged{$_} && !exists $left{$_} } keys %truth ],
        invented => [ sort grep { !$truth{$_} } keys %whole ],
        duplicates => { map { $times{$_} > 1 ? ($_ => $times{$_} - 1) : () } keys %times },
        _order(\%truth, \@taken),
    };
}

# Walks the requests of each key as they came.
sub _order
{
    my ($truth, $taken) = @_;
    my (%before, %last, %seen, @disorder, @overlaps);
    for my $request (@$taken)
    {
        my ($id, $event) = ($request->{event_id}, $truth->{ $request->{event_id} });
        next if !$event || !defined $event->{key} || $event->{key} eq '';
        my $key = $event->{key};
        my $previous = $before{$key};
        push @overlaps, "$key: $id began before $previous->{event_id} was answered"
          if $previous && $previous->{event_id} ne $id && $previous->{answer_at} > $request->{head_at};
        $before{$key} = $request;
        next if !$request->{acked} || $seen{$id}++;
        push @disorder, "$key: $id came after $last{$key}[1]" if $last{$key} && $last{$key}[0] > $event->{place};
        $last{$key} = [ $event->{place}, $id ];
    }
    return (disorder => \@disorder, overlaps => \@overlaps);
}

sub _say
{
    my ($what, @items) = @_;
    my $count = @items;
    splice @items, 10 if $count > 10;
    return "$what ($count): " . join('; ', @items) . ($count > @items ? '; ...' : '');
}

sub _judge
{
    my ($self, $good, $name, @diag) = @_;
    local $Test::Builder::Level = $Test::Builder::Level + 2;
    Test::More::ok($good, $name) or Test::More::diag(join "\n", @diag, $self->{endpoint}->summary);
    return $good;
}

# check_nothing_lost(NAME, %opts): every committed event was acknowledged or is still in the table. Fails
# too when the truth is empty, or (with empty => 1) when a row is left.
sub check_nothing_lost
{
    my ($self, $name, %opts) = @_;
    my $found = $self->compare;
    my @left = sort keys %{ $found->{left} };
    my $good = $found->{committed} > 0 && !@{ $found->{lost} } && !($opts{empty} && @left);
    return $self->_judge($good, $name // "nothing is lost of $found->{committed} events",
        "committed $found->{committed}, acknowledged $found->{acknowledged}",
        _say('lost', @{ $found->{lost} }), _say('left', map { "$_ $found->{left}{$_}" } @left));
}

# check_nothing_invented(NAME): nothing arrived that had not committed, rolled-back events above all.
sub check_nothing_invented
{
    my ($self, $name) = @_;
    my $found = $self->compare;
    return $self->_judge(!@{ $found->{invented} }, $name // 'nothing arrives that did not commit',
        _say('invented', @{ $found->{invented} }));
}

# check_duplicates_at_most(N, NAME, per_event => M): over all events at most N deliveries beyond the first,
# and of each event at most M. A delivery is a complete request that the endpoint acknowledged or left
# unanswered: one that it refused (a status other than 2xx) asked for the next itself.
sub check_duplicates_at_most
{
    my ($self, $most, $name, %opts) = @_;
    my $duplicates = $self->compare->{duplicates};
    my ($total, $worst) = (0, 0);
    for my $times (values %$duplicates)
    {
        $total += $times;
        $worst = $times if $times > $worst;
    }
    my $good = $total <= $most && (!defined $opts{per_event} || $worst <= $opts{per_event});
    return $self->_judge($good, $name // "at most $most duplicates (there are $total)",
        "$total duplicates, at most $worst of one event",
        _say('events', map { "$_ +$duplicates->{$_}" } sort keys %$duplicates));
}

# check_key_order(NAME, overlap => 1): the events of each key were first acknowledged in staging order, one
# after another (overlap => 1 allows requests of a key side by side). Fails too when no two events share a
# key, for then it would say nothing.
sub check_key_order
{
    my ($self, $name, %opts) = @_;
    my ($found, %truth) = ($self->compare, $self->_truth);
    my %events;
    $events{ $_->{key} }++ for grep { defined $_->{key} && $_->{key} ne '' } values %truth;
    my $shared = grep { $_ > 1 } values %events;
    my $good = $shared && !@{ $found->{disorder} } && ($opts{overlap} || !@{ $found->{overlaps} });
    return $self->_judge($good, $name // "each of $shared keys keeps its order",
        "keys with several events: $shared",
        _say('out of order', @{ $found->{disorder} }), _say('overlaps', @{ $found->{overlaps} }));
}

1;
