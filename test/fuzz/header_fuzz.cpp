/// Whatever a row holds: an encoded header value is a header value, and decodes to what it was.

#include "core/header.hpp"
#include "property.hpp"

#include <cstdint>
#include <string>

using namespace outbox_relay::core;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    const std::string bytes(reinterpret_cast<const char *>(data), size);
    const std::string encoded = encode_header_value(bytes);
    EXPECT_PROPERTY(is_header_value(encoded));
    std::string decoded;
    for (std::size_t at = 0; at < encoded.size(); ++at) {
        if (encoded[at] != '%') {
            decoded.push_back(encoded[at]);
            continue;
        }
        decoded.push_back(static_cast<char>(std::stoi(encoded.substr(at + 1, 2), nullptr, 16)));
        at += 2;
    }
    EXPECT_PROPERTY(decoded == bytes);
    (void)is_header_name(bytes);
    (void)is_traceparent(bytes);
    return 0;
}
