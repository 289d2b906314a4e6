#pragma once

#include "core/transport.hpp"
#include "http/transfer.hpp"

#include <curl/curl.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace outbox_relay::http {

/// What a transport is built for; it does not change during its life.
struct TransportSettings {
    int max_connections = 32; ///< kept connections and handles; the caller's requests in flight at most
    std::string ca_file;      ///< PEM file of the only trust anchors; empty: the system's
    bool http1_only = true;   ///< false: HTTP/2 where TLS agrees on it
};

/// core::Transport by libcurl's multi interface: perform and poll in the calling thread. Connections
/// and handles are kept from pass to pass, so there is one transport per lane and version of its
/// settings: no connection is shared between targets with other trust.
///
/// Time in which nobody listened, since the caller was busy between two calls of poll(), counts against no
/// request: what has arrived meanwhile is an answer, however late it is read.
///
/// Memory in use is bounded by the requests in flight, whatever endpoints send. All signals are
/// blocked while libcurl may start a resolver thread, and open while it waits.
class CurlTransport final : public core::Transport {
  public:
    /// Initialises libcurl in this process when nobody has yet. Throws std::runtime_error when the
    /// library can't be used, std::bad_alloc.
    explicit CurlTransport(TransportSettings settings);
    ~CurlTransport() override;
    CurlTransport(const CurlTransport &) = delete;
    CurlTransport &operator=(const CurlTransport &) = delete;

    /// Limits of 0: no limit of time, and libcurl's own for connecting (five minutes). What can't be
    /// sent at all comes back as Failure::blocked.
    void start(std::uint64_t ticket, core::Request request, const core::RequestLimits &limits) override;

    /// Returns early on a signal, and at once when nothing is in flight. Throws std::runtime_error
    /// when libcurl reports a bug or a lack of resources in itself.
    void poll(int max_wait_ms, std::vector<core::Reply> &replies) override;

    /// Takes in what has already arrived, then ends the rest. Never waits.
    void cancel(std::vector<core::Reply> &replies) override;

    /// Requests whose Reply has not been handed out yet.
    std::size_t in_flight() const override { return active_.size() + refused_.size(); }

    /// True when nothing was in flight for `max_idle_ms`: time for drop_idle().
    bool is_idle_too_long(std::int64_t max_idle_ms) const;

    /// Closes the kept connections, frees the kept handles and forgets what names resolved to; what is in
    /// flight is not touched, and then nothing is closed.
    void drop_idle();

    /// Connections that may be open now, at most.
    std::size_t connections_open() const;

    /// Connections made since the transport was built: requests minus this were on kept ones.
    std::uint64_t connections_made() const { return connections_made_; }

  private:
    struct Cleanup {
        void operator()(CURLM *multi) const { curl_multi_cleanup(multi); }
    };

    void open();
    std::unique_ptr<Transfer> take_handle();
    std::unique_ptr<Transfer> deactivate(Transfer &transfer);
    void keep_handle(std::unique_ptr<Transfer> transfer);
    void perform();
    void collect(std::vector<core::Reply> &replies);
    void catch_up();
    void end_overdue(std::vector<core::Reply> &replies);
    bool is_overdue(Transfer &transfer, std::int64_t now_us);
    int bounded_wait_ms(int max_wait_ms) const;

    TransportSettings settings_;
    std::unique_ptr<CURLM, Cleanup> multi_;
    std::vector<std::unique_ptr<Transfer>> active_;
    std::vector<std::unique_ptr<Transfer>> idle_;
    std::vector<core::Reply> refused_;     ///< never reached libcurl; handed out by the next poll
    std::int64_t next_end_us_ = INT64_MAX; ///< when the time of an active transfer runs out, steady
    std::int64_t deaf_us_ = 0;             ///< time between calls, in all
    std::uint64_t connections_made_ = 0;
    std::uint64_t connections_dropped_ = 0; ///< made before the last drop_idle()
    std::int64_t listened_us_ = 0;          ///< when we last did
};

} // namespace outbox_relay::http
