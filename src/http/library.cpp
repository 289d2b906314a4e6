#include "http/library.hpp"

#include <curl/curl.h>

#include <stdexcept>
#include <string_view>

#include "core/no_postgres.hpp"

namespace outbox_relay::http {

namespace {

constexpr unsigned kOldestVersion = 0x075500; // 7.85.0

bool speaks(const curl_version_info_data &info, std::string_view scheme) {
    for (const char *const *name = info.protocols; *name != nullptr; ++name)
        if (*name == scheme)
            return true;
    return false;
}

} // namespace

std::string library_version() {
    return curl_version();
}

std::optional<std::string> library_problem() {
    const curl_version_info_data &info = *curl_version_info(CURLVERSION_NOW);
    const std::string which = "libcurl " + std::string(info.version);
    if (info.version_num < kOldestVersion)
        return which + " is too old: 7.85 or newer is needed";
    if ((info.features & CURL_VERSION_ASYNCHDNS) == 0)
        return which + " was built without an asynchronous resolver (AsynchDNS)";
    if (!speaks(info, "http") || !speaks(info, "https"))
        return which + " was built without http or https";
    return std::nullopt;
}

void initialise_library() {
    static const CURLcode initialised = curl_global_init(CURL_GLOBAL_DEFAULT);
    if (initialised != CURLE_OK)
        throw std::runtime_error(std::string("libcurl could not be initialised: ") +
                                 curl_easy_strerror(initialised));
    if (const auto problem = library_problem())
        throw std::runtime_error(*problem);
}

} // namespace outbox_relay::http
