#include "core/envelope.hpp"

#include <algorithm>
#include <array>
#include <cctype>

#include "core/header.hpp"
#include "core/hlc.hpp"
#include "core/timestamp.hpp"
#include "core/url_template.hpp"

#include "core/no_postgres.hpp"

namespace outbox_relay::core {

namespace {

/// Longer values are refused: endpoints and proxies bound a header at 8 kB and answer with nonsense.
constexpr std::size_t kMaxHeaderValue_bytes = 8192;
constexpr std::size_t kHeaders = 32;

/// Collects header lines; remembers the first value that can't be one.
class Lines {
  public:
    explicit Lines(std::vector<std::string> &lines) : lines_(lines) { lines_.reserve(kHeaders); }

    /// A value that is known to be fit as it is.
    void add(std::string_view name, std::string_view value) {
        std::string line;
        line.reserve(name.size() + 2 + value.size());
        line.append(name).append(": ").append(value);
        lines_.push_back(std::move(line));
    }

    /// A value from a row or a route.
    void add_encoded(std::string_view name, std::string_view value) {
        const std::string encoded = encode_header_value(value);
        if (encoded.size() > kMaxHeaderValue_bytes && problem_.empty())
            problem_ = "header " + std::string(name) + " would be longer than " +
                       std::to_string(kMaxHeaderValue_bytes) + " bytes";
        add(name, encoded);
    }

    void add_if(std::string_view name, const std::optional<Uuid> &value) {
        if (value)
            add(name, value->text());
    }

    const std::string &problem() const { return problem_; }

  private:
    std::vector<std::string> &lines_;
    std::string problem_;
};

bool has_hlc(const EnvelopeSettings &settings, const Row &row) {
    return settings.hlc && row.hlc && *row.hlc >= 0;
}

void add_cloudevents(const EnvelopeSettings &settings, const Row &row, const std::string &id,
                     const std::string &key, Lines &lines) {
    lines.add("ce-specversion", "1.0");
    lines.add("ce-id", id);
    lines.add_encoded("ce-type", row.event_type);
    lines.add_encoded("ce-source", settings.source);
    lines.add("ce-time", rfc3339(*row.occurred_at_us));
    lines.add_encoded("ce-partitionkey", key);
    lines.add_if("ce-correlationid", row.correlation_id);
    lines.add_if("ce-causationid", row.causation_id);
    lines.add_if("ce-tenantid", row.tenant_id);
    lines.add_if("ce-executionid", row.execution_id);
    if (has_hlc(settings, row))
        lines.add("ce-hlc", hlc::text(*row.hlc));
}

void add_forze(const EnvelopeSettings &settings, const Row &row, const std::string &id,
               const std::string &key, Lines &lines) {
    lines.add("forze_event_id", id);
    lines.add_encoded("forze_event_type", row.event_type);
    lines.add_encoded("forze_key", key);
    lines.add("forze_occurred_at", iso8601(*row.occurred_at_us));
    lines.add_if("forze_correlation_id", row.correlation_id);
    lines.add_if("forze_causation_id", row.causation_id);
    lines.add_if("forze_execution_id", row.execution_id);
    lines.add_if("forze_tenant_id", row.tenant_id);
    if (has_hlc(settings, row))
        lines.add("forze_hlc", hlc::text(*row.hlc));
}

/// Why the row can't be sent whatever its target; empty when it can.
std::string problem_of(const Row &row) {
    if (!row.problem.empty())
        return row.problem;
    if (row.event_type.empty())
        return "event_type is empty";
    if (!row.occurred_at_us)
        return "occurred_at is infinite";
    if (!fits_rfc3339(*row.occurred_at_us))
        return "occurred_at is outside of the years 1 to 9999";
    return {};
}

bool starts_with(std::string_view text, std::string_view prefix) {
    return text.substr(0, prefix.size()) == prefix;
}

} // namespace

bool is_envelope_header(std::string_view name) {
    static constexpr std::array<std::string_view, 14> kOurs = {
        "content-type", "content-length", "content-encoding",  "host",       "idempotency-key", "user-agent",
        "traceparent",  "tracestate",     "transfer-encoding", "connection", "expect",          "upgrade",
        "te",           "trailer"};
    std::string lower(name);
    std::transform(lower.begin(), lower.end(), lower.begin(),
                   [](char c) { return static_cast<char>(std::tolower(static_cast<unsigned char>(c))); });
    return starts_with(lower, "ce-") || starts_with(lower, "forze_") || starts_with(lower, "webhook-") ||
           std::find(kOurs.begin(), kOurs.end(), lower) != kOurs.end();
}

std::variant<Request, NotEncodable> build_request(const EnvelopeSettings &settings, const Row &row,
                                                  std::string payload) {
    std::string problem = problem_of(row);
    if (!problem.empty())
        return NotEncodable{std::move(problem)};

    Request request;
    request.method = settings.method;
    request.url = settings.url;
    if (has_placeholders(settings.url)) {
        std::optional<std::string> filled = fill_url(settings.url, settings.route, row);
        if (!filled)
            return NotEncodable{
                "the row lacks a value for a placeholder of the url, or it is empty or only dots"};
        request.url = std::move(*filled);
    }

    const std::string id = row.event_id.text();
    const std::string &key = row.ordering_key && !row.ordering_key->empty() ? *row.ordering_key : id;
    Lines lines(request.headers);
    lines.add("Content-Type", "application/json");
    lines.add("Idempotency-Key", id);
    lines.add("User-Agent", settings.user_agent);
    if (settings.cloudevents)
        add_cloudevents(settings, row, id, key, lines);
    if (settings.forze)
        add_forze(settings, row, id, key, lines);
    if (settings.trace && row.traceparent && is_traceparent(*row.traceparent))
        lines.add("traceparent", *row.traceparent);
    for (const auto &[name, value] : settings.headers)
        lines.add(name, value);
    if (!lines.problem().empty())
        return NotEncodable{lines.problem()};
    request.body = std::move(payload);
    return request;
}

} // namespace outbox_relay::core
