#include "api/route_form.hpp"

#include <algorithm>
#include <cctype>
#include <optional>
#include <set>

#include "core/envelope.hpp"
#include "core/header.hpp"
#include "core/text.hpp"
#include "core/url_template.hpp"
#include "http/url.hpp"
#include "pg/error.hpp"
#include "store/effective.hpp"
#include "store/relation.hpp"

extern "C" {
#include "mb/pg_wchar.h"
#include "port.h"
}

namespace outbox_relay::api {

namespace {

using store::RouteRow;

constexpr std::size_t kNameBytes = 63;
constexpr std::int64_t kLargestPayload = 256LL * 1024 * 1024; // a quarter of the server's largest value

[[noreturn]] void refuse(const RouteRow &row, const char *column, const std::string &detail,
                         const std::string &hint, int sqlstate = ERRCODE_INVALID_PARAMETER_VALUE) {
    pg::raise({sqlstate,
               std::string("invalid value for column \"") + column + "\" of outbox route \"" +
                   core::clean_text(row.text("name"), kNameBytes) + "\"",
               detail, hint});
}

/// C0, DEL, and in UTF-8 C1: what would break a log line or a terminal.
bool has_control(const std::string &text) {
    const bool utf8 = GetDatabaseEncoding() == PG_UTF8;
    for (std::size_t i = 0; i < text.size(); ++i) {
        const auto byte = static_cast<unsigned char>(text[i]);
        if (byte < 0x20 || byte == 0x7f)
            return true;
        if (utf8 && byte == 0xc2 && i + 1 < text.size() && static_cast<unsigned char>(text[i + 1]) < 0xa0)
            return true;
    }
    return false;
}

void check_present(const RouteRow &row) {
    static constexpr const char *kRequired[] = {"name",
                                                "method",
                                                "enabled",
                                                "storage",
                                                "hlc_ordering",
                                                "propagate_trace",
                                                "require_transaction",
                                                "ordering",
                                                "envelope",
                                                "headers",
                                                "fail_statuses",
                                                "max_payload_bytes",
                                                "drain_on_shutdown",
                                                "tenant_isolation"};
    for (const char *column : kRequired)
        if (row.is_null(column))
            refuse(row, column, "The value is NULL.",
                   "Give a value, or leave the column out for its default.");
}

void check_name(const RouteRow &row) {
    const std::string name = row.text("name");
    if (name.empty() || name.size() > kNameBytes)
        refuse(row, "name", "The name has " + std::to_string(name.size()) + " bytes.",
               "A route's name has 1 to 63 bytes.");
    if (has_control(name))
        refuse(row, "name", "The name holds a control character.", "Use a name without control characters.");
}

/// One of `words`; those of `later` are known and not there yet.
void check_word(const RouteRow &row, const char *column, std::initializer_list<const char *> words,
                std::initializer_list<const char *> later, const char *hint) {
    const std::string value = row.text(column);
    const auto is_value = [&value](const char *word) { return value == word; };
    if (std::any_of(later.begin(), later.end(), is_value))
        refuse(row, column, "The value \"" + value + "\" is not supported by this version.", hint,
               ERRCODE_FEATURE_NOT_SUPPORTED);
    if (std::none_of(words.begin(), words.end(), is_value))
        refuse(row, column, "The value is \"" + core::clean_text(value, 100) + "\".", hint);
}

void check_method(const RouteRow &row) {
    std::string value = row.text("method");
    for (char &byte : value)
        byte = static_cast<char>(pg_ascii_toupper(static_cast<unsigned char>(byte)));
    if (value != "POST" && value != "PUT" && value != "PATCH")
        refuse(row, "method", "The value is \"" + core::clean_text(row.text("method"), 100) + "\".",
               "It is POST, PUT or PATCH.");
}

/// Exactly one of relation and relation_function; what goes by tenant needs tenants.
void check_tables(const RouteRow &row) {
    const bool by_tenant = !row.is_null("relation_function");
    if (by_tenant != row.is_null("relation"))
        refuse(row, by_tenant ? "relation_function" : "relation",
               by_tenant ? "The route has a relation as well."
                         : "The route has neither a relation nor a relation_function.",
               "A route has exactly one of relation and relation_function.");
    if (!by_tenant)
        (void)store::split_name(row.text("relation"));
    for (const char *column : {"tenants_function", "relation_function", "delivery_log_function"}) {
        if (row.is_null(column))
            continue;
        (void)store::split_name(row.text(column), store::Named::function);
        if (row.is_null("tenants_function"))
            refuse(row, column, "The route has no tenants_function.",
                   "A table that goes by tenant needs a tenants_function, which lists the tenants.");
    }
    if (!row.is_null("delivery_log_function") && !row.is_null("delivery_log"))
        refuse(row, "delivery_log_function", "The route has a delivery_log as well.",
               "A route has at most one of delivery_log and delivery_log_function.");
}

/// namespace: no table of the route may hold rows of two tenants.
void check_isolation(const RouteRow &row) {
    check_word(row, "tenant_isolation", {"none", "namespace"}, {}, "It is none or namespace.");
    if (row.text("tenant_isolation") != "namespace")
        return;
    if (row.is_null("relation_function"))
        refuse(row, "tenant_isolation", "The value is namespace, and the tenants share the route's relation.",
               "Give a relation_function, or leave tenant_isolation at none.");
    if (!row.is_null("delivery_log"))
        refuse(row, "delivery_log", "tenant_isolation is namespace, and the tenants would share this table.",
               "Give a delivery_log_function, or no log.");
}

/// Exactly one of url and target_function; and what says how a request looks goes with a url only.
void check_target(const RouteRow &row) {
    const bool local = !row.is_null("target_function");
    if (local != row.is_null("url"))
        refuse(row, local ? "target_function" : "url",
               local ? "The route has a url as well." : "The route has neither a url nor a target_function.",
               "A route has exactly one of url and target_function.");
    if (!local)
        return;
    (void)store::split_name(row.text("target_function"), store::Named::function);
    const store::Route route = store::parse_route(row);
    const store::Route standard{};
    const std::pair<const char *, bool> of_requests[] = {
        {"method", route.method != "POST"},
        {"envelope", route.cloudevents != standard.cloudevents || route.forze != standard.forze},
        {"source", !row.is_null("source")},
        {"headers", !route.headers.empty()},
        {"fail_statuses", !route.fail_statuses.empty()},
        {"ca_file", !row.is_null("ca_file")},
        {"request_timeout", !row.is_null("request_timeout")},
        {"connect_timeout", !row.is_null("connect_timeout")},
        {"concurrency", !row.is_null("concurrency")}};
    for (const auto &[column, set] : of_requests)
        if (set)
            refuse(row, column, "The route has a target_function, which is sent no request.",
                   "Leave the column at its default.");
}

void check_url(const RouteRow &row) {
    if (row.is_null("url"))
        return;
    // The value is not repeated: it may hold credentials.
    const std::string url = row.text("url");
    if (const std::optional<std::string> placeholder = core::unknown_placeholder(url))
        refuse(
            row, "url",
            placeholder->starts_with('{')
                ? "\"" + core::clean_text(*placeholder, 100) + "\" is no placeholder."
                : "The url holds " + *placeholder + ".",
            "Placeholders are {event_type}, {ordering_key}, {tenant_id}, {event_id} and {route}; any other "
            "brace is written %7B or %7D.");
    if (const std::optional<std::string> problem = http::url_problem(url))
        refuse(row, "url", "The " + *problem + ".",
               "Write an absolute http or https URL without credentials.");
}

void check_delivery_log(const RouteRow &row) {
    const char *column = row.is_null("delivery_log") ? "delivery_log_function" : "delivery_log";
    if (row.is_null(column))
        return;
    if (!row.is_null("delivery_log"))
        (void)store::split_name(row.text("delivery_log"));
    if (row.text("storage") == "retain")
        refuse(row, column, "A route with storage retain keeps its published rows in the outbox.",
               "Leave it out, or take storage consume.");
}

void check_envelope(const RouteRow &row) {
    std::set<std::string> seen;
    for (const std::optional<std::string> &family : row.texts("envelope"))
        if (!family.has_value() || (*family != "cloudevents" && *family != "forze") ||
            !seen.insert(*family).second)
            refuse(row, "envelope",
                   family.has_value()
                       ? "The element \"" + core::clean_text(*family, 100) + "\" is unknown or there twice."
                       : "An element is NULL.",
                   "It holds cloudevents, forze, both or none.");
}

void check_source(const RouteRow &row) {
    if (row.is_null("source"))
        return;
    const std::string source = row.text("source");
    if (source.empty() || has_control(source) || source.find(' ') != std::string::npos)
        refuse(row, "source", "The value is empty, or holds a space or a control character.",
               "A CloudEvents source is a URI reference, such as /shop/orders; NULL stands for "
               "/database/route.");
}

void check_headers(const RouteRow &row) {
    const auto headers = store::parse_headers(row.json("headers"));
    if (!headers.has_value())
        refuse(row, "headers", "The value is not an object of strings.",
               "Write for example {\"X-Shop\": \"north\"}.");
    std::set<std::string> seen;
    for (const auto &[name, value] : *headers) {
        const std::string shown = "\"" + core::clean_text(name, 100) + "\"";
        std::string lower = name;
        for (char &byte : lower)
            byte = static_cast<char>(pg_ascii_tolower(static_cast<unsigned char>(byte)));
        if (!core::is_header_name(name))
            refuse(row, "headers", shown + " is not a header name.",
                   "A header name holds ASCII letters, digits and !#$%&'*+-.^_`|~ only (RFC 9110).");
        if (core::is_envelope_header(name))
            refuse(row, "headers", shown + " is set by the extension itself.", "Leave that header out.");
        if (!seen.insert(lower).second)
            refuse(row, "headers", shown + " is there twice, in different case.", "Keep one of them.");
        if (value.find("{secret:") != std::string::npos)
            refuse(row, "headers", "Secrets in headers (" + shown + ") are not supported by this version.",
                   "Write the value itself.", ERRCODE_FEATURE_NOT_SUPPORTED);
        if (!core::is_header_value(value))
            refuse(row, "headers", "The value of " + shown + " can't be sent.",
                   "A header value holds visible ASCII characters and inner spaces only (RFC 9110).");
    }
}

void check_statuses(const RouteRow &row) {
    for (const std::optional<int> &status : row.integers("fail_statuses")) {
        const bool fits = status.has_value() && *status >= 100 && *status <= 599 && *status / 100 != 2;
        if (!fits)
            refuse(row, "fail_statuses",
                   status.has_value() ? "The status " + std::to_string(*status) + " can't be a failure."
                                      : "An element is NULL.",
                   "Statuses are 100 to 599, and 2xx is success.");
    }
}

void check_payload_limit(const RouteRow &row) {
    const std::int64_t bytes = row.integer("max_payload_bytes").value_or(0);
    if (bytes < 1 || bytes > kLargestPayload)
        refuse(row, "max_payload_bytes", "The value is " + std::to_string(bytes) + ".",
               "It is between 1 and " + std::to_string(kLargestPayload) + ".");
}

void check_ca_file(const RouteRow &row) {
    if (row.is_null("ca_file"))
        return;
    const std::string file = row.text("ca_file");
    if (has_control(file) || !is_absolute_path(file.c_str()))
        refuse(row, "ca_file", "The value is not an absolute path.",
               "Give the path of a PEM file on the server; NULL stands for the system's authorities.");
}

void check_tuning(const RouteRow &row, const store::TuningColumn &column) {
    if (row.is_null(column.name))
        return;
    std::int64_t value = 0;
    if (column.is_time) {
        const Interval interval = row.interval(column.name).value();
        if (interval.month != 0)
            refuse(row, column.name, "The interval has months, which have no fixed length, or is infinite.",
                   "Use days, hours, minutes, seconds or milliseconds.");
        value = store::interval_ms(interval);
    } else {
        value = row.integer(column.name).value();
    }
    if (value >= column.low && value <= column.high)
        return;
    const auto shown = [&column](std::int64_t number) {
        return column.is_time ? store::duration_text(number) : std::to_string(number);
    };
    refuse(row, column.name, "The value is " + shown(value) + ".",
           "It is between " + shown(column.low) + " and " + shown(column.high) +
               "; NULL stands for outbox_relay." + column.name + ".");
}

void check_bound_to(const RouteRow &row) {
    if (row.is_null("bound_to"))
        return;
    const std::string bound_to = row.text("bound_to");
    if (bound_to.empty() || has_control(bound_to))
        refuse(row, "bound_to", "The value is empty or holds a control character.",
               "Leave the column out to bind the route to this database.");
}

/// Two settings of which `less` must not be more than `more`.
struct Pair {
    const char *less;
    const char *more;
    std::optional<std::int64_t> store::Route::*less_column;
    std::optional<std::int64_t> store::Route::*more_column;
    std::int64_t store::Effective::*less_value;
    std::int64_t store::Effective::*more_value;
    /// Of the two limits the shorter holds, and 0 is none: only what the route itself says of both
    /// contradicts.
    bool shorter_holds;
};

} // namespace

void check_form(const RouteRow &row) {
    check_present(row);
    check_name(row);
    check_tables(row);
    check_target(row);
    check_url(row);
    check_method(row);
    check_word(row, "storage", {"consume", "retain"}, {}, "It is consume or retain.");
    check_delivery_log(row);
    check_isolation(row);
    check_word(row, "ordering", {"none", "key"}, {"fifo", "strict"}, "It is none or key.");
    check_envelope(row);
    check_source(row);
    check_headers(row);
    check_statuses(row);
    check_payload_limit(row);
    check_ca_file(row);
    check_bound_to(row);
    for (const store::TuningColumn &column : store::tuning_columns())
        check_tuning(row, column);
}

void check_contradictions(const store::Route &route, bool whole) {
    using R = store::Route;
    using E = store::Effective;
    static constexpr Pair kPairs[] = {
        {"retry_base_delay", "retry_max_backoff", &R::retry_base_delay_ms, &R::retry_max_backoff_ms,
         &E::retry_base_delay_ms, &E::retry_max_backoff_ms, false},
        {"connect_timeout", "request_timeout", &R::connect_timeout_ms, &R::request_timeout_ms,
         &E::connect_timeout_ms, &E::request_timeout_ms, true},
    };
    const store::Effective values = store::effective(route);
    for (const Pair &pair : kPairs) {
        const bool less_own = (route.*pair.less_column).has_value();
        const bool more_own = (route.*pair.more_column).has_value();
        const std::int64_t less = values.*pair.less_value;
        const std::int64_t more = values.*pair.more_value;
        const bool judged = whole && !pair.shorter_holds ? less_own || more_own : less_own && more_own;
        if (!judged || less <= more || (pair.shorter_holds && more == 0))
            continue;
        const auto origin = [](bool own) { return own ? "of the route" : "of the configuration"; };
        pg::raise({ERRCODE_INVALID_PARAMETER_VALUE,
                   std::string("contradictory settings of outbox route \"") + route.name + "\"",
                   std::string(pair.less) + " is " + store::duration_text(less) + " (" + origin(less_own) +
                       "), " + pair.more + " is " + store::duration_text(more) + " (" + origin(more_own) +
                       ").",
                   std::string("Make ") + pair.less + " no longer than " + pair.more + "."});
    }
}

} // namespace outbox_relay::api
