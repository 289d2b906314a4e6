#pragma once

#include <csetjmp>
#include <type_traits>
#include <utility>

#include "pg/error.hpp"

namespace pg {

namespace detail {

/// Puts the server's two error globals back, also when a C++ exception passes through.
struct ErrorState {
    sigjmp_buf *exception_stack = PG_exception_stack;
    ErrorContextCallback *context_stack = error_context_stack;

    void restore() const noexcept {
        PG_exception_stack = exception_stack;
        error_context_stack = context_stack;
    }
    ~ErrorState() { restore(); }
};

/// Copies the server's current error out of its stack, clears it and throws it as pg::Error.
[[noreturn]] void throw_current(MemoryContext caller_context);

} // namespace detail

/// Runs `body`, which may call anything of the server's, and turns a raise into pg::Error.
///
/// The body is C regime: plain data only, no object with a destructor between here and the call that
/// may raise, no return out of a raw PG_TRY. Objects of the caller, above the guard, are safe: they
/// see an ordinary C++ exception. After a pg::Error the (sub)transaction must be aborted or the error
/// rethrown. Costs about four nanoseconds.
template <class Body>
auto guard(Body &&body) -> std::invoke_result_t<Body &> {
    using Result = std::invoke_result_t<Body &>;
    static_assert(std::is_trivially_destructible_v<std::remove_reference_t<Body>>,
                  "a guarded body captures by reference or plain values only");
    static_assert(std::is_void_v<Result> || std::is_trivially_copyable_v<Result>,
                  "a guarded body returns plain data");

    const detail::ErrorState state;
    const MemoryContext caller_context = CurrentMemoryContext;
    sigjmp_buf jump;
    if (sigsetjmp(jump, 0) == 0) {
        PG_exception_stack = &jump;
        return body();
    }
    state.restore();
    detail::throw_current(caller_context);
}

} // namespace pg
