#pragma once

#include <exception>
#include <new>
#include <type_traits>
#include <utility>

#include "pg/error.hpp"

namespace pg {

namespace detail {

/// What an exception becomes once its handler has been left: plain data only.
struct Escape {
    ErrorData *data = nullptr; ///< a copy for ReThrowError or ThrowErrorData; null: use message
    bool caught = false;
    char message[512] = "";
};

void note(Escape &escape, const Error &error) noexcept;
void note(Escape &escape, const char *message) noexcept;
[[noreturn]] void raise_escape(const Escape &escape);

} // namespace detail

/// The one wrapper of every function that Postgres calls: runs `body` and turns a C++ exception into
/// an ereport, after the exception's handler has been left and every C++ frame is gone.
template <class Body>
auto entry(Body &&body) -> std::invoke_result_t<Body &> {
    detail::Escape escape;
    try {
        return body();
    } catch (const Error &error) {
        detail::note(escape, error);
    } catch (const std::bad_alloc &) {
        detail::note(escape, "out of memory");
    } catch (const std::exception &error) {
        detail::note(escape, error.what());
    } catch (...) {
        detail::note(escape, "unknown C++ exception");
    }
    detail::raise_escape(escape);
}

} // namespace pg
