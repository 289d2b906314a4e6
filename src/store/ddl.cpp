#include "store/ddl.hpp"

#include <utility>

#include "pg/guard.hpp"
#include "store/relation.hpp"

extern "C" {
#include "commands/defrem.h"
#include "utils/builtins.h"
}

namespace outbox_relay::store {

namespace {

using Name = std::pair<std::string, std::string>;

std::string qualified(const Name &name) {
    return pg::guard([&name] { return quote_qualified_identifier(name.first.c_str(), name.second.c_str()); });
}

/// The name of something that belongs to a table, as the server itself would cut it to 63 bytes.
std::string derived(const std::string &table, const char *label) {
    return pg::guard([&table, label] { return makeObjectName(table.c_str(), nullptr, label); });
}

std::string index_on(const Name &name, const char *label, const char *columns) {
    const std::string index = derived(name.second, label);
    const std::string quoted = pg::guard([&index] { return quote_identifier(index.c_str()); });
    return "CREATE INDEX " + quoted + " ON " + qualified(name) + " (" + columns + ")";
}

} // namespace

std::vector<std::string> outbox_ddl(const std::string &relation, bool hlc, bool trace) {
    const Name name = split_name(relation);
    std::string table = "CREATE TABLE " + qualified(name) +
                        " (\n"
                        "    id uuid PRIMARY KEY,\n"
                        "    outbox_route text NOT NULL,\n"
                        "    event_id uuid NOT NULL,\n"
                        "    event_type text NOT NULL,\n"
                        "    tenant_id uuid,\n"
                        "    execution_id uuid,\n"
                        "    correlation_id uuid,\n"
                        "    causation_id uuid,\n"
                        "    occurred_at timestamptz NOT NULL,\n"
                        "    payload jsonb NOT NULL,\n"
                        "    status text NOT NULL,\n"
                        "    created_at timestamptz NOT NULL,\n"
                        "    published_at timestamptz,\n"
                        "    processing_at timestamptz,\n"
                        "    last_error text,\n"
                        "    attempts integer NOT NULL DEFAULT 0,\n"
                        "    available_at timestamptz,\n"
                        "    ordering_key text,\n";
    if (trace)
        table += "    traceparent text,\n";
    if (hlc)
        table += "    hlc bigint,\n";
    table += "    UNIQUE (outbox_route, event_id)\n)";

    std::vector<std::string> statements{std::move(table)};
    statements.push_back(index_on(name, "claim_idx", "outbox_route, status, available_at, created_at"));
    if (hlc)
        statements.push_back(
            index_on(name, "claim_hlc_idx", "outbox_route, status, available_at, hlc, created_at, id"));
    return statements;
}

std::vector<std::string> delivery_log_ddl(const std::string &relation) {
    const Name name = split_name(relation);
    const Name rest{name.first, derived(name.second, "default")};
    return {"CREATE TABLE " + qualified(name) +
                " (\n"
                "    id uuid NOT NULL,\n"
                "    outbox_route text NOT NULL,\n"
                "    event_id uuid NOT NULL,\n"
                "    tenant_id uuid,\n"
                "    published_at timestamptz NOT NULL\n"
                ") PARTITION BY RANGE (published_at)",
            index_on(name, "event_idx", "event_id"),
            "CREATE TABLE " + qualified(rest) + " PARTITION OF " + qualified(name) + " DEFAULT"};
}

} // namespace outbox_relay::store
