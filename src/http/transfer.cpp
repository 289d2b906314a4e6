#include "http/transfer.hpp"

#include "http/curl_transport.hpp"
#include "http/failure.hpp"

#include <algorithm>
#include <cstdio>
#include <new>
#include <stdexcept>
#include <string_view>
#include <utility>

#include "core/no_postgres.hpp"

namespace outbox_relay::http {

namespace {

/// Small: responses are short, and a buffer of this size lies in every kept handle.
constexpr long kReceiveBufferBytes = 4096;

/// Kept connections that were idle for longer are not used again. Servers and middleboxes drop idle
/// ones, and libcurl sends a request a second time when a kept connection turns out to be dead.
constexpr long kMaxIdleSeconds = 15;

/// Trust anchors are kept parsed for so long, and read again after that.
constexpr long kCaCacheSeconds = 60;

/// Headers that libcurl would add by itself; a name without a value takes them away. `Expect` would
/// let an endpoint answer before it has the body (and costs a second where it is ignored).
constexpr const char *kSuppressed[] = {"Expect:", "Accept:", "Content-Type:"};

bool has_control_character(std::string_view line) {
    return std::any_of(line.begin(), line.end(), [](char c) {
        const auto byte = static_cast<unsigned char>(c);
        return (byte < 0x20 && byte != '\t') || byte == 0x7f;
    });
}

/// "Name:" with nothing behind would take the header away; libcurl spells an empty one "Name;".
void spell_empty_value(std::string &line) {
    const std::size_t colon = line.find(':');
    if (colon == std::string::npos || line.find_first_not_of(" \t", colon + 1) != std::string::npos)
        return;
    line.resize(colon);
    line += ';';
}

template <typename Value>
Value info(CURL *handle, CURLINFO what) {
    Value value{};
    curl_easy_getinfo(handle, what, &value);
    return value;
}

} // namespace

Transfer::Transfer(const TransportSettings &settings) : handle_(curl_easy_init()) {
    if (handle_ == nullptr)
        throw std::bad_alloc();
    set_library_options(settings);
    set_security_options(settings);
    set_callbacks();
}

template <typename Value>
void Transfer::set(CURLoption option, Value value) {
    const CURLcode code = curl_easy_setopt(handle_.get(), option, value);
    if (code == CURLE_OUT_OF_MEMORY)
        throw std::bad_alloc();
    if (code != CURLE_OK)
        throw std::runtime_error("libcurl refused option " + std::to_string(option) + ": " +
                                 curl_easy_strerror(code));
}

void Transfer::set_library_options(const TransportSettings &settings) {
    set(CURLOPT_NOSIGNAL, 1L);
#if LIBCURL_VERSION_NUM >= 0x075700
    // A resolver thread that hangs is left behind, not waited for.
    set(CURLOPT_QUICK_EXIT, 1L);
#endif
    set(CURLOPT_BUFFERSIZE, kReceiveBufferBytes);
    set(CURLOPT_TCP_NODELAY, 1L);
    set(CURLOPT_MAXAGE_CONN, kMaxIdleSeconds);
    set(CURLOPT_NOPROGRESS, 1L);
    set(CURLOPT_HTTP_VERSION,
        static_cast<long>(settings.http1_only ? CURL_HTTP_VERSION_1_1 : CURL_HTTP_VERSION_2TLS));
    set(CURLOPT_ERRORBUFFER, error_);
    set(CURLOPT_PRIVATE, this);
}

void Transfer::set_security_options(const TransportSettings &settings) {
    set(CURLOPT_PROTOCOLS_STR, "http,https");
    set(CURLOPT_REDIR_PROTOCOLS_STR, "http,https");
    set(CURLOPT_FOLLOWLOCATION, 0L);
    set(CURLOPT_UNRESTRICTED_AUTH, 0L);
    set(CURLOPT_HTTP09_ALLOWED, 0L);
    // The server's environment and home directory have no say in where events go.
    set(CURLOPT_PROXY, "");
    set(CURLOPT_NOPROXY, "*");
    set(CURLOPT_NETRC, static_cast<long>(CURL_NETRC_IGNORED));
    set(CURLOPT_DISALLOW_USERNAME_IN_URL, 1L);
    set(CURLOPT_SSL_VERIFYPEER, 1L);
    set(CURLOPT_SSL_VERIFYHOST, 2L);
    set(CURLOPT_SSLVERSION, static_cast<long>(CURL_SSLVERSION_TLSv1_2));
    if (!settings.ca_file.empty()) {
        set(CURLOPT_CAINFO, settings.ca_file.c_str());
        set(CURLOPT_CAPATH, static_cast<const char *>(nullptr)); // else the system's are trusted as well
    }
#if LIBCURL_VERSION_NUM >= 0x075700
    set(CURLOPT_CA_CACHE_TIMEOUT, kCaCacheSeconds);
#endif
}

void Transfer::set_callbacks() {
    set(CURLOPT_HEADERFUNCTION, &Transfer::on_header);
    set(CURLOPT_HEADERDATA, this);
    set(CURLOPT_WRITEFUNCTION, &Transfer::on_body);
    set(CURLOPT_WRITEDATA, this);
    set(CURLOPT_PREREQFUNCTION, &Transfer::on_connected);
    set(CURLOPT_PREREQDATA, this);
}

std::optional<std::string> Transfer::prepare(std::uint64_t ticket, core::Request request,
                                             const core::RequestLimits &limits) {
    ticket_ = ticket;
    limits_ = limits;
    request_ = std::move(request);
    started_us_ = steady_us();
    body_awaited_from = 0;
    request_begun_ = false;
    answer_.restart();
    error_[0] = '\0';
    if (auto problem = link_headers())
        return problem;
    set(CURLOPT_URL, request_.url.c_str());
    set(CURLOPT_HTTPHEADER, header_list_.data());
    set(CURLOPT_POSTFIELDS, request_.body.data());
    set(CURLOPT_POSTFIELDSIZE_LARGE, static_cast<curl_off_t>(request_.body.size()));
    if (method_ != request_.method) {
        // The handle's own method stays POST, which sends a body of known length; this is its name.
        set(CURLOPT_CUSTOMREQUEST, request_.method.c_str());
        method_ = request_.method;
    }
    // limits.timeout_ms is the transport's: libcurl would end a request whose answer waits in the socket.
    set(CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(limits.connect_timeout_ms));
    return std::nullopt;
}

std::optional<std::string> Transfer::link_headers() {
    header_list_.clear();
    header_list_.reserve(request_.headers.size() + std::size(kSuppressed));
    for (std::string &line : request_.headers) {
        if (has_control_character(line))
            return "a header line holds a control character";
        spell_empty_value(line);
        header_list_.push_back({line.data(), nullptr});
    }
    for (const char *line : kSuppressed)
        header_list_.push_back({const_cast<char *>(line), nullptr});
    for (std::size_t i = 1; i < header_list_.size(); ++i)
        header_list_[i - 1].next = &header_list_[i];
    return std::nullopt;
}

bool Transfer::is_uploaded() const {
    return request_begun_ && info<curl_off_t>(handle(), CURLINFO_SIZE_UPLOAD_T) ==
                                 static_cast<curl_off_t>(request_.body.size());
}

bool Transfer::is_answered() const {
    return answer_.header_complete() && (!answer_.is_success() || is_uploaded());
}

core::Reply Transfer::reply() const {
    core::Reply reply;
    reply.ticket = ticket_;
    reply.nothing_sent = !request_begun_;
    reply.header_complete = answer_.header_complete();
    reply.uploaded = is_uploaded();
    reply.status = answer_.status();
    reply.retry_after = answer_.retry_after();
    reply.excerpt = answer_.excerpt();
    reply.latency_us = steady_us() - started_us_;
    reply.body_bytes = static_cast<std::int64_t>(request_.body.size());
    return reply;
}

void Transfer::release() {
    request_ = core::Request();
}

core::Reply Transfer::finish(CURLcode code) {
    core::Reply result = reply();
    if (code != CURLE_OK && !is_answered()) {
        Progress progress;
        progress.resolved = info<curl_off_t>(handle(), CURLINFO_NAMELOOKUP_TIME_T) > 0;
        progress.connected = info<curl_off_t>(handle(), CURLINFO_CONNECT_TIME_T) > 0;
        progress.request_begun = request_begun_;
        result.failure = classify(code, progress);
        if (answer_.problem() != nullptr)
            result.detail = answer_.problem();
        else
            result.detail = error_[0] != '\0' ? error_ : curl_easy_strerror(code);
    }
    release();
    return result;
}

core::Reply Transfer::give_up() {
    core::Reply result = reply();
    if (!is_answered()) {
        result.failure = core::Failure::cancelled;
        result.detail = "given up before an answer";
    }
    release();
    return result;
}

core::Reply Transfer::time_out() {
    (void)std::snprintf(error_, sizeof(error_), "Operation timed out after %lld milliseconds",
                        static_cast<long long>(limits_.timeout_ms));
    return finish(CURLE_OPERATION_TIMEDOUT);
}

std::int64_t Transfer::ends_us(std::int64_t deaf_until_now_us) const {
    if (limits_.timeout_ms <= 0)
        return INT64_MAX;
    return started_us_ + limits_.timeout_ms * 1000 + deaf_until_now_us - deaf_us;
}

void Transfer::excuse(std::int64_t deaf_until_now_us) {
    if (request_begun_ || limits_.connect_timeout_ms <= 0)
        return;
    const std::int64_t excused_ms = (deaf_until_now_us - deaf_us) / 1000;
    set(CURLOPT_CONNECTTIMEOUT_MS, static_cast<long>(limits_.connect_timeout_ms + excused_ms));
}

core::Reply Transfer::refuse(std::string problem, core::Failure failure) {
    core::Reply result = reply();
    result.failure = failure;
    result.detail = std::move(problem);
    release();
    return result;
}

Transfer &Transfer::of(CURL *handle) {
    return *static_cast<Transfer *>(info<void *>(handle, CURLINFO_PRIVATE));
}

std::size_t Transfer::on_header(char *data, std::size_t size, std::size_t count, void *self) noexcept {
    auto &transfer = *static_cast<Transfer *>(self);
    return transfer.answer_.take_header_line({data, size * count}) ? size * count : 0;
}

std::size_t Transfer::on_body(char *data, std::size_t size, std::size_t count, void *self) noexcept {
    auto &transfer = *static_cast<Transfer *>(self);
    Answer &answer = transfer.answer_;
    answer.take_body({data, size * count});
    if (answer.body_bytes() <= kMaxBodyBytes)
        return size * count;
    // An endpoint that sends our body back while it is still coming in is given its way.
    if (!transfer.is_answered() && answer.body_bytes() <= kMaxBodyBytes + 4 * transfer.request_.body.size())
        return size * count;
    answer.stop("the response's body is longer than what is read of it");
    return 0;
}

/// Called when a connection stands, before the first byte of the request; once more when a kept
/// connection was dead and libcurl takes another one.
int Transfer::on_connected(void *self, char *, char *, int, int) noexcept {
    auto &transfer = *static_cast<Transfer *>(self);
    transfer.request_begun_ = true;
    transfer.answer_.restart();
    return CURL_PREREQFUNC_OK;
}

} // namespace outbox_relay::http
