#pragma once

#include <optional>
#include <string>

#include "pg/postgres.hpp"

namespace outbox_relay::api {

/// The role of this name; InvalidOid when there is none.
Oid find_role(const std::string &name);

std::string role_name(Oid role);

/// True when the current user is a member of `role`, or a superuser.
bool is_member_of(Oid role);

/// True when the current user has the privileges of one of the server's own roles (ROLE_PG_…).
bool has_privileges_of(Oid role);

/// The role of a route's owner for an action that runs as it. Raises 42704 when it does not exist,
/// 42501 when the current user is no member of it.
Oid require_owner(const std::string &route, const std::string &owner);

/// True when the current user may see what the route of this owner does.
bool may_watch(const std::string &owner);

} // namespace outbox_relay::api
