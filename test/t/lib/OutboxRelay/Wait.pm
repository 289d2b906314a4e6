package OutboxRelay::Wait;

# Waiting for conditions: the only way in which process tests wait. A wait that runs out fails loudly.

use strict;
use warnings;
use Carp;
use Exporter 'import';
use Test::More ();
use Time::HiRes qw(time usleep);

our @EXPORT_OK = qw(wait_until default_timeout);

# Seconds that a wait may take where the caller names none. PG_TEST_TIMEOUT_DEFAULT raises it for slow
# machines.
sub default_timeout
{
    return $ENV{PG_TEST_TIMEOUT_DEFAULT} || 30;
}

# wait_until(CODE, what => TEXT, timeout => SECONDS, diag => CODE giving TEXT, poll_ms => 10)
# Calls CODE until it returns a true value, and returns that value. Dies when the time is over, after a diag
# of what was waited for, the last value, and the text of `diag`: a test can't go on as if it had come true.
sub wait_until
{
    my ($condition, %opts) = @_;
    my $timeout = $opts{timeout} // default_timeout();
    my $what = $opts{what} // 'a condition';
    my $end = time() + $timeout;
    my $value;
    while (1)
    {
        $value = $condition->();
        return $value if $value;
        last if time() > $end;
        usleep(1000 * ($opts{poll_ms} // 10));
    }
    Test::More::diag("waited $timeout s in vain for $what; last value: "
          . (defined $value ? "'$value'" : 'undef'));
    Test::More::diag($opts{diag}->()) if $opts{diag};
    croak "timed out waiting for $what";
}

1;
