#pragma once

#include <type_traits>
#include <utility>

#include "pg/guard.hpp"

namespace pg {

/// Under what a statement on an application's table runs.
struct Context {
    Oid role = InvalidOid;        ///< the route's owner
    int statement_timeout_ms = 0; ///< armed for the statement; 0: not
    int lock_timeout_ms = 0;      ///< set for the statement; 0: as it is
    bool ordered_plans = false;   ///< planner settings of a claim: index order or nothing
    Oid only_index = InvalidOid;  ///< its table's other indexes are kept from the planner
    Oid relation = InvalidOid; ///< a statement whose names mean other tables by now fails; InvalidOid: none
};

namespace detail {

struct Restore {
    Oid role;
    int security;
    int guc_level;
    bool timed;
};

Restore enter(const Context &context);
void leave(const Restore &restore);

/// Keeps the other indexes of the table of `index` from the planner for a C++ scope; InvalidOid: none.
class OnlyIndex {
  public:
    explicit OnlyIndex(Oid index);
    ~OnlyIndex();
    OnlyIndex(const OnlyIndex &) = delete;
    OnlyIndex &operator=(const OnlyIndex &) = delete;

  private:
    const Oid before_;
};

} // namespace detail

/// Runs the C-regime `body` as `context.role` in a restricted security context with its own GUC nest
/// level and search_path pinned, so that no code of the application can change who the session is or
/// leave a setting behind. A raise comes out as pg::Error and leaves the restoring to the abort that
/// has to follow it.
template <class Body>
auto run_as(const Context &context, Body &&body) -> std::invoke_result_t<Body &> {
    using Result = std::invoke_result_t<Body &>;
    const detail::OnlyIndex only_index(context.only_index);
    return guard([&context, &body]() -> Result {
        const detail::Restore restore = detail::enter(context);
        if constexpr (std::is_void_v<Result>) {
            body();
            detail::leave(restore);
        } else {
            Result result = body();
            detail::leave(restore);
            return result;
        }
    });
}

/// The same for a `body` of C++ that guards what it calls itself.
template <class Body>
auto act_as(const Context &context, Body &&body) -> std::invoke_result_t<Body &> {
    const detail::Restore restore = guard([&context] { return detail::enter(context); });
    auto result = body();
    guard([&restore] { detail::leave(restore); });
    return result;
}

/// Sets a configuration parameter for the rest of the transaction (SET LOCAL).
void set_local(const char *name, const char *value);

/// Pins a configuration parameter for the life of this process.
void pin_setting(const char *name, const char *value);

} // namespace pg
