#pragma once

#include "http/curl_transport.hpp"
#include "scripted_server.hpp"

#include <string>
#include <utility>
#include <vector>

namespace outbox_relay::test {

inline core::Request make_request(std::string url, std::string body = "{}", std::string method = "POST") {
    core::Request request;
    request.method = std::move(method);
    request.url = std::move(url);
    request.headers = {"Content-Type: application/json", "ce-id: 1"};
    request.body = std::move(body);
    return request;
}

inline constexpr core::RequestLimits kLimits{10'000, 5'000};

/// Polls until `count` replies are there.
inline std::vector<core::Reply> wait_for(core::Transport &transport, std::size_t count) {
    std::vector<core::Reply> replies;
    while (replies.size() < count && transport.in_flight() > 0)
        transport.poll(100, replies);
    return replies;
}

/// Sends one request and waits for what becomes of it.
inline core::Reply exchange(core::Transport &transport, core::Request request,
                            const core::RequestLimits &limits = kLimits) {
    transport.start(1, std::move(request), limits);
    return wait_for(transport, 1).at(0);
}

/// The test of spec.md, section 6.
inline bool is_published(const core::Reply &reply) {
    return reply.header_complete && reply.uploaded && reply.status / 100 == 2;
}

inline const std::string kOk = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/// Answers every request of a connection with the same bytes.
inline ScriptedServer::Script always(std::string answer) {
    return [answer](Connection &connection) {
        ReceivedRequest request;
        while (connection.read_request(request) && connection.send(answer))
            ;
    };
}

/// Reads one request, sends these bytes, and keeps the connection until the client closes it.
inline ScriptedServer::Script once_then_silent(std::string answer) {
    return [answer](Connection &connection) {
        ReceivedRequest request;
        if (connection.read_request(request) && connection.send(answer))
            connection.wait_for_close();
    };
}

/// Reads one request, sends `start`, then `more` for as long as the client takes it.
inline ScriptedServer::Script endless(std::string start, std::string more) {
    return [start, more](Connection &connection) {
        ReceivedRequest request;
        if (!connection.read_request(request) || !connection.send(start))
            return;
        while (connection.send(more))
            ;
    };
}

} // namespace outbox_relay::test
