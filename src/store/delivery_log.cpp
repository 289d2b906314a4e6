#include "store/delivery_log.hpp"

#include <algorithm>
#include <string>

#include "pg/guard.hpp"

extern "C" {
#include "access/htup_details.h"
#include "access/table.h"
#include "catalog/partition.h"
#include "catalog/pg_class.h"
#include "catalog/pg_inherits.h"
#include "catalog/pg_type.h"
#include "partitioning/partbounds.h"
#include "partitioning/partdesc.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/lsyscache.h"
#include "utils/partcache.h"
#include "utils/rel.h"
#include "utils/syscache.h"
#include "utils/timestamp.h"
}

namespace outbox_relay::store {

namespace {

struct LogColumn {
    const char *name;
    Oid type;
    const char *type_name;
};

constexpr LogColumn kColumns[] = {{"id", UUIDOID, "uuid"},
                                  {"outbox_route", TEXTOID, "text"},
                                  {"event_id", UUIDOID, "uuid"},
                                  {"tenant_id", UUIDOID, "uuid"},
                                  {"published_at", TIMESTAMPTZOID, "timestamptz"}};

bool is_ours(const std::string &name) {
    return std::any_of(std::begin(kColumns), std::end(kColumns),
                       [&name](const LogColumn &column) { return name == column.name; });
}

Finding finding(int sqlstate, const std::string &problem, const std::string &detail,
                const std::string &remedy) {
    return {Finding::Severity::error, sqlstate, problem, detail, remedy};
}

/// False when the table is partitioned by ranges of the column `attnum` alone and none takes rows of `at`,
/// at whatever depth. Other partitionings can't be judged without the row: true. C regime. The locks go at
/// once, so that a pass holds up nobody who adds or drops a partition.
bool takes_rows_of(Oid table, AttrNumber attnum, TimestampTz at) {
    if (get_rel_relkind(table) != RELKIND_PARTITIONED_TABLE)
        return true;
    const ::Relation relation = table_open(table, AccessShareLock);
    const PartitionKey key = RelationGetPartitionKey(relation);
    const bool judged = key->strategy == PARTITION_STRATEGY_RANGE && key->partnatts == 1 &&
                        key->partattrs[0] == attnum && key->parttypid[0] == TIMESTAMPTZOID;
    const PartitionDesc partitions = judged ? RelationGetPartitionDesc(relation, true) : nullptr;
    Oid child = InvalidOid;
    if (judged && partitions->nparts > 0) {
        Datum value = TimestampTzGetDatum(at);
        bool equal = false;
        const PartitionBoundInfo bounds = partitions->boundinfo;
        const int offset =
            partition_range_datum_bsearch(key->partsupfunc, key->partcollation, bounds, 1, &value, &equal);
        int index = bounds->indexes[offset + 1];
        if (index < 0)
            index = bounds->default_index;
        if (index >= 0)
            child = partitions->oids[index];
    }
    table_close(relation, AccessShareLock);
    if (!judged)
        return true;
    return OidIsValid(child) &&
           takes_rows_of(child, get_attnum(child, get_attname(table, attnum, false)), at);
}

/// Whether there is a partition for rows of `at`; a finding where there is none.
bool find_partition(const Relation &log, std::int64_t at, std::vector<Finding> &findings) {
    const AttrNumber attnum = log.column("published_at")->attnum;
    const Oid oid = log.oid;
    if (pg::guard([oid, attnum, at] { return takes_rows_of(oid, attnum, at); }))
        return true;
    const std::string day = pg::guard([at] { return pnstrdup(timestamptz_to_str(at), 10); });
    findings.push_back(finding(
        ERRCODE_CHECK_VIOLATION, "delivery log " + log.qualified_name + " has no partition for " + day,
        "A pass appends its rows there when it deletes them; nothing was sent.",
        "Create the day's partition, and a default partition as the net for a day that nobody added."));
    return false;
}

std::string role_name(Oid role) {
    const char *name = pg::guard([role] { return GetUserNameFromId(role, true); });
    return name == nullptr ? std::to_string(role) : name;
}

/// Triggers of the log and of its partitions run in the pass: their owners must not gain by that.
void find_owners(const Relation &log, Oid role, std::vector<Finding> &findings) {
    const Oid oid = log.oid;
    const Oid stranger = pg::guard([oid, role] {
        Oid found = InvalidOid;
        ListCell *cell = nullptr;
        foreach (cell, find_all_inheritors(oid, NoLock, nullptr)) {
            // Not opened: ATTACH PARTITION of another day holds the default partition.
            const HeapTuple tuple = SearchSysCache1(RELOID, ObjectIdGetDatum(lfirst_oid(cell)));
            if (!HeapTupleIsValid(tuple))
                continue;
            const Oid owner = reinterpret_cast<Form_pg_class>(GETSTRUCT(tuple))->relowner;
            ReleaseSysCache(tuple);
            if (owner != role && !superuser_arg(owner) && !has_privs_of_role(owner, role))
                found = owner;
        }
        return found;
    });
    if (OidIsValid(stranger))
        findings.push_back(finding(
            ERRCODE_INSUFFICIENT_PRIVILEGE,
            "role \"" + role_name(role) + "\" may not run passes on delivery log " + log.qualified_name,
            "It or a partition of it belongs to \"" + role_name(stranger) +
                "\", whose triggers would run with privileges that this role has and \"" +
                role_name(stranger) + "\" has not.",
            "Set the owner of the log and of its partitions to the route's owner."));
}

} // namespace

std::vector<Finding> log_form_findings(const Relation &log) {
    std::vector<Finding> findings;
    if ((log.kind != RELKIND_RELATION && log.kind != RELKIND_PARTITIONED_TABLE) ||
        log.persistence == RELPERSISTENCE_TEMP) {
        findings.push_back(
            finding(ERRCODE_WRONG_OBJECT_TYPE,
                    "delivery log " + log.qualified_name + " is neither an ordinary nor a partitioned table",
                    "", "Name such a table; outbox_ddl() shows one."));
        return findings;
    }
    for (const LogColumn &wanted : kColumns) {
        const Column *column = log.column(wanted.name);
        if (column == nullptr)
            findings.push_back(
                finding(ERRCODE_UNDEFINED_COLUMN,
                        "delivery log " + log.qualified_name + " has no column \"" + wanted.name + "\"",
                        std::string("It needs that column of type ") + wanted.type_name + ".",
                        "ALTER TABLE " + log.qualified_name + " ADD COLUMN " + wanted.name + " " +
                            wanted.type_name + ";"));
        else if (column->type != wanted.type && !(wanted.type == TEXTOID && column->type == VARCHAROID))
            findings.push_back(finding(ERRCODE_DATATYPE_MISMATCH,
                                       "column \"" + column->name + "\" of delivery log " +
                                           log.qualified_name + " has the wrong type",
                                       std::string("Expected ") + wanted.type_name + ".",
                                       "ALTER TABLE " + log.qualified_name + " ALTER COLUMN " + wanted.name +
                                           " TYPE " + wanted.type_name + ";"));
    }
    for (const Column &column : log.columns)
        if (!is_ours(column.name) && column.not_null && !column.has_default)
            findings.push_back(finding(
                ERRCODE_NOT_NULL_VIOLATION,
                "column \"" + column.name + "\" of delivery log " + log.qualified_name +
                    " is NOT NULL and has no default",
                "A pass fills the log's own columns only.",
                "ALTER TABLE " + log.qualified_name + " ALTER COLUMN " +
                    std::string(pg::guard([&column] { return quote_identifier(column.name.c_str()); })) +
                    " DROP NOT NULL;"));
    return findings;
}

std::vector<Finding> log_findings(const Relation &log, Oid role, std::int64_t from, std::int64_t to) {
    std::vector<Finding> findings = log_form_findings(log);
    if (!findings.empty())
        return findings;
    find_owners(log, role, findings);
    std::vector<AttrNumber> columns;
    for (const LogColumn &wanted : kColumns)
        columns.push_back(log.column(wanted.name)->attnum);
    if (!has_right(log.oid, role, ACL_INSERT, columns))
        findings.push_back(missing_rights(log, "delivery log", "INSERT", role));
    if (find_partition(log, from, findings) && to > from)
        (void)find_partition(log, to, findings);
    return findings;
}

} // namespace outbox_relay::store
