#pragma once

#include <string>
#include <vector>

#include "store/preflight.hpp"
#include "store/route.hpp"

namespace outbox_relay::store {

/// The function that a route delivers to, and the type of what it is given.
struct Target {
    Oid function = InvalidOid;
    Oid message = InvalidOid;   ///< the extension's type outbox_message
    std::string qualified_name; ///< schema.function, quoted where needed

    bool operator==(const Target &) const = default;
};

/// Everything that is wrong with the route's target_function for passes of `role`, and the function as
/// it is now. Missing (42883), of another kind than an ordinary function (42809) or another result than
/// void (42804) blocks; so do an owner whose code would run with privileges that it has not, and a
/// missing right to call it (42501; spec.md section 2, owner). Looks at the catalogs without regard to
/// anybody's rights. Raises 22023 for a malformed name.
std::vector<Finding> check_target(const Route &route, const Extension &extension, Oid role, Target &target);

} // namespace outbox_relay::store
