#include "store/index.hpp"

#include <span>
#include <string>

#include "pg/guard.hpp"

extern "C" {
#include "access/genam.h"
#include "access/relation.h"
#include "access/transam.h"
#include "catalog/pg_am.h"
#include "nodes/pg_list.h"
#include "utils/rel.h"
#include "utils/relcache.h"
}

namespace outbox_relay::store {

namespace {

constexpr const char *kLookColumns[] = {"outbox_route", "status", "available_at"};
constexpr const char *kTenantLookColumns[] = {"outbox_route", "status", "tenant_id", "available_at"};
constexpr const char *kColumns[] = {"outbox_route", "status", "tenant_id", "available_at", "created_at"};
constexpr const char *kHlcColumns[] = {"outbox_route", "status",     "tenant_id", "available_at",
                                       "hlc",          "created_at", "id"};

std::span<const char *const> columns_of(bool hlc) {
    return hlc ? std::span<const char *const>(kHlcColumns) : std::span<const char *const>(kColumns);
}

/// C regime: whether the index begins with these columns, in their plain order.
bool begins_with(::Relation index, std::span<const AttrNumber> columns) {
    const Form_pg_index form = index->rd_index;
    if (index->rd_rel->relam != BTREE_AM_OID || !form->indisvalid ||
        RelationGetIndexPredicate(index) != NIL || form->indnkeyatts < static_cast<int>(columns.size()))
        return false;
    for (std::size_t i = 0; i < columns.size(); ++i)
        if (form->indkey.values[i] != columns[i] || index->rd_indoption[i] != 0 ||
            index->rd_opfamily[i] >= FirstNormalObjectId)
            return false;
    return true;
}

/// C regime: the first index of the table that does.
Oid find_index(Oid table, std::span<const AttrNumber> columns) {
    const ::Relation relation = relation_open(table, AccessShareLock);
    List *indexes = RelationGetIndexList(relation);
    Oid found = InvalidOid;
    ListCell *cell = nullptr;
    foreach (cell, indexes) {
        const ::Relation index = index_open(lfirst_oid(cell), AccessShareLock);
        if (!OidIsValid(found) && begins_with(index, columns))
            found = RelationGetRelid(index);
        index_close(index, AccessShareLock);
    }
    list_free(indexes);
    relation_close(relation, AccessShareLock);
    return found;
}

} // namespace

namespace {

Oid index_on(const Relation &relation, std::span<const char *const> columns) {
    std::vector<AttrNumber> numbers;
    for (const char *name : columns) {
        const Column *column = relation.column(name);
        if (column == nullptr)
            return InvalidOid;
        numbers.push_back(column->attnum);
    }
    return pg::guard([&] { return find_index(relation.oid, numbers); });
}

} // namespace

Oid tenant_index(const Relation &relation, bool hlc) {
    return index_on(relation, columns_of(hlc));
}

Oid look_index(const Relation &relation, bool by_tenant) {
    return by_tenant ? index_on(relation, kTenantLookColumns) : index_on(relation, kLookColumns);
}

std::vector<Finding> tenant_index_findings(const Relation &relation, bool hlc) {
    if (OidIsValid(tenant_index(relation, hlc)))
        return {};
    std::string list;
    for (const char *name : columns_of(hlc))
        list += (list.empty() ? "" : ", ") + std::string(name);
    Finding finding;
    finding.sqlstate = ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE;
    finding.problem =
        "table " + relation.qualified_name + ", which tenants share, has no index on (" + list + ")";
    finding.detail = "Without it the claim of one tenant reads past the rows of all others.";
    finding.remedy = "CREATE INDEX CONCURRENTLY ON " + relation.qualified_name + " (" + list + ");";
    return {finding};
}

} // namespace outbox_relay::store
