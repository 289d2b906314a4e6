#include "http/url.hpp"

#include <curl/curl.h>

#include <algorithm>
#include <cstdlib>
#include <memory>
#include <new>

#include "core/no_postgres.hpp"

namespace outbox_relay::http {

namespace {

/// Reserved, unreserved and '%' (RFC 3986, section 2), and the braces of placeholders.
constexpr std::string_view kPunctuation = "-._~:/?#[]@!$&'()*+,;=%{}";

struct UrlCleanup {
    void operator()(CURLU *url) const { curl_url_cleanup(url); }
};
using ParsedUrl = std::unique_ptr<CURLU, UrlCleanup>;

bool is_url_character(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') ||
           kPunctuation.find(c) != std::string_view::npos;
}

bool is_hex(char c) {
    return (c >= '0' && c <= '9') || (c >= 'a' && c <= 'f') || (c >= 'A' && c <= 'F');
}

bool has_broken_escape(std::string_view url) {
    for (std::size_t at = url.find('%'); at != std::string_view::npos; at = url.find('%', at + 1))
        if (at + 2 >= url.size() || !is_hex(url[at + 1]) || !is_hex(url[at + 2]))
            return true;
    return false;
}

/// Scheme, host and port: everything before the path, the query or the fragment.
std::string_view head_of(std::string_view url) {
    const std::size_t slashes = url.find("://");
    if (slashes == std::string_view::npos)
        return url;
    return url.substr(0, url.find_first_of("/?#", slashes + 3));
}

/// `url` with each {placeholder} as one letter; nothing when a brace has no partner.
std::optional<std::string> without_placeholders(std::string_view url) {
    std::string plain;
    while (!url.empty()) {
        const std::size_t open = url.find_first_of("{}");
        plain += url.substr(0, open);
        if (open == std::string_view::npos)
            break;
        const std::size_t close = url.find_first_of("{}", open + 1);
        if (url[open] == '}' || close == std::string_view::npos || url[close] == '{' || close == open + 1)
            return std::nullopt;
        plain += 'x';
        url.remove_prefix(close + 1);
    }
    return plain;
}

std::string part_of(const ParsedUrl &parsed, CURLUPart part) {
    char *text = nullptr;
    if (curl_url_get(parsed.get(), part, &text, 0) != CURLUE_OK)
        return {};
    const std::unique_ptr<char, decltype(&curl_free)> owned(text, curl_free);
    return text;
}

/// What is wrong with the text of `url`, before anything parses it.
std::optional<std::string> spelling_problem(std::string_view url) {
    const auto odd = std::find_if_not(url.begin(), url.end(), is_url_character);
    if (odd != url.end()) {
        if (static_cast<unsigned char>(*odd) <= 0x20 || *odd == 0x7f)
            return "url holds a space or control character";
        return "url holds a character that has to be percent-encoded";
    }
    if (has_broken_escape(url))
        return "url holds a '%' that no two hexadecimal digits follow";
    if (url.find('#') != std::string_view::npos)
        return "url holds a fragment (#)";
    return std::nullopt;
}

/// What is wrong with scheme, host and port as they are written. libcurl is laxer in some: it takes
/// http:host and http:///host.
std::optional<std::string> head_problem(std::string_view head) {
    const std::size_t slashes = head.find("://");
    if (slashes == std::string_view::npos)
        return "url has to begin with http:// or https://";
    const std::string_view authority = head.substr(slashes + 3);
    if (authority.empty() || authority.front() == ':')
        return "url has no host";
    if (authority.find('@') != std::string_view::npos)
        return "url holds a user name or password";
    if (head.find_first_of("{}") != std::string_view::npos)
        return "url holds a placeholder in its scheme, host or port";
    if (authority.back() == ':')
        return "url has no port behind its colon";
    return std::nullopt;
}

std::optional<std::string> parse(const std::string &url, ParsedUrl &parsed) {
    parsed.reset(curl_url());
    if (parsed == nullptr)
        throw std::bad_alloc();
    const CURLUcode code = curl_url_set(parsed.get(), CURLUPART_URL, url.c_str(),
                                        CURLU_DISALLOW_USER | CURLU_NON_SUPPORT_SCHEME);
    if (code == CURLUE_OUT_OF_MEMORY)
        throw std::bad_alloc();
    if (code != CURLUE_OK)
        return std::string("url can't be parsed: ") + curl_url_strerror(code);
    const std::string scheme = part_of(parsed, CURLUPART_SCHEME);
    if (scheme != "http" && scheme != "https")
        return "url has to begin with http:// or https://";
    if (part_of(parsed, CURLUPART_HOST).empty())
        return "url has no host";
    const std::string port = part_of(parsed, CURLUPART_PORT);
    if (!port.empty() && std::atoi(port.c_str()) == 0)
        return "url has no valid port";
    return std::nullopt;
}

std::optional<std::string> examine(std::string_view url, ParsedUrl &parsed) {
    if (auto problem = spelling_problem(url))
        return problem;
    if (auto problem = head_problem(head_of(url)))
        return problem;
    const auto plain = without_placeholders(url);
    if (!plain)
        return "url holds a brace that belongs to no placeholder";
    return parse(*plain, parsed);
}

} // namespace

std::optional<std::string> url_problem(std::string_view url) {
    ParsedUrl parsed;
    return examine(url, parsed);
}

std::string url_origin(std::string_view url) {
    ParsedUrl parsed;
    if (examine(url, parsed))
        return {};
    const std::string port = part_of(parsed, CURLUPART_PORT);
    const std::string origin = part_of(parsed, CURLUPART_SCHEME) + "://" + part_of(parsed, CURLUPART_HOST);
    return port.empty() ? origin : origin + ":" + port;
}

} // namespace outbox_relay::http
