#pragma once

#include <vector>

#include "store/preflight.hpp"
#include "store/relation.hpp"

namespace outbox_relay::store {

/// The index that a tenant's claim walks (claims.md section 3): a valid b-tree on (outbox_route, status,
/// tenant_id, available_at, created_at), with `hlc` (…, available_at, hlc, created_at, id), of ascending
/// columns and without a condition; more columns may follow. InvalidOid: the table has none.
Oid tenant_index(const Relation &relation, bool hlc);

/// An index for a look: a valid b-tree without a condition that begins with (outbox_route, status,
/// `by_tenant` tenant_id, available_at), ascending, of the operators that the server brings. InvalidOid:
/// there is none.
Oid look_index(const Relation &relation, bool by_tenant);

/// That it is missing: without it a claim reads past every other tenant's rows.
std::vector<Finding> tenant_index_findings(const Relation &relation, bool hlc);

} // namespace outbox_relay::store
