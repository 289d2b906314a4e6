#include "store/function.hpp"

#include "pg/compat.hpp"
#include "pg/guard.hpp"
#include "store/relation.hpp"

extern "C" {
#include "access/htup_details.h"
#include "catalog/namespace.h"
#include "catalog/pg_proc.h"
#include "utils/acl.h"
#include "utils/builtins.h"
#include "utils/syscache.h"
}

namespace outbox_relay::store {

namespace {

/// C regime: what pg_proc says of schema.name(arguments).
struct Found {
    Oid function = InvalidOid;
    Oid schema = InvalidOid;
    Oid owner = InvalidOid;
    Oid result = InvalidOid;
    char kind = 0;
    bool set = false;
    const char *qualified_name = nullptr;
    const char *quoted_schema = nullptr;
};

Found look_up(const char *schema, const char *name, std::span<const Oid> arguments) {
    Found found;
    found.schema = get_namespace_oid(schema, true);
    found.qualified_name = quote_qualified_identifier(schema, name);
    found.quoted_schema = quote_identifier(schema);
    if (!OidIsValid(found.schema))
        return found;
    oidvector *types = buildoidvector(arguments.data(), static_cast<int>(arguments.size()));
    HeapTuple tuple = SearchSysCache3(PROCNAMEARGSNSP, CStringGetDatum(name), PointerGetDatum(types),
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

Finding denied(std::string problem, std::string detail, std::string remedy) {
    Finding finding;
    finding.sqlstate = ERRCODE_INSUFFICIENT_PRIVILEGE;
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

} // namespace

Function find_function(const std::string &name, std::span<const Oid> arguments) {
    const std::pair<std::string, std::string> parts = split_name(name, Named::function);
    const Found found =
        pg::guard([&] { return look_up(parts.first.c_str(), parts.second.c_str(), arguments); });
    return {found.function, found.schema, found.owner,          found.result,
            found.kind,     found.set,    found.qualified_name, found.quoted_schema};
}

std::vector<Finding> function_right_findings(const Function &function, const std::string &signature,
                                             Oid role) {
    struct Rights {
        bool owner_fine;
        bool execute;
        bool usage;
    };
    const Rights rights = pg::guard([&function, role] {
        return Rights{function.owner == role || superuser_arg(function.owner) ||
                          has_privs_of_role(function.owner, role),
                      pg::compat::may_execute(function.oid, role),
                      pg::compat::may_use_schema(function.schema, role)};
    });
    std::vector<Finding> findings;
    if (!rights.owner_fine)
        findings.push_back(denied("role \"" + role_name(role) + "\" may not call function " + signature,
                                  "The function belongs to \"" + role_name(function.owner) +
                                      "\", whose code would run with privileges that this role has and \"" +
                                      role_name(function.owner) + "\" has not.",
                                  "Set the route's owner to the function's owner, or ALTER FUNCTION " +
                                      signature + " OWNER TO " + quoted_role(role) + ";"));
    if (!rights.usage)
        findings.push_back(
            denied("role \"" + role_name(role) + "\" lacks USAGE on the schema of function " + signature,
                   "Passes of the route run as this role.",
                   "GRANT USAGE ON SCHEMA " + function.quoted_schema + " TO " + quoted_role(role) + ";"));
    if (!rights.execute)
        findings.push_back(
            denied("role \"" + role_name(role) + "\" lacks EXECUTE on function " + signature,
                   "Passes of the route run as this role.",
                   "GRANT EXECUTE ON FUNCTION " + signature + " TO " + quoted_role(role) + ";"));
    return findings;
}

} // namespace outbox_relay::store
