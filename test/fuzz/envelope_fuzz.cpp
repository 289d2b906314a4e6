/// Whatever a row and a url template hold: no header line can be split, and a filled url has the template's
/// origin and as many path segments as the template.

#include "core/envelope.hpp"
#include "core/url_template.hpp"
#include "http/url.hpp"
#include "property.hpp"

#include <algorithm>
#include <cstdint>

using namespace outbox_relay::core;

namespace {

/// Takes the input apart into pieces of up to 255 bytes.
class Pieces {
  public:
    Pieces(const std::uint8_t *data, std::size_t size) : rest_(reinterpret_cast<const char *>(data), size) {}

    std::string next() {
        if (rest_.empty())
            return {};
        const std::size_t size =
            std::min<std::size_t>(static_cast<unsigned char>(rest_.front()), rest_.size() - 1);
        std::string piece(rest_.substr(1, size));
        rest_.remove_prefix(1 + size);
        return piece;
    }

  private:
    std::string_view rest_;
};

} // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    Pieces pieces(data, size);
    EnvelopeSettings settings;
    settings.route = pieces.next();
    settings.source = "/" + pieces.next();
    settings.user_agent = "test";
    settings.url = "http://endpoint/{event_type}/{ordering_key}/{route}";
    settings.trace = true;
    Row row;
    row.event_type = pieces.next();
    row.ordering_key = pieces.next();
    row.traceparent = pieces.next();
    row.occurred_at_us = static_cast<std::int64_t>(size) << (size % 40);

    const auto built = build_request(settings, row, pieces.next());
    if (const auto *request = std::get_if<Request>(&built)) {
        for (const std::string &line : request->headers)
            EXPECT_PROPERTY(line.find_first_of(std::string("\r\n\0", 3)) == std::string::npos);
        EXPECT_PROPERTY(request->url.rfind("http://endpoint/", 0) == 0);
        EXPECT_PROPERTY(std::count(request->url.begin(), request->url.end(), '/') == 5);
        EXPECT_PROPERTY(request->url.find_first_of("?#{} \r\n") == std::string::npos);
    }
    const std::string url = pieces.next();
    (void)unknown_placeholder(url);
    if (!outbox_relay::http::url_problem(url))
        EXPECT_PROPERTY(url.rfind("http", 0) == 0 || url.rfind("HTTP", 0) == 0 ||
                        url.find("://") != std::string::npos);
    return 0;
}
