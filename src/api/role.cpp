#include "api/role.hpp"

#include "pg/error.hpp"
#include "pg/guard.hpp"

extern "C" {
#include "catalog/pg_authid.h"
#include "utils/acl.h"
}

namespace outbox_relay::api {

Oid find_role(const std::string &name) {
    return pg::guard([&name] { return get_role_oid(name.c_str(), true); });
}

std::string role_name(Oid role) {
    const char *name = pg::guard([role] { return GetUserNameFromId(role, true); });
    return name == nullptr ? std::to_string(role) : name;
}

bool is_member_of(Oid role) {
    return pg::guard([role] { return is_member_of_role(GetUserId(), role); });
}

bool has_privileges_of(Oid role) {
    return pg::guard([role] { return has_privs_of_role(GetUserId(), role); });
}

Oid require_owner(const std::string &route, const std::string &owner) {
    const Oid role = find_role(owner);
    if (!OidIsValid(role))
        pg::raise({ERRCODE_UNDEFINED_OBJECT, "role \"" + owner + "\" does not exist",
                   "It is the owner of outbox route \"" + route + "\".",
                   "Set the owner of the route to a role that exists."});
    if (!is_member_of(role))
        pg::raise(
            {ERRCODE_INSUFFICIENT_PRIVILEGE, "permission denied for outbox route \"" + route + "\"",
             "It runs as role \"" + owner + "\", of which \"" + role_name(GetUserId()) + "\" is no member.",
             "Ask a member of that role, or a superuser."});
    return role;
}

bool may_watch(const std::string &owner) {
    if (has_privileges_of(ROLE_PG_MONITOR))
        return true;
    const Oid role = find_role(owner);
    return OidIsValid(role) && is_member_of(role);
}

} // namespace outbox_relay::api
