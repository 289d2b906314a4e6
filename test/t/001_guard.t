# The boundary between C++ and the server: errors keep their parts, destructors run, no exception reaches C.

use strict;
use warnings;

use FindBin;
use lib "$FindBin::RealBin/lib";

use OutboxRelay::Node;
use Test::More;

my $node = new_node('guard');
my $functions = join '', map {
    "CREATE FUNCTION outbox_relay_test_$_->[0]($_->[1]) RETURNS $_->[2] LANGUAGE C AS '\$libdir/outbox_relay';"
} (['guard', '', 'int'], ['throw', 'int', 'int'], ['alive', '', 'int'], ['catch', '', 'text']);
$node->safe_psql('postgres', $functions);

# Runs a call that fails and gives SQLSTATE|message|detail|hint, and what is alive afterwards, in one session.
sub failure {
    my ($call) = @_;
    return $node->safe_psql('postgres', <<"SQL");
SET client_min_messages = notice;
CREATE TEMP TABLE seen(line text);
DO \$\$
DECLARE detail text; hint text;
BEGIN
  PERFORM $call;
EXCEPTION WHEN OTHERS THEN
  GET STACKED DIAGNOSTICS detail = PG_EXCEPTION_DETAIL, hint = PG_EXCEPTION_HINT;
  INSERT INTO seen VALUES (concat_ws('|', SQLSTATE, SQLERRM, detail, hint));
END \$\$;
SELECT line || '|alive ' || outbox_relay_test_alive() FROM seen;
SQL
}

is(failure('outbox_relay_test_guard()'), '22012|raised by the server|A detail.|A hint.|alive 0',
    'a raise below a guard keeps SQLSTATE, DETAIL and HINT, and destructors run');
is(failure('outbox_relay_test_throw(1)'), 'XX000|a C++ error|||alive 0', 'std::exception becomes an error');
is(failure('outbox_relay_test_throw(2)'), 'XX000|out of memory|||alive 0', 'bad_alloc becomes an error');
is(failure('outbox_relay_test_throw(3)'), 'XX000|unknown C++ exception|||alive 0', 'anything else becomes an error');
is(failure('outbox_relay_test_throw(4)'), 'P0002|an error of ours|Its detail.|Its hint.|alive 0',
    'an error of ours has its parts');
is($node->safe_psql('postgres', 'SELECT outbox_relay_test_catch()'),
    '22012|raised by the server|A detail.|A hint.|restored', 'a caught error can be read, and the stack is restored');
is($node->safe_psql('postgres', <<'SQL'), '0', 'a thousand failures in one session leave nothing behind');
DO $$ BEGIN
  FOR i IN 1..1000 LOOP
    BEGIN PERFORM outbox_relay_test_guard(); EXCEPTION WHEN division_by_zero THEN NULL; END;
  END LOOP;
END $$;
SELECT outbox_relay_test_alive();
SQL

$node->stop;
done_testing();
