#pragma once

#include "core/transport.hpp"
#include "http/answer.hpp"

#include <curl/curl.h>

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace outbox_relay::http {

struct TransportSettings;

/// Steady time in microseconds.
inline std::int64_t steady_us() {
    using namespace std::chrono;
    return duration_cast<microseconds>(steady_clock::now().time_since_epoch()).count();
}

/// An easy handle and the exchange that it carries. The handle keeps the options that all requests
/// share and is used for one request after the other. Its address is given to libcurl: it does not
/// move. While it is in a multi handle it must neither be prepared nor destroyed.
class Transfer {
  public:
    /// Of the response's body so much is read to be able to keep the connection; what is longer costs
    /// the connection.
    static constexpr std::size_t kMaxBodyBytes = 64 * 1024;

    /// Throws std::runtime_error when libcurl lacks an option, std::bad_alloc.
    explicit Transfer(const TransportSettings &settings);
    Transfer(const Transfer &) = delete;
    Transfer &operator=(const Transfer &) = delete;

    /// Sets the handle up for this request and keeps it until finish(). Gives why it can't be sent:
    /// a header line with a control character, which would smuggle in another header.
    std::optional<std::string> prepare(std::uint64_t ticket, core::Request request,
                                       const core::RequestLimits &limits);

    /// Reads off what became of the request and lets it go. `code` is what libcurl said; it does not
    /// matter once the answer is complete in the sense of is_answered().
    core::Reply finish(CURLcode code);

    /// As finish(), for an exchange that we end ourselves.
    core::Reply give_up();

    /// As finish(), for an exchange whose time ran out.
    core::Reply time_out();

    /// As finish(), for a request that never reached libcurl.
    core::Reply refuse(std::string problem, core::Failure failure = core::Failure::blocked);

    /// A final header block arrived whole, and nothing more can change what it says: it is not a
    /// success, or the whole request was sent.
    bool is_answered() const;
    bool header_complete() const { return answer_.header_complete(); }

    /// When its time runs out, steady, by a transport that has been deaf for so long in all; INT64_MAX:
    /// never.
    std::int64_t ends_us(std::int64_t deaf_until_now_us) const;

    /// Tells libcurl how much of the time to connect must not count: it looks at its clock before it looks at
    /// its sockets.
    void excuse(std::int64_t deaf_until_now_us);

    CURL *handle() const { return handle_.get(); }
    static Transfer &of(CURL *handle);

    std::size_t slot = 0;               ///< its place among the active transfers
    std::int64_t body_awaited_from = 0; ///< steady time, 0: not awaited yet
    std::int64_t deaf_us = 0;           ///< how long its transport had been deaf in all when it began

  private:
    struct Cleanup {
        void operator()(CURL *handle) const { curl_easy_cleanup(handle); }
    };

    template <typename Value>
    void set(CURLoption option, Value value);
    void set_library_options(const TransportSettings &settings);
    void set_security_options(const TransportSettings &settings);
    void set_callbacks();
    std::optional<std::string> link_headers();
    bool is_uploaded() const;
    core::Reply reply() const;
    void release();

    static std::size_t on_header(char *data, std::size_t size, std::size_t count, void *self) noexcept;
    static std::size_t on_body(char *data, std::size_t size, std::size_t count, void *self) noexcept;
    static int on_connected(void *self, char *, char *, int, int) noexcept;

    std::unique_ptr<CURL, Cleanup> handle_;
    core::Request request_;
    std::vector<curl_slist> header_list_; ///< nodes into request_.headers: libcurl only reads them
    std::string method_;                  ///< that the handle is set to
    std::uint64_t ticket_ = 0;
    core::RequestLimits limits_;
    std::int64_t started_us_ = 0;
    bool request_begun_ = false;
    Answer answer_;
    char error_[CURL_ERROR_SIZE] = "";
};

} // namespace outbox_relay::http
