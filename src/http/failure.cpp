#include "http/failure.hpp"

#include "core/no_postgres.hpp"

namespace outbox_relay::http {

namespace {

using core::Failure;

struct Line {
    CURLcode code;
    Failure before; ///< no byte of the request can have been sent
    Failure after;  ///< something may have been sent
};

// What is missing here is connect before, reset after: the careful reading of both.
constexpr Line kLines[] = {
    // The name does not resolve. After: a dead kept connection was to be replaced.
    {CURLE_COULDNT_RESOLVE_HOST, Failure::resolve, Failure::reset},
    {CURLE_COULDNT_RESOLVE_PROXY, Failure::resolve, Failure::reset},
    // Refused or unreachable. After: as above.
    {CURLE_COULDNT_CONNECT, Failure::connect, Failure::reset},
    // The handshake failed, or the other side is not a TLS server.
    {CURLE_SSL_CONNECT_ERROR, Failure::tls, Failure::reset},
    // The certificate is not signed by a trusted authority, has expired, or names another host.
    {CURLE_PEER_FAILED_VERIFICATION, Failure::tls, Failure::reset},
    // Our own certificate or key can't be used.
    {CURLE_SSL_CERTPROBLEM, Failure::tls, Failure::reset},
    // No cipher in common.
    {CURLE_SSL_CIPHER, Failure::tls, Failure::reset},
    // ca_file can't be read.
    {CURLE_SSL_CACERT_BADFILE, Failure::tls, Failure::reset},
    // The peer's certificate has been revoked, or its status can't be had.
    {CURLE_SSL_CRL_BADFILE, Failure::tls, Failure::reset},
    {CURLE_SSL_ISSUER_ERROR, Failure::tls, Failure::reset},
    {CURLE_SSL_INVALIDCERTSTATUS, Failure::tls, Failure::reset},
    // The url can't be parsed, has another scheme, or carries credentials. After: the answer is
    // HTTP/0.9 or another version that was not asked for.
    {CURLE_URL_MALFORMAT, Failure::blocked, Failure::response},
    {CURLE_UNSUPPORTED_PROTOCOL, Failure::blocked, Failure::response},
    {CURLE_LOGIN_DENIED, Failure::blocked, Failure::response},
    // The status line or a header is not HTTP.
    {CURLE_WEIRD_SERVER_REPLY, Failure::connect, Failure::response},
    // A framing that can't be read, or contradicting lengths.
    {CURLE_BAD_CONTENT_ENCODING, Failure::connect, Failure::response},
#if LIBCURL_VERSION_NUM >= 0x080600
    // Headers beyond the library's own bound; older ones say CURLE_OUT_OF_MEMORY or CURLE_RECV_ERROR.
    {CURLE_TOO_LARGE, Failure::connect, Failure::response},
#endif
    {CURLE_OUT_OF_MEMORY, Failure::connect, Failure::response},
    // A callback of ours stopped the transfer: beyond the bounds that we read.
    {CURLE_WRITE_ERROR, Failure::connect, Failure::response},
    // Time ran out. Before: see unsent_timeout().
    {CURLE_OPERATION_TIMEDOUT, Failure::connect, Failure::timeout},
};

/// Which part of connecting took too long.
Failure unsent_timeout(const Progress &progress) {
    if (!progress.resolved)
        return Failure::resolve;
    return progress.connected ? Failure::tls : Failure::connect;
}

} // namespace

Failure classify(CURLcode code, const Progress &progress) {
    if (code == CURLE_OK)
        return Failure::none;
    if (code == CURLE_OPERATION_TIMEDOUT && !progress.request_begun)
        return unsent_timeout(progress);
    for (const Line &line : kLines)
        if (line.code == code)
            return progress.request_begun ? line.after : line.before;
    return progress.request_begun ? Failure::reset : Failure::connect;
}

} // namespace outbox_relay::http
