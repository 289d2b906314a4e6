/// SQL functions of a test build that drive pg::guard and pg::entry from both sides. t/001_guard.t
/// creates and calls them.

#include <new>
#include <stdexcept>
#include <string>

#include "pg/entry.hpp"
#include "pg/error.hpp"
#include "pg/guard.hpp"

extern "C" {
#include "utils/builtins.h"

PGDLLEXPORT Datum outbox_relay_test_guard(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_test_throw(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_test_alive(PG_FUNCTION_ARGS);
PGDLLEXPORT Datum outbox_relay_test_catch(PG_FUNCTION_ARGS);
}

namespace {

/// Objects that exist, and times an entry saw an exception that nobody had let go of.
int alive = 0;

struct Witness {
    std::string text = "long enough to live on the heap, so that a leak would be one";
    Witness() { ++alive; }
    ~Witness() { --alive; }
};

[[noreturn]] void raise_in_server() {
    ereport(ERROR, (errcode(ERRCODE_DIVISION_BY_ZERO), errmsg("raised by the server"), errdetail("A detail."),
                    errhint("A hint.")));
}

} // namespace

extern "C" {

PG_FUNCTION_INFO_V1(outbox_relay_test_guard);
PG_FUNCTION_INFO_V1(outbox_relay_test_throw);
PG_FUNCTION_INFO_V1(outbox_relay_test_alive);
PG_FUNCTION_INFO_V1(outbox_relay_test_catch);

/// A raise of the server below a guard, with objects above it on two levels.
Datum outbox_relay_test_guard(PG_FUNCTION_ARGS) {
    (void)fcinfo;
    return pg::entry([]() -> Datum {
        Witness outer;
        auto inner = [] {
            Witness witness;
            pg::guard([] { raise_in_server(); });
        };
        inner();
        return (Datum)0;
    });
}

/// C++ exceptions of every kind that must not reach the server.
Datum outbox_relay_test_throw(PG_FUNCTION_ARGS) {
    return pg::entry([&]() -> Datum {
        Witness witness;
        switch (PG_GETARG_INT32(0)) {
        case 1:
            throw std::runtime_error("a C++ error");
        case 2:
            throw std::bad_alloc();
        case 3:
            throw 42;
        case 4:
            pg::raise({ERRCODE_NO_DATA_FOUND, "an error of ours", "Its detail.", "Its hint."});
        default:
            PG_RETURN_INT32(0);
        }
    });
}

/// Witnesses that are left: more than none means that a destructor did not run. Plus a thousand when
/// an exception is still current, which means that a handler was jumped out of.
Datum outbox_relay_test_alive(PG_FUNCTION_ARGS) {
    (void)fcinfo;
    PG_RETURN_INT32(alive + (std::current_exception() != nullptr ? 1000 : 0));
}

/// A raise caught in C++ and described: what pg::Error knows of it. The subtransaction of the caller's
/// exception block is not needed: nothing but the error itself happened.
Datum outbox_relay_test_catch(PG_FUNCTION_ARGS) {
    (void)fcinfo;
    return pg::entry([]() -> Datum {
        std::string seen;
        sigjmp_buf *const stack = PG_exception_stack;
        try {
            Witness witness;
            pg::guard([] { raise_in_server(); });
        } catch (const pg::Error &error) {
            seen = error.sqlstate_text() + "|" + error.message() + "|" + error.detail() + "|" + error.hint();
        }
        seen += stack == PG_exception_stack ? "|restored" : "|lost";
        return pg::guard([&seen] { return PointerGetDatum(cstring_to_text(seen.c_str())); });
    });
}
}
