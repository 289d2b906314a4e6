#include <string>

#include "api/role.hpp"
#include "store/route_row.hpp"

#include "pg/entry.hpp"
#include "pg/guard.hpp"

extern "C" {
#include "commands/trigger.h"
#include "utils/rel.h"

PGDLLEXPORT Datum outbox_relay_secret_check(PG_FUNCTION_ARGS);
PG_FUNCTION_INFO_V1(outbox_relay_secret_check);
}

namespace outbox_relay::api {

namespace {

constexpr std::size_t kNameBytes = 63;
/// The bound of a header's value, which a secret becomes a part of.
constexpr std::size_t kValueBytes = 8192;

const TriggerData *trigger_of(FunctionCallInfo fcinfo) {
    if (!CALLED_AS_TRIGGER(fcinfo))
        pg::raise(
            {ERRCODE_E_R_I_E_TRIGGER_PROTOCOL_VIOLATED, "this function can only be called as a trigger"});
    return reinterpret_cast<TriggerData *>(fcinfo->context);
}

/// Raises 42501 unless the writer is a member of the secret's owner; a superuser may also clear away what a
/// dropped role left.
void check_writer(const std::string &secret, const std::string &owner, bool new_owner) {
    const Oid role = find_role(owner);
    if (!OidIsValid(role) && new_owner)
        pg::raise({ERRCODE_UNDEFINED_OBJECT, "role \"" + owner + "\" does not exist",
                   "It is to be the owner of outbox secret \"" + secret + "\".",
                   "Name a role that exists, or leave owner out for the current user."});
    if (OidIsValid(role) ? is_member_of(role) : superuser())
        return;
    pg::raise({ERRCODE_INSUFFICIENT_PRIVILEGE, "permission denied to write outbox secret \"" + secret + "\"",
               "Its owner is \"" + owner + "\", of which \"" + role_name(GetUserId()) + "\" is no member.",
               "Writing a secret needs membership in its old and in its new owner."});
}

/// No text of the value gets into an error: it would be logged.
void check_form(const store::RouteRow &row) {
    const std::string name = row.text("name");
    bool good = !name.empty() && name.size() <= kNameBytes;
    for (const char byte : name)
        good = good && static_cast<unsigned char>(byte) > ' ' && byte != '}' && byte != '{' && byte != 0x7f;
    if (!good)
        pg::raise({ERRCODE_INVALID_PARAMETER_VALUE, "invalid name of an outbox secret",
                   "A name has 1 to 63 bytes without blanks, control characters and braces."});
    const std::size_t size = row.text("value").size();
    if (size == 0 || size > kValueBytes)
        pg::raise({ERRCODE_INVALID_PARAMETER_VALUE, "invalid value of outbox secret \"" + name + "\"",
                   "It has " + std::to_string(size) + " bytes.",
                   "A value has 1 to " + std::to_string(kValueBytes) + " bytes."});
}

/// TRUNCATE names no secret, so it asks for more than membership.
Datum check_statement() {
    if (!superuser())
        pg::raise({ERRCODE_INSUFFICIENT_PRIVILEGE, "permission denied to truncate outbox_secret", "",
                   "Delete the secrets whose owner you are a member of."});
    return PointerGetDatum(nullptr);
}

Datum check(const TriggerData *data) {
    if (!TRIGGER_FIRED_FOR_ROW(data->tg_event))
        return check_statement();
    const TupleDesc descriptor = RelationGetDescr(data->tg_relation);
    const store::RouteRow before(data->tg_trigtuple, descriptor);
    if (TRIGGER_FIRED_BY_INSERT(data->tg_event)) {
        check_form(before);
        check_writer(before.text("name"), before.name("owner"), true);
        return PointerGetDatum(data->tg_trigtuple);
    }
    check_writer(before.text("name"), before.name("owner"), false);
    if (!TRIGGER_FIRED_BY_UPDATE(data->tg_event))
        return PointerGetDatum(data->tg_trigtuple);
    const store::RouteRow after(data->tg_newtuple, descriptor);
    check_form(after);
    check_writer(after.text("name"), after.name("owner"), true);
    return PointerGetDatum(data->tg_newtuple);
}

} // namespace

} // namespace outbox_relay::api

/// BEFORE trigger of outbox_secret: form, and membership of the writer in the owner.
Datum outbox_relay_secret_check(PG_FUNCTION_ARGS) {
    return pg::entry([fcinfo] { return outbox_relay::api::check(outbox_relay::api::trigger_of(fcinfo)); });
}
