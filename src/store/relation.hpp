#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "pg/postgres.hpp"
#include "store/preflight.hpp"

extern "C" {
#include "access/attnum.h"
#include "nodes/parsenodes.h"
#include "storage/lockdefs.h"
}

namespace outbox_relay::store {

struct Column {
    std::string name;
    Oid type = InvalidOid;
    int type_modifier = -1;
    AttrNumber attnum = 0;
    bool not_null = false;
    bool has_default = false; ///< a default, an identity or a generated value
};

/// An application's table as the catalogs describe it.
struct Relation {
    Oid oid = InvalidOid;
    char kind = 0;        ///< pg_class.relkind
    char persistence = 0; ///< pg_class.relpersistence
    Oid owner = InvalidOid;
    std::string qualified_name;  ///< schema.table, quoted where needed
    std::vector<Column> columns; ///< dropped ones left out

    const Column *column(const std::string &name) const;
};

/// What a route asks of its table beyond the columns that every outbox has.
struct Needs {
    bool hlc = false;
    bool trace = false;
    bool processing_at = false; ///< reclaim that the route itself asks for
    bool retain = false;        ///< both columns that a retain pass writes
    bool reclaims = false;      ///< where there is a processing_at
};

/// What a qualified name names, for the error about a malformed one.
enum class Named { relation, function };

/// Schema and table (or function) of `name`, spelled as SQL spells a qualified name. Raises 22023 when it
/// is malformed or has not exactly two parts: a bare name would depend on somebody's search_path.
std::pair<std::string, std::string> split_name(const std::string &name, Named named = Named::relation);

/// The table that `name` names now, locked `lock` to the end of the transaction. Raises 22023
/// malformed, 42P01 unknown; whatever kind it is it is described.
Relation describe(const std::string &name, LOCKMODE lock);

/// The same; nothing when there is none.
std::optional<Relation> find_relation(const std::string &name, LOCKMODE lock);

/// The same without regard to the current user's rights on the schema: for tables that the server's
/// configuration names.
std::optional<Relation> find_configured_relation(const std::string &name, LOCKMODE lock);

/// What is wrong with the table: its kind (42809) alone, else each missing column (42703) and wrong
/// type (42804) with the ALTER TABLE that mends it. Types: spec.md section 1.
std::vector<Finding> missing_or_wrong(const Relation &relation, const Needs &needs);

/// Raises the first finding that blocks.
void require(const std::vector<Finding> &findings);

/// Why a pass must not run as `role` on this table (42501): code of its owner would run with the
/// role's privileges. Fine are the owner itself, who has the role's privileges, and superusers.
std::optional<Finding> owner_finding(const Relation &relation, Oid role);

/// Whether `role` has the right `mode` on the table, or on each of `columns` of it.
bool has_right(Oid relation, Oid role, AclMode mode, const std::vector<AttrNumber> &columns);

/// 42501: passes of `role` need `rights` on `what` ("table", "delivery log").
Finding missing_rights(const Relation &relation, const char *what, const std::string &rights, Oid role);

/// Rights that `role` lacks for a pass (42501); those on single columns count.
std::vector<Finding> privilege_findings(const Relation &relation, const Needs &needs, Oid role);

} // namespace outbox_relay::store
