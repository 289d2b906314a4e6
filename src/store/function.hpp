#pragma once

#include <span>
#include <string>
#include <vector>

#include "store/preflight.hpp"

namespace outbox_relay::store {

/// A function as the catalogs describe it.
struct Function {
    Oid oid = InvalidOid; ///< InvalidOid: there is none
    Oid schema = InvalidOid;
    Oid owner = InvalidOid;
    Oid result = InvalidOid;
    char kind = 0; ///< pg_proc.prokind
    bool set = false;
    std::string qualified_name; ///< schema.function, quoted where needed
    std::string quoted_schema;
};

/// The function that `name` (schema.function, as SQL spells it) with these argument types names now.
/// Looks at the catalogs without regard to anybody's rights. Raises 22023 for a malformed name.
Function find_function(const std::string &name, std::span<const Oid> arguments);

/// Why `role` must not or can't call it (42501): an owner whose code would run with privileges that it
/// has not (spec.md section 2, owner), a missing USAGE or EXECUTE. `signature`: how to write it.
std::vector<Finding> function_right_findings(const Function &function, const std::string &signature,
                                             Oid role);

} // namespace outbox_relay::store
