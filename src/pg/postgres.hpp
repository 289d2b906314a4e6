#pragma once

/// The server's headers, for C++: included after the standard and third-party C++ headers.
/// libintl's macros would break C++ libraries that are included later.

extern "C" {
#include "postgres.h"

#include "fmgr.h"
#include "miscadmin.h"
#include "utils/elog.h"
#include "utils/memutils.h"
}

#undef gettext
#undef dgettext
#undef ngettext
#undef dngettext
