#include "store/target.hpp"

#include "pg/guard.hpp"
#include "store/function.hpp"

extern "C" {
#include "access/htup_details.h"
#include "catalog/pg_proc.h"
#include "catalog/pg_type.h"
#include "utils/builtins.h"
#include "utils/syscache.h"
}

namespace outbox_relay::store {

namespace {

Finding wrong(int sqlstate, std::string problem, std::string detail, std::string remedy) {
    Finding finding;
    finding.sqlstate = sqlstate;
    finding.problem = std::move(problem);
    finding.detail = std::move(detail);
    finding.remedy = std::move(remedy);
    return finding;
}

/// What the function is; nothing when it can be a target.
std::vector<Finding> shape_findings(const Function &function, const std::string &signature,
                                    const std::string &create) {
    if (!OidIsValid(function.oid))
        return {wrong(ERRCODE_UNDEFINED_FUNCTION, "function " + signature + " does not exist",
                      "A target function takes one argument, the event as an outbox_message.", create)};
    if (function.kind != PROKIND_FUNCTION || function.set)
        return {wrong(ERRCODE_WRONG_OBJECT_TYPE, signature + " is not an ordinary function",
                      "Procedures, aggregates, window functions and functions that return a set can't be a "
                      "target.",
                      create)};
    if (function.result != VOIDOID)
        return {wrong(ERRCODE_DATATYPE_MISMATCH, "function " + signature + " does not return void",
                      "What a target function has to say it says by returning or by an error.", create)};
    return {};
}

} // namespace

std::vector<Finding> check_target(const Route &route, const Extension &extension, Oid role, Target &target) {
    const Oid schema = extension.schema;
    const Oid message = pg::guard([schema] {
        return GetSysCacheOid2(TYPENAMENSP, Anum_pg_type_oid, CStringGetDatum("outbox_message"),
                               ObjectIdGetDatum(schema));
    });
    if (!OidIsValid(message))
        return {wrong(ERRCODE_UNDEFINED_OBJECT, "type outbox_message does not exist",
                      "It belongs to the extension.", "Drop the extension and create it again.")};
    const Function function = find_function(route.target_function, std::span(&message, 1));
    target.function = function.oid;
    target.message = message;
    target.qualified_name = function.qualified_name;
    const std::string type = pg::guard(
        [&extension] { return quote_qualified_identifier(extension.schema_name.c_str(), "outbox_message"); });
    const std::string signature = target.qualified_name + "(" + type + ")";
    std::vector<Finding> findings = shape_findings(function, signature,
                                                   "Create it as " + target.qualified_name + "(event " +
                                                       type + ") RETURNS void, or name another function.");
    if (!findings.empty())
        return findings;
    return function_right_findings(function, signature, role);
}

} // namespace outbox_relay::store
