#pragma once

#include "core/row.hpp"
#include "core/transport.hpp"

#include <string>
#include <string_view>
#include <utility>
#include <variant>
#include <vector>

namespace outbox_relay::core {

/// How the rows of a route become requests (`format = binary`).
struct EnvelopeSettings {
    std::string route;
    std::string url;
    std::string method = "POST";
    std::string source; ///< CloudEvents source, never empty here
    bool cloudevents = true;
    bool forze = true;
    bool hlc = false;   ///< send ce-hlc and forze_hlc when the row has one
    bool trace = false; ///< send traceparent when the row has a valid one
    std::vector<std::pair<std::string, std::string>> headers; ///< the route's own
    std::string user_agent;                                   ///< "outbox_relay/VERSION"
};

/// Why a row can't become a request; the row is parked with this.
struct NotEncodable {
    std::string reason;
};

/// The request that `row` with the rendered `payload` becomes, or why it can't be one. Header set
/// and encoding: spec.md section 6; CloudEvents 1.0 HTTP binding, binary mode. Values of both
/// families are percent-encoded alike.
std::variant<Request, NotEncodable> build_request(const EnvelopeSettings &settings, const Row &row,
                                                  std::string payload);

/// True for a header name that only the envelope may set (case-insensitive): ce-*, forze_*,
/// webhook-*, content-type, content-length, host, idempotency-key, user-agent, traceparent,
/// transfer-encoding, connection, expect, ...
bool is_envelope_header(std::string_view name);

} // namespace outbox_relay::core
