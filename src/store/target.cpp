#include "store/target.hpp"

#include "pg/compat.hpp"
#include "pg/guard.hpp"
#include "store/relation.hpp"

extern "C" {
#include "access/htup_details.h"
#include "catalog/namespace.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/syscache.h"
}

namespace outbox_relay::store {

namespace {

/// A function of pg_proc as far as a target is judged by it.
struct Found {
    Oid function = InvalidOid;
    Oid schema = InvalidOid;
    Oid owner = InvalidOid;
    Oid result = InvalidOid;
    char kind = 0;
    bool set = false;
    const char *qualified_name = nullptr;
};

/// C regime: schema.name(message), by the catalogs alone.
Found look_up(const char *schema, const char *name, Oid message) {
    Found found;
    found.schema = get_namespace_oid(schema, true);
    found.qualified_name = quote_qualified_identifier(schema, name);
    if (!OidIsValid(found.schema))
        return found;
    oidvector *arguments = buildoidvector(&message, 1);
    HeapTuple tuple = SearchSysCache3(PROCNAMEARGSNSP, CStringGetDatum(name), PointerGetDatum(arguments),
                                      ObjectIdGetDatum(found.schema));
    if (!HeapTupleIsValid(tuple))
        return found;
    auto *row = reinterpret_cast<Form_pg_proc>(GETSTRUCT(tuple));
    found.function = row->oid;
    found.owner = row->proowner;
    found.result = row->prorettype;
    found.kind = row->prokind;
    found.set = row->proretset;
    ReleaseSysCache(tuple);
    return found;
}

Finding wrong(int sqlstate, std::string problem, std::string detail, std::string remedy) {
    Finding finding;
    finding.sqlstate = sqlstate;
    finding.problem = std::move(problem);
    finding.detail = std::move(detail);
    finding.remedy = std::move(remedy);
    return finding;
}

std::string role_name(Oid role) {
    const char *name = pg::guard([role] { return GetUserNameFromId(role, true); });
    return name == nullptr ? std::to_string(role) : name;
}

std::string quoted_role(Oid role) {
    const std::string name = role_name(role);
    return pg::guard([&name] { return quote_identifier(name.c_str()); });
}

/// What the function is; nothing when it can be a target.
std::vector<Finding> shape_findings(const Found &found, const std::string &signature,
                                    const std::string &create) {
    if (!OidIsValid(found.function))
        return {wrong(ERRCODE_UNDEFINED_FUNCTION, "function " + signature + " does not exist",
                      "A target function takes one argument, the event as an outbox_message.", create)};
    if (found.kind != PROKIND_FUNCTION || found.set)
        return {wrong(ERRCODE_WRONG_OBJECT_TYPE, signature + " is not an ordinary function",
                      "Procedures, aggregates, window functions and functions that return a set can't be a "
                      "target.",
                      create)};
    if (found.result != VOIDOID)
        return {wrong(ERRCODE_DATATYPE_MISMATCH, "function " + signature + " does not return void",
                      "What a target function has to say it says by returning or by an error.", create)};
    return {};
}

std::vector<Finding> right_findings(const Found &found, const std::string &schema,
                                    const std::string &signature, Oid role) {
    struct Rights {
        bool owner_fine;
        bool execute;
        bool usage;
    };
    const Rights rights = pg::guard([&found, role] {
        return Rights{
            found.owner == role || superuser_arg(found.owner) || has_privs_of_role(found.owner, role),
            pg::compat::may_execute(found.function, role), pg::compat::may_use_schema(found.schema, role)};
    });
    std::vector<Finding> findings;
    if (!rights.owner_fine)
        findings.push_back(wrong(ERRCODE_INSUFFICIENT_PRIVILEGE,
                                 "role \"" + role_name(role) + "\" may not call function " + signature,
                                 "The function belongs to \"" + role_name(found.owner) +
                                     "\", whose code would run with privileges that this role has and \"" +
                                     role_name(found.owner) + "\" has not.",
                                 "Set the route's owner to the function's owner, or ALTER FUNCTION " +
                                     signature + " OWNER TO " + quoted_role(role) + ";"));
    if (!rights.usage)
        findings.push_back(
            wrong(ERRCODE_INSUFFICIENT_PRIVILEGE,
                  "role \"" + role_name(role) + "\" lacks USAGE on the schema of function " + signature,
                  "Passes of the route run as this role.",
                  "GRANT USAGE ON SCHEMA " + schema + " TO " + quoted_role(role) + ";"));
    if (!rights.execute)
        findings.push_back(
            wrong(ERRCODE_INSUFFICIENT_PRIVILEGE,
                  "role \"" + role_name(role) + "\" lacks EXECUTE on function " + signature,
                  "Passes of the route run as this role.",
                  "GRANT EXECUTE ON FUNCTION " + signature + " TO " + quoted_role(role) + ";"));
    return findings;
}

} // namespace

std::vector<Finding> check_target(const Route &route, const Extension &extension, Oid role, Target &target) {
    const std::pair<std::string, std::string> name = split_name(route.target_function, Named::function);
    const Oid schema = extension.schema;
    const Oid message = pg::guard([schema] {
        return GetSysCacheOid2(TYPENAMENSP, Anum_pg_type_oid, CStringGetDatum("outbox_message"),
                               ObjectIdGetDatum(schema));
    });
    if (!OidIsValid(message))
        return {wrong(ERRCODE_UNDEFINED_OBJECT, "type outbox_message does not exist",
                      "It belongs to the extension.", "Drop the extension and create it again.")};
    const Found found = pg::guard([&] { return look_up(name.first.c_str(), name.second.c_str(), message); });
    target.function = found.function;
    target.message = message;
    target.qualified_name = found.qualified_name;
    const std::string type = pg::guard(
        [&extension] { return quote_qualified_identifier(extension.schema_name.c_str(), "outbox_message"); });
    const std::string signature = target.qualified_name + "(" + type + ")";
    std::vector<Finding> findings = shape_findings(found, signature,
                                                   "Create it as " + target.qualified_name + "(event " +
                                                       type + ") RETURNS void, or name another function.");
    if (!findings.empty())
        return findings;
    const std::string quoted_schema = pg::guard([&name] { return quote_identifier(name.first.c_str()); });
    return right_findings(found, quoted_schema, signature, role);
}

} // namespace outbox_relay::store
