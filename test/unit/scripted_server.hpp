#pragma once

#include <arpa/inet.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <list>
#include <mutex>
#include <stdexcept>
#include <string>
#include <thread>
#include <utility>

namespace outbox_relay::test {

/// What a client sent: the header block as it came, with its empty line, and the body.
struct ReceivedRequest {
    std::string head;
    std::string body;
};

/// One accepted connection, in the hands of the script.
class Connection {
  public:
    explicit Connection(int fd) : fd_(fd) {}

    /// Reads a header block; empty when the client went away first.
    std::string read_head() {
        std::size_t end;
        while ((end = buffer_.find("\r\n\r\n")) == std::string::npos)
            if (!fill())
                return {};
        return take(end + 4);
    }

    /// Reads a header block and the body that its Content-Length announces; false at the end.
    bool read_request(ReceivedRequest &request) {
        request.head = read_head();
        if (request.head.empty())
            return false;
        const std::size_t length = content_length(request.head);
        while (buffer_.size() < length)
            if (!fill())
                return false;
        request.body = take(length);
        return true;
    }

    /// False when the client is gone.
    bool send(const std::string &bytes) {
        for (std::size_t sent = 0; sent < bytes.size();) {
            const ssize_t n = ::send(fd_, bytes.data() + sent, bytes.size() - sent, MSG_NOSIGNAL);
            if (n <= 0)
                return false;
            sent += static_cast<std::size_t>(n);
        }
        return true;
    }

    /// Waits until the client closes, or the server stops, swallowing what comes.
    void wait_for_close() {
        while (fill())
            buffer_.clear();
    }

    /// Waits for the same, and leaves what comes unread in the kernel.
    void wait_for_hangup() {
        pollfd watched{fd_, POLLRDHUP, 0};
        ::poll(&watched, 1, -1);
    }

    /// Closes with a reset instead of an end.
    void reset() {
        const linger hard{1, 0};
        setsockopt(fd_, SOL_SOCKET, SO_LINGER, &hard, sizeof hard);
    }

    int fd() const { return fd_; }

  private:
    static std::size_t content_length(const std::string &head) {
        const char *found = strcasestr(head.c_str(), "\r\ncontent-length:");
        return found == nullptr ? 0 : std::strtoul(found + 17, nullptr, 10);
    }

    bool fill() {
        char chunk[65536];
        const ssize_t n = recv(fd_, chunk, sizeof chunk, 0);
        if (n <= 0)
            return false;
        buffer_.append(chunk, static_cast<std::size_t>(n));
        return true;
    }

    std::string take(std::size_t bytes) {
        std::string taken = buffer_.substr(0, bytes);
        buffer_.erase(0, bytes);
        return taken;
    }

    int fd_;
    std::string buffer_;
};

/// Listens on 127.0.0.1 and runs the script in a thread for each connection, which is closed when the
/// script returns. The destructor hangs up on everybody and joins.
class ScriptedServer {
  public:
    using Script = std::function<void(Connection &)>;

    explicit ScriptedServer(Script script) : script_(std::move(script)) {
        listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        sockaddr_in address{};
        address.sin_family = AF_INET;
        address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
        socklen_t size = sizeof address;
        if (bind(listener_, reinterpret_cast<sockaddr *>(&address), size) != 0 || listen(listener_, 128) != 0)
            throw std::runtime_error("can't listen on 127.0.0.1");
        getsockname(listener_, reinterpret_cast<sockaddr *>(&address), &size);
        port_ = ntohs(address.sin_port);
        acceptor_ = std::thread([this] { accept_all(); });
    }

    ~ScriptedServer() {
        shutdown(listener_, SHUT_RDWR);
        acceptor_.join();
        close(listener_);
        {
            const std::lock_guard lock(mutex_);
            for (Session &session : sessions_)
                if (session.fd >= 0)
                    shutdown(session.fd, SHUT_RDWR);
        }
        for (Session &session : sessions_)
            session.thread.join();
    }

    ScriptedServer(const ScriptedServer &) = delete;
    ScriptedServer &operator=(const ScriptedServer &) = delete;

    std::string url(const std::string &path = "/") const {
        return "http://127.0.0.1:" + std::to_string(port_) + path;
    }
    int port() const { return port_; }
    int connections() const { return connections_; }

  private:
    struct Session {
        int fd;
        std::thread thread;
    };

    void accept_all() {
        for (;;) {
            const int fd = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
            if (fd < 0)
                return;
            ++connections_;
            const std::lock_guard lock(mutex_);
            Session &session = sessions_.emplace_back(Session{fd, {}});
            session.thread = std::thread([this, &session] { serve(session); });
        }
    }

    void serve(Session &session) {
        Connection connection(session.fd);
        script_(connection);
        const std::lock_guard lock(mutex_);
        close(session.fd);
        session.fd = -1;
    }

    Script script_;
    int listener_ = -1;
    int port_ = 0;
    std::atomic<int> connections_ = 0;
    std::mutex mutex_;
    std::list<Session> sessions_;
    std::thread acceptor_;
};

} // namespace outbox_relay::test
