# outbox_stage_many under whatever JSON a caller may build: the server does not crash; a call stages all of its events
# or none, with an error that names the first bad element, in clean and bounded text. FUZZ_CASES (1500), FUZZ_SEED.

use strict;
use warnings;
use FindBin;
use lib "$FindBin::Bin/lib";
use Encode qw(decode encode);
use JSON::PP ();
use Test::More;
use OutboxRelay::Node;

my $cases = $ENV{FUZZ_CASES} // 1500;
my $seed = $ENV{FUZZ_SEED} // time();
srand $seed;
diag("FUZZ_SEED=$seed");

my $node = new_node('fuzz', conf => "autovacuum = off\n");
make_outbox($node, 'postgres', 'app.outbox', trace => 1);
create_route($node, 'r', 'app.outbox', 'http://127.0.0.1:1/', enabled => 'false', propagate_trace => 'true', max_payload_bytes => 20_000);
# The call as a caller sees it: how many rows there are more, or the error.
$node->safe_psql('postgres', <<'SQL');
CREATE FUNCTION app.call(events text) RETURNS jsonb LANGUAGE plpgsql AS $$
DECLARE before bigint; told bigint; state text; said text; more text;
BEGIN
    SELECT count(*) INTO before FROM app.outbox;
    told := outbox_stage_many('r', events::jsonb);
    RETURN jsonb_build_object('told', told, 'rows', (SELECT count(*) FROM app.outbox) - before,
        'whole', (SELECT count(*) = 0 FROM app.outbox WHERE status <> 'pending' OR attempts <> 0 OR event_type = ''));
EXCEPTION WHEN OTHERS THEN
    GET STACKED DIAGNOSTICS state = RETURNED_SQLSTATE, said = MESSAGE_TEXT, more = PG_EXCEPTION_DETAIL;
    RETURN jsonb_build_object('state', state, 'said', encode(convert_to(said, 'UTF8'), 'hex'), 'more', more);
END $$;
SQL

sub any { return $_[ int rand @_ ]; }

sub uuid { return sprintf '%08x-%04x-%04x-%04x-%012x', map { int rand $_ } 2**32, 2**16, 2**16, 2**16, 2**47; }

my @odd = (
    '', ' ', 'x', "\x{e9}\x{20ac}\x{1f600}", "\x{202e}\x{feff}", "a\tb\nc\rd", '"\\', "'; DROP TABLE app.outbox; --", '$1', '%s%n',
    '{{1,2},{3}}', '../..', "\x7f\x{85}", "\x{10ffff}", 'null', '0', 'x' x 500, "\x{e9}" x 300, "\x{1f600}" x 100, "x" . "\x{e9}" x 100);

# JSON text of any value, nested so deep.
sub any_json
{
    my ($depth) = @_;
    my $kind = int rand($depth > 0 ? 9 : 7);
    return any(qw(null true false)) if $kind < 2;
    return any(qw(0 -1 1e10 1e400 -1e-400 123456789012345678901234567890.123456789 1.0000 -0)) if $kind < 4;
    return text_json(any(@odd)) if $kind < 7;
    return '[' . join(',', map { any_json($depth - 1) } 1 .. rand 4) . ']' if $kind == 7;
    return '{' . join(',', map { text_json(any(@odd)) . ':' . any_json($depth - 1) } 1 .. rand 4) . '}';
}

sub text_json { return JSON::PP->new->allow_nonref->encode($_[0]); }

my %good = (
    event_type => sub { text_json(any(grep { $_ ne '' } @odd)) },
    payload => sub { any(any_json(3), '{}', '[' x 200 . ']' x 200) =~ s/^null$/{}/r },
    event_id => sub { text_json(any(uuid(), uc uuid())) },
    ordering_key => sub { any('null', text_json(any(@odd))) },
    occurred_at => sub { any('null', '"2026-12-01T10:00:00Z"', '"2026-12-01 10:00:00+05:45"', '"1970-01-01"') },
    available_at => sub { any('null', '"infinity"', '"2099-01-01T00:00:00Z"') },
    (map { $_ => sub { any('null', text_json(uuid())) } } qw(tenant_id execution_id correlation_id causation_id)),
    traceparent => sub { any('null', '"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"') });

sub good_element
{
    my %pairs = (event_type => $good{event_type}->(), payload => $good{payload}->());
    for my $key (keys %good)
    {
        $pairs{$key} //= $good{$key}->() if rand() < 0.4;
    }
    return \%pairs;
}

# What makes an element bad, for sure; they get its pairs, and give its text.
my @spoilers = (
    sub { my ($p) = @_; delete $p->{ any('event_type', 'payload') }; return object($p); },
    sub { my ($p) = @_; $p->{ any('event_type', 'payload') } = 'null'; return object($p); },
    sub { my ($p) = @_; $p->{event_type} = any('""', '1', 'true', '[]', '{"a": 1}'); return object($p); },
    sub { my ($p) = @_; $p->{ 'x' . any(@odd) } = any_json(1); return object($p); },
    sub { my ($p) = @_; $p->{ any('Event_Type', 'payload ', 'event_typ', 'id', 'status', 'attempts', 'hlc') } = '1'; return object($p); },
    sub { my ($p) = @_; $p->{ any(qw(event_id tenant_id execution_id correlation_id causation_id)) } =
          any('1', '[]', map { text_json($_) } @odd, substr(uuid(), 1), uuid() . '0', 'zzzzzzzz-0000-0000-0000-000000000000'); return object($p); },
    sub { my ($p) = @_; $p->{ any(qw(occurred_at available_at)) } =
          any('1', '{}', '""', '"2026-13-45"', '"yesterday at noon, or so"', '"294277-01-01"', text_json("\x{20ac}" x 200)); return object($p); },
    sub { my ($p) = @_; $p->{ordering_key} = any('1', 'false', '[]'); return object($p); },
    sub { my ($p) = @_; $p->{traceparent} = any('""', '"00-0-0-0"', '7', text_json("\x{1f600}" x 40)); return object($p); },
    sub { my ($p) = @_; $p->{payload} = text_json('x' x 30_000); return object($p); },
    sub { return any('null', '1', '"text"', '[]', '[[]]', 'true', '[{"event_type": "t", "payload": {}}]'); });

sub object
{
    my ($pairs) = @_;
    return '{' . join(',', map { text_json($_) . ':' . $pairs->{$_} } keys %$pairs) . '}';
}

# A case: the JSON text, and what has to come of it: staged (distinct events), element (number of the first bad
# one), or refused (the whole of it).
sub one_case
{
    my $dice = rand();
    if ($dice < 0.08)
    {
        return { text => any('null', '1', '"x"', '{}', 'true', '{"event_type": "t", "payload": {}}'), refused => 1 };
    }
    if ($dice < 0.16)
    {
        # No JSON, or none that the server takes.
        return { text => any('', '[', '[{]', '[{"event_type": "a\u0000b", "payload": 1}]', '[{"event_type": "\ud800", "payload": 1}]',
                '[' x 50_000, "[{\"event_type\": \"t\"\x01}]", '[{"a" "b"}]'), refused => 1 };
    }
    my @elements = map { good_element() } 1 .. any(0, 1, 1, 2, 3, 10, 60);
    if ($dice < 0.55 || !@elements)
    {
        # Some twice.
        my @twins = map { any(@elements) } 1 .. (@elements && rand() < 0.3 ? 3 : 0);
        my %ids = map { lc $_->{event_id} => 1 } grep { ($_->{event_id} // 'null') ne 'null' } @elements, @twins;
        my $anonymous = grep { ($_->{event_id} // 'null') eq 'null' } @elements, @twins;
        return { text => '[' . join(',', map { object($_) } @elements, @twins) . ']', staged => $anonymous + keys %ids };
    }
    my $bad = int rand @elements;
    my @texts = map { object($_) } @elements;
    $texts[$bad] = any(@spoilers)->($elements[$bad]);
    # What comes behind does not matter.
    $texts[ $bad + 1 ] = any(@spoilers)->($elements[ $bad + 1 ]) if $bad < $#elements && rand() < 0.3;
    return { text => '[' . join(',', @texts) . ']', element => $bad + 1 };
}

my @cases = map { one_case() } 1 .. $cases;
my $script = join '', map {
    my $text = encode('UTF-8', $_->{text});
    die 'the quote is not one' if index($text, '$quote$') >= 0;
    "SELECT app.call(\$quote\$$text\$quote\$);\n"
} @cases;
my $pid = $node->safe_psql('postgres', q{SELECT pg_backend_pid() || ' ' || pg_postmaster_start_time()}) =~ s/^\S+ //r;
my ($out, $err) = ('', '');
$node->psql('postgres', $script, stdout => \$out, stderr => \$err, on_error_stop => 0, timeout => 300);
my @answers = split /\n/, $out;
is(scalar @answers, $cases, "$cases calls have $cases answers") or diag(substr $err, 0, 2000);
is($node->safe_psql('postgres', q{SELECT pg_backend_pid() || ' ' || pg_postmaster_start_time()}) =~ s/^\S+ //r, $pid, 'the server has not crashed');

my (@wrong, %states);
my $judge = sub {
    my ($case, $answer) = @_;
    if (defined $answer->{told})
    {
        $states{staged}++;
        return 'half staged' if $answer->{told} != $answer->{rows} || !$answer->{whole};
        return 'staged' . (defined $case->{staged} ? " $answer->{told}, not $case->{staged}" : '') if ($case->{staged} // -1) != $answer->{told};
        return;
    }
    $states{ $answer->{state} }++;
    my $said = eval { decode('UTF-8', pack('H*', $answer->{said}), Encode::FB_CROAK) } // return 'a message that is no UTF-8';
    return 'refused, though good' if defined $case->{staged};
    return 'a message of ' . length($said) . ' characters' if length $said > 400;
    return "a message with control characters" if $said =~ /[\x00-\x1f\x7f-\x9f]/;
    # The server's own, before we see a value: no JSON.
    return $answer->{state} =~ /^(?:22P02|22P05|54001)$/ || $said =~ /^events must be an array of objects/ ? () : "refused with $answer->{state}"
      if $case->{refused};
    return "SQLSTATE $answer->{state}" if $answer->{state} !~ /^(?:22023|54000)$/;
    return 'another element' if $said !~ /^element $case->{element} of events: \S/;
    return;
};
for my $number (0 .. $#answers)
{
    my $answer = JSON::PP->new->utf8->decode($answers[$number]);
    my $problem = $judge->($cases[$number], $answer) // next;
    push @wrong, "$problem: " . substr(encode('UTF-8', $cases[$number]{text}), 0, 300) . "\n  -> " . substr($answers[$number], 0, 300)
      . ($answer->{said} ? ' = ' . substr(pack('H*', $answer->{said}), 0, 300) : '');
}
is(scalar @wrong, 0, 'each was staged whole or refused with a clean error that names the element') or diag(join "\n", splice @wrong, 0, 12);
cmp_ok($states{$_} // 0, '>', $cases / 50, "$_: $states{$_} of them") for qw(staged 22023 22P02);

$node->stop;
done_testing();
