/// Whatever an endpoint answers: last_error is valid UTF-8, without controls, bounded, and cleaning it again
/// changes nothing.

#include "core/text.hpp"
#include "property.hpp"

#include <algorithm>
#include <cstdint>

using namespace outbox_relay::core;

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t *data, std::size_t size) {
    if (size == 0)
        return 0;
    const std::size_t max = data[0];
    const std::string_view bytes(reinterpret_cast<const char *>(data) + 1, size - 1);
    const std::string clean = clean_text(bytes, max);
    EXPECT_PROPERTY(clean.size() <= max);
    EXPECT_PROPERTY(is_utf8(clean));
    EXPECT_PROPERTY(clean_text(clean, max) == clean);
    EXPECT_PROPERTY(std::none_of(clean.begin(), clean.end(), [](char c) {
        const auto byte = static_cast<unsigned char>(c);
        return byte < 0x20 || byte == 0x7f;
    }));
    return 0;
}
