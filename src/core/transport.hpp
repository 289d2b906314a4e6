#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

namespace outbox_relay::core {

/// A request ready to be sent. `headers` are whole lines "Name: value" without line ends.
struct Request {
    std::string method;
    std::string url;
    std::vector<std::string> headers;
    std::string body;
};

/// How far a request came, and what stopped it.
enum class Failure {
    none,     ///< the exchange ended by itself
    resolve,  ///< the name could not be resolved: nothing was sent
    connect,  ///< no connection: nothing was sent
    tls,      ///< no verified TLS session: nothing was sent
    blocked,  ///< the address or url is not allowed: nothing was sent
    timeout,  ///< request_timeout ran out
    reset,    ///< the connection broke after something may have been sent
    response, ///< the answer is not HTTP, or beyond the bounds we read
    cancelled ///< the pass gave it up (deadline, shutdown)
};

/// What became of one request.
struct Reply {
    std::uint64_t ticket = 0;        ///< the number that start() was given
    Failure failure = Failure::none; ///< `none` does not say that the status is good
    bool nothing_sent = false;       ///< true: not one byte of the request left us
    bool header_complete = false;    ///< a final (not 1xx) header block arrived whole
    bool uploaded = false;           ///< the whole body was sent
    int status = 0;                  ///< final status, 0 when there is none
    std::string retry_after;         ///< raw value of Retry-After, empty when absent
    std::string detail;              ///< what libcurl said, for last_error; raw bytes
    std::string excerpt;             ///< the first bytes of the body of a non-2xx answer; raw bytes
    std::int64_t latency_us = 0;     ///< from start() to the end of the exchange
    std::int64_t body_bytes = 0;     ///< of the request's body
};

/// Time limits of one request, in milliseconds, as far as somebody polls meanwhile.
struct RequestLimits {
    std::int64_t timeout_ms = 0;
    std::int64_t connect_timeout_ms = 0;
};

/// Carries requests to a target. One thread; nothing here throws for what the network does.
class Transport {
  public:
    virtual ~Transport() = default;

    /// Starts a request; its Reply comes out of a later poll() or cancel(). Keeps `request` alive as
    /// long as it needs it. `ticket` is unique among the requests in flight.
    virtual void start(std::uint64_t ticket, Request request, const RequestLimits &limits) = 0;

    /// Waits at most `max_wait_ms` for something to happen and appends what ended to `replies`.
    virtual void poll(int max_wait_ms, std::vector<Reply> &replies) = 0;

    /// Ends everything in flight: an answer whose header block had arrived whole counts as what it
    /// says, the rest comes back with Failure::cancelled.
    virtual void cancel(std::vector<Reply> &replies) = 0;

    virtual std::size_t in_flight() const = 0;
};

} // namespace outbox_relay::core
