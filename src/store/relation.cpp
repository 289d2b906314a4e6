#include "store/relation.hpp"

#include <algorithm>

#include "pg/error.hpp"
#include "pg/guard.hpp"

extern "C" {
#include "access/htup_details.h"
#include "access/relation.h"
#include "access/sysattr.h"
#include "catalog/namespace.h"
#include "catalog/pg_class.h"
#include "catalog/pg_type.h"
#include "nodes/makefuncs.h"
#include "nodes/pg_list.h"
#include "storage/lmgr.h"
#include "storage/lockdefs.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/varlena.h"
}

namespace outbox_relay::store {

namespace {

/// Which types a column may have; the first is the one that a remedy asks for.
enum class Kind { uuid, text, timestamptz, jsonb, integer, bigint };

struct Expected {
    const char *name;
    Kind kind;
    enum { always, hlc, trace, processing, published } when;
};

/// The seed's columns (seed-outbox-schema.md); processing_at and published_at are never written by
/// a consume pass and may be dropped.
constexpr Expected kExpected[] = {
    {"id", Kind::uuid, Expected::always},
    {"outbox_route", Kind::text, Expected::always},
    {"event_id", Kind::uuid, Expected::always},
    {"event_type", Kind::text, Expected::always},
    {"tenant_id", Kind::uuid, Expected::always},
    {"execution_id", Kind::uuid, Expected::always},
    {"correlation_id", Kind::uuid, Expected::always},
    {"causation_id", Kind::uuid, Expected::always},
    {"occurred_at", Kind::timestamptz, Expected::always},
    {"payload", Kind::jsonb, Expected::always},
    {"status", Kind::text, Expected::always},
    {"created_at", Kind::timestamptz, Expected::always},
    {"published_at", Kind::timestamptz, Expected::published},
    {"processing_at", Kind::timestamptz, Expected::processing},
    {"last_error", Kind::text, Expected::always},
    {"attempts", Kind::integer, Expected::always},
    {"available_at", Kind::timestamptz, Expected::always},
    {"ordering_key", Kind::text, Expected::always},
    {"hlc", Kind::bigint, Expected::hlc},
    {"traceparent", Kind::text, Expected::trace},
};

const char *type_words(Kind kind) {
    switch (kind) {
    case Kind::uuid:
        return "uuid";
    case Kind::text:
        return "text or character varying";
    case Kind::timestamptz:
        return "timestamp with time zone";
    case Kind::jsonb:
        return "jsonb";
    case Kind::integer:
        return "integer or bigint";
    case Kind::bigint:
        return "bigint";
    }
    return "";
}

const char *type_to_ask_for(Kind kind) {
    switch (kind) {
    case Kind::uuid:
        return "uuid";
    case Kind::text:
        return "text";
    case Kind::timestamptz:
        return "timestamptz";
    case Kind::jsonb:
        return "jsonb";
    case Kind::integer:
        return "integer";
    case Kind::bigint:
        return "bigint";
    }
    return "";
}

bool type_fits(Kind kind, Oid type) {
    switch (kind) {
    case Kind::uuid:
        return type == UUIDOID;
    case Kind::text:
        return type == TEXTOID || type == VARCHAROID;
    case Kind::timestamptz:
        return type == TIMESTAMPTZOID;
    case Kind::jsonb:
        return type == JSONBOID;
    case Kind::integer:
        return type == INT4OID || type == INT8OID;
    case Kind::bigint:
        return type == INT8OID;
    }
    return false;
}

/// varchar(n) that can't hold the longest status that a pass writes.
bool too_short_for_status(const Column &column, const Needs &needs) {
    const int longest = needs.retain ? sizeof("processing") - 1 : sizeof("pending") - 1;
    return column.type == VARCHAROID && column.type_modifier >= 0 &&
           column.type_modifier - static_cast<int>(VARHDRSZ) < longest;
}

std::string type_name(const Column &column) {
    return pg::guard([&column] { return format_type_with_typemod(column.type, column.type_modifier); });
}

const char *kind_word(const Relation &relation) {
    switch (relation.kind) {
    case RELKIND_VIEW:
        return "a view";
    case RELKIND_MATVIEW:
        return "a materialized view";
    case RELKIND_FOREIGN_TABLE:
        return "a foreign table";
    case RELKIND_PARTITIONED_TABLE:
        return "a partitioned table";
    case RELKIND_INDEX:
    case RELKIND_PARTITIONED_INDEX:
        return "an index";
    case RELKIND_SEQUENCE:
        return "a sequence";
    case RELKIND_COMPOSITE_TYPE:
        return "a composite type";
    case RELKIND_TOASTVALUE:
        return "a TOAST table";
    default:
        return relation.persistence == RELPERSISTENCE_TEMP ? "a temporary table" : nullptr;
    }
}

Finding missing(const Relation &relation, const Expected &expected) {
    std::string clause = std::string(" ADD COLUMN ") + expected.name + " " + type_to_ask_for(expected.kind);
    if (expected.kind == Kind::integer)
        clause += " NOT NULL DEFAULT 0";
    return {Finding::Severity::error, ERRCODE_UNDEFINED_COLUMN,
            "table " + relation.qualified_name + " has no column \"" + expected.name + "\"",
            std::string("An outbox table needs column \"") + expected.name + "\" of type " +
                type_words(expected.kind) + ".",
            "ALTER TABLE " + relation.qualified_name + clause + ";"};
}

Finding wrong_type(const Relation &relation, const Expected &expected, const Column &column) {
    return {Finding::Severity::error, ERRCODE_DATATYPE_MISMATCH,
            "column \"" + column.name + "\" of table " + relation.qualified_name + " has the wrong type",
            std::string("Expected ") + type_words(expected.kind) + ", found " + type_name(column) + ".",
            "ALTER TABLE " + relation.qualified_name + " ALTER COLUMN " + column.name + " TYPE " +
                type_to_ask_for(expected.kind) + " USING " + column.name +
                "::" + type_to_ask_for(expected.kind) + ";"};
}

/// A column of the application's own that nobody fills: staging fails on it, passes do not.
void find_unfilled(const Relation &relation, std::vector<Finding> &findings) {
    for (const Column &column : relation.columns) {
        const bool ours = std::any_of(std::begin(kExpected), std::end(kExpected),
                                      [&column](const Expected &e) { return column.name == e.name; });
        if (ours || !column.not_null || column.has_default)
            continue;
        const std::string quoted = pg::guard([&column] { return quote_identifier(column.name.c_str()); });
        findings.push_back(
            {Finding::Severity::warning, ERRCODE_NOT_NULL_VIOLATION,
             "column \"" + column.name + "\" of table " + relation.qualified_name +
                 " is NOT NULL and has no default",
             "outbox_stage fills the outbox's own columns only.",
             "ALTER TABLE " + relation.qualified_name + " ALTER COLUMN " + quoted + " DROP NOT NULL;",
             false});
    }
}

/// C regime: copies what we keep of a relation that is open.
struct Opened {
    ::Relation relation;
    const char *qualified_name;
};

Relation read_open(const Opened &opened) {
    Relation relation;
    const Form_pg_class form = opened.relation->rd_rel;
    relation.oid = RelationGetRelid(opened.relation);
    relation.kind = form->relkind;
    relation.persistence = form->relpersistence;
    relation.owner = form->relowner;
    relation.qualified_name = opened.qualified_name;
    const TupleDesc descriptor = RelationGetDescr(opened.relation);
    for (int i = 0; i < descriptor->natts; ++i) {
        const Form_pg_attribute attribute = TupleDescAttr(descriptor, i);
        if (attribute->attisdropped)
            continue;
        Column column;
        column.name = NameStr(attribute->attname);
        column.type = attribute->atttypid;
        column.type_modifier = attribute->atttypmod;
        column.attnum = attribute->attnum;
        column.not_null = attribute->attnotnull;
        column.has_default =
            attribute->atthasdef || attribute->attidentity != '\0' || attribute->attgenerated != '\0';
        relation.columns.push_back(std::move(column));
    }
    return relation;
}

/// C regime: opens a relation that is locked already; nothing for InvalidOid or one that is gone.
Opened open_locked(Oid oid) {
    Opened found{nullptr, nullptr};
    if (OidIsValid(oid))
        found.relation = try_relation_open(oid, NoLock);
    if (found.relation != nullptr)
        found.qualified_name =
            quote_qualified_identifier(get_namespace_name(RelationGetNamespace(found.relation)),
                                       RelationGetRelationName(found.relation));
    return found;
}

std::optional<Relation> take(const Opened &opened) {
    if (opened.relation == nullptr)
        return std::nullopt;
    Relation relation = read_open(opened);
    pg::guard([&opened] { relation_close(opened.relation, NoLock); });
    return relation;
}

std::string role_name(Oid role) {
    const char *name = pg::guard([role] { return GetUserNameFromId(role, true); });
    return name == nullptr ? std::to_string(role) : name;
}

} // namespace

const Column *Relation::column(const std::string &name) const {
    const auto at = std::find_if(columns.begin(), columns.end(),
                                 [&name](const Column &column) { return column.name == name; });
    return at == columns.end() ? nullptr : &*at;
}

namespace {

[[noreturn]] void raise_malformed(const std::string &name, Named named) {
    if (named == Named::function)
        pg::raise(
            {ERRCODE_INVALID_PARAMETER_VALUE, "malformed function name: \"" + name + "\"",
             "A function is given as schema.function, each part spelled as in SQL, without its argument.",
             "Write for example app.deliver, or \"Some Schema\".\"Some Function\"."});
    pg::raise({ERRCODE_INVALID_PARAMETER_VALUE, "malformed relation name: \"" + name + "\"",
               "A relation is given as schema.table, each part spelled as in SQL.",
               "Write for example app.outbox, or \"Some Schema\".\"Some Table\"."});
}

} // namespace

std::pair<std::string, std::string> split_name(const std::string &name, Named named) {
    struct Parts {
        int count;
        const char *schema;
        const char *table;
    };
    const Parts parts = pg::guard([&name] {
        Parts found{0, nullptr, nullptr};
        List *list = NIL;
        if (SplitIdentifierString(pstrdup(name.c_str()), '.', &list))
            found.count = list_length(list);
        if (found.count == 2) {
            found.schema = static_cast<const char *>(linitial(list));
            found.table = static_cast<const char *>(lsecond(list));
        }
        return found;
    });
    if (parts.count != 2)
        raise_malformed(name, named);
    return {parts.schema, parts.table};
}

std::optional<Relation> find_relation(const std::string &name, LOCKMODE lock) {
    const std::pair<std::string, std::string> parts = split_name(name);
    return take(pg::guard([&parts, lock] {
        RangeVar *range = makeRangeVar(pstrdup(parts.first.c_str()), pstrdup(parts.second.c_str()), -1);
        return open_locked(RangeVarGetRelid(range, lock, true));
    }));
}

std::optional<Relation> find_configured_relation(const std::string &name, LOCKMODE lock) {
    const std::pair<std::string, std::string> parts = split_name(name);
    return take(pg::guard([&parts, lock] {
        Oid oid = InvalidOid;
        while (true) {
            const Oid schema = get_namespace_oid(parts.first.c_str(), true);
            const Oid now = OidIsValid(schema) ? get_relname_relid(parts.second.c_str(), schema) : InvalidOid;
            // The name may have moved on while we waited for the lock.
            if (!OidIsValid(now) || now == oid)
                return open_locked(now);
            LockRelationOid(now, lock);
            oid = now;
        }
    }));
}

Relation describe(const std::string &name, LOCKMODE lock) {
    std::optional<Relation> relation = find_relation(name, lock);
    if (!relation.has_value())
        pg::raise({ERRCODE_UNDEFINED_TABLE, "relation \"" + name + "\" does not exist",
                   "A route needs an outbox table of the application's.",
                   "Create it: SELECT outbox_ddl('schema.table') gives the statements."});
    return std::move(*relation);
}

std::vector<Finding> missing_or_wrong(const Relation &relation, const Needs &needs) {
    std::vector<Finding> findings;
    if (const char *word = kind_word(relation)) {
        findings.push_back({Finding::Severity::error, ERRCODE_WRONG_OBJECT_TYPE,
                            relation.qualified_name + " is " + word + ", not an ordinary table",
                            "Views, foreign, temporary and partitioned tables can't be an outbox.",
                            "Name an ordinary table."});
        return findings;
    }
    for (const Expected &expected : kExpected) {
        const Column *column = relation.column(expected.name);
        const bool needed =
            expected.when == Expected::always || (expected.when == Expected::hlc && needs.hlc) ||
            (expected.when == Expected::trace && needs.trace) ||
            (expected.when == Expected::processing && (needs.processing_at || needs.retain)) ||
            (expected.when == Expected::published && needs.retain);
        // Such a column of the application's own is none of ours until the route uses it.
        const bool ours = needed || (expected.when != Expected::hlc && expected.when != Expected::trace);
        if (column == nullptr && needed)
            findings.push_back(missing(relation, expected));
        else if (column != nullptr && ours && !type_fits(expected.kind, column->type))
            findings.push_back(wrong_type(relation, expected, *column));
        else if (column != nullptr && column->name == "status" && too_short_for_status(*column, needs))
            findings.push_back(wrong_type(relation, expected, *column));
    }
    if (findings.empty())
        find_unfilled(relation, findings);
    return findings;
}

void require(const std::vector<Finding> &findings) {
    for (const Finding &finding : findings)
        if (finding.blocks)
            pg::raise({finding.sqlstate, finding.problem, finding.detail, finding.remedy});
}

std::optional<Finding> owner_finding(const Relation &relation, Oid role) {
    const bool fine = pg::guard([&relation, role] {
        return relation.owner == role || superuser_arg(relation.owner) ||
               has_privs_of_role(relation.owner, role);
    });
    if (fine)
        return std::nullopt;
    return Finding{Finding::Severity::error, ERRCODE_INSUFFICIENT_PRIVILEGE,
                   "role \"" + role_name(role) + "\" may not run passes on table " + relation.qualified_name,
                   "The table belongs to \"" + role_name(relation.owner) +
                       "\", whose triggers would run with privileges that this role has and \"" +
                       role_name(relation.owner) + "\" has not.",
                   "Set the route's owner to the table's owner."};
}

bool has_right(Oid relation, Oid role, AclMode mode, const std::vector<AttrNumber> &columns) {
    return pg::guard([&] {
        if (pg_class_aclcheck(relation, role, mode) == ACLCHECK_OK)
            return true;
        for (std::size_t i = 0; i < columns.size(); ++i)
            if (pg_attribute_aclcheck(relation, columns[i], role, mode) != ACLCHECK_OK)
                return false;
        return !columns.empty();
    });
}

Finding missing_rights(const Relation &relation, const char *what, const std::string &rights, Oid role) {
    const std::string quoted = pg::guard([role] { return quote_identifier(GetUserNameFromId(role, false)); });
    return {Finding::Severity::error, ERRCODE_INSUFFICIENT_PRIVILEGE,
            "role \"" + role_name(role) + "\" lacks " + rights + " on " + what + " " +
                relation.qualified_name,
            "Passes of the route run as this role.",
            "GRANT " + rights + " ON " + relation.qualified_name + " TO " + quoted + ";"};
}

namespace {

/// The columns that a pass reads, the server's own among them.
std::vector<AttrNumber> read_columns(const Relation &relation, const Needs &needs) {
    std::vector<AttrNumber> columns = {SelfItemPointerAttributeNumber, TableOidAttributeNumber,
                                       MinTransactionIdAttributeNumber};
    for (const Expected &expected : kExpected) {
        const Column *column = relation.column(expected.name);
        const bool always =
            expected.when == Expected::always && column != nullptr && column->name != "last_error";
        if (column != nullptr &&
            (always || (expected.when == Expected::hlc && needs.hlc) ||
             (expected.when == Expected::trace && needs.trace) ||
             (expected.when == Expected::processing && (needs.retain || needs.reclaims))))
            columns.push_back(column->attnum);
    }
    return columns;
}

/// The columns that a pass may write.
std::vector<AttrNumber> written_columns(const Relation &relation, const Needs &needs) {
    std::vector<AttrNumber> columns;
    const auto add = [&](const char *name) {
        if (const Column *column = relation.column(name))
            columns.push_back(column->attnum);
    };
    for (const char *name : {"status", "attempts", "available_at", "last_error"})
        add(name);
    if (needs.retain || needs.reclaims)
        add("processing_at");
    if (needs.retain)
        add("published_at");
    return columns;
}

} // namespace

std::vector<Finding> privilege_findings(const Relation &relation, const Needs &needs, Oid role) {
    std::string lacking;
    const auto want = [&](const char *name, AclMode mode, const std::vector<AttrNumber> &columns) {
        if (!has_right(relation.oid, role, mode, columns))
            lacking += (lacking.empty() ? "" : ", ") + std::string(name);
    };
    want("SELECT", ACL_SELECT, read_columns(relation, needs));
    want("UPDATE", ACL_UPDATE, written_columns(relation, needs));
    if (!needs.retain)
        want("DELETE", ACL_DELETE, {});
    if (lacking.empty())
        return {};
    return {missing_rights(relation, "table", lacking, role)};
}

} // namespace outbox_relay::store
