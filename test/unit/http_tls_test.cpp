#include "http_harness.hpp"

#include <gtest/gtest.h>

#include <fcntl.h>
#include <spawn.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <filesystem>
#include <stdexcept>
#include <thread>

extern char **environ;

namespace outbox_relay::test {
namespace {

/// Runs the openssl program, by default until it ends.
pid_t run_openssl(std::vector<std::string> arguments, posix_spawn_file_actions_t *actions) {
    arguments.insert(arguments.begin(), "openssl");
    std::vector<char *> raw;
    for (std::string &argument : arguments)
        raw.push_back(argument.data());
    raw.push_back(nullptr);
    pid_t pid = 0;
    if (posix_spawnp(&pid, "openssl", actions, nullptr, raw.data(), environ) != 0)
        throw std::runtime_error("openssl can't be run");
    return pid;
}

/// A self-signed certificate for 127.0.0.1 or another address, in a directory of its own.
class Certificate {
  public:
    explicit Certificate(const std::string &address = "127.0.0.1") {
        std::string pattern = std::filesystem::temp_directory_path() / "http_tls_XXXXXX";
        if (mkdtemp(pattern.data()) == nullptr)
            throw std::runtime_error("no temporary directory");
        directory_ = pattern;
        posix_spawn_file_actions_t actions;
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
        const pid_t pid =
            run_openssl({"req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1",
                         "-nodes", "-days", "2", "-subj", "/CN=test", "-addext",
                         "subjectAltName=IP:" + address, "-keyout", key(), "-out", file()},
                        &actions);
        posix_spawn_file_actions_destroy(&actions);
        int status = 0;
        waitpid(pid, &status, 0);
        if (status != 0)
            throw std::runtime_error("openssl made no certificate");
    }
    ~Certificate() { std::filesystem::remove_all(directory_); }
    Certificate(const Certificate &) = delete;
    Certificate &operator=(const Certificate &) = delete;

    std::string file() const { return directory_ / "cert.pem"; }
    std::string key() const { return directory_ / "key.pem"; }

  private:
    std::filesystem::path directory_;
};

/// `openssl s_server` on 127.0.0.1, which sends a 204 to whoever completes a handshake.
class TlsServer {
  public:
    explicit TlsServer(const Certificate &certificate, std::vector<std::string> more = {}) {
        int input[2];
        int output[2];
        if (pipe2(input, O_CLOEXEC) != 0 || pipe2(output, O_CLOEXEC) != 0)
            throw std::runtime_error("no pipe");
        posix_spawn_file_actions_t actions;
        posix_spawn_file_actions_init(&actions);
        posix_spawn_file_actions_adddup2(&actions, input[0], 0);
        posix_spawn_file_actions_adddup2(&actions, output[1], 1);
        posix_spawn_file_actions_addopen(&actions, 2, "/dev/null", O_WRONLY, 0);
        std::vector<std::string> arguments{"s_server",         "-accept", "127.0.0.1:0",     "-cert",
                                           certificate.file(), "-key",    certificate.key(), "-crlf"};
        arguments.insert(arguments.end(), more.begin(), more.end());
        pid_ = run_openssl(arguments, &actions);
        posix_spawn_file_actions_destroy(&actions);
        close(input[0]);
        close(output[1]);
        input_ = input[1];
        output_ = output[0];
        const std::string answer = "HTTP/1.1 204 No Content\n\n";
        if (write(input_, answer.data(), answer.size()) < 0)
            throw std::runtime_error("openssl s_server takes no input");
        read_port();
    }
    ~TlsServer() {
        kill(pid_, SIGKILL);
        waitpid(pid_, nullptr, 0);
        close(input_);
        close(output_);
    }
    TlsServer(const TlsServer &) = delete;
    TlsServer &operator=(const TlsServer &) = delete;

    std::string url() const { return "https://127.0.0.1:" + port_ + "/"; }

  private:
    /// Waits for the line "ACCEPT 127.0.0.1:port".
    void read_port() {
        std::string printed;
        char c;
        while (read(output_, &c, 1) == 1) {
            printed += c;
            const std::size_t at = printed.find("ACCEPT 127.0.0.1:");
            if (c == '\n' && at != std::string::npos) {
                port_ = printed.substr(at + 17, printed.size() - at - 18);
                return;
            }
        }
        throw std::runtime_error("openssl s_server did not start: " + printed);
    }

    pid_t pid_ = 0;
    int input_ = -1;
    int output_ = -1;
    std::string port_;
};

core::Reply reply_of(const TlsServer &server, const std::string &ca_file) {
    http::TransportSettings settings;
    settings.ca_file = ca_file;
    http::CurlTransport transport(settings);
    return exchange(transport, make_request(server.url()));
}

void expect_refused(const core::Reply &reply) {
    EXPECT_EQ(reply.failure, core::Failure::tls) << reply.detail;
    EXPECT_TRUE(reply.nothing_sent);
    EXPECT_FALSE(is_published(reply));
}

TEST(HttpTls, TrustsWhatCaFileSays) {
    const Certificate certificate;
    const TlsServer server(certificate);
    const core::Reply reply = reply_of(server, certificate.file());
    EXPECT_TRUE(is_published(reply)) << reply.detail;
    EXPECT_EQ(reply.status, 204);
}

TEST(HttpTls, TimeInWhichNobodyListensIsNotTimeToConnect) {
    const Certificate certificate;
    const TlsServer server(certificate);
    http::TransportSettings settings;
    settings.ca_file = certificate.file();
    http::CurlTransport transport(settings);
    transport.start(1, make_request(server.url()), {0, 300});
    std::vector<core::Reply> replies;
    transport.poll(0, replies);
    std::this_thread::sleep_for(std::chrono::milliseconds(600));
    replies = wait_for(transport, 1);
    EXPECT_TRUE(is_published(replies.at(0))) << replies.at(0).detail;
}

TEST(HttpTls, RefusesAnUnknownIssuer) {
    const Certificate certificate;
    const TlsServer server(certificate);
    expect_refused(reply_of(server, ""));
}

/// Variables that OpenSSL's own tools obey.
TEST(HttpTls, TheEnvironmentAddsNoTrust) {
    const Certificate certificate;
    const TlsServer server(certificate);
    for (const char *name : {"SSL_CERT_FILE", "CURL_CA_BUNDLE"})
        setenv(name, certificate.file().c_str(), 1);
    const core::Reply reply = reply_of(server, "");
    for (const char *name : {"SSL_CERT_FILE", "CURL_CA_BUNDLE"})
        unsetenv(name);
    expect_refused(reply);
}

TEST(HttpTls, RefusesAnotherIssuerThanCaFile) {
    const Certificate certificate;
    const Certificate other;
    const TlsServer server(certificate);
    expect_refused(reply_of(server, other.file()));
}

TEST(HttpTls, RefusesACertificateOfAnotherHost) {
    const Certificate certificate("127.0.0.2");
    const TlsServer server(certificate);
    expect_refused(reply_of(server, certificate.file()));
}

TEST(HttpTls, RefusesOldVersions) {
    const Certificate certificate;
    const TlsServer server(certificate, {"-tls1_1", "-cipher", "ALL:@SECLEVEL=0"});
    expect_refused(reply_of(server, certificate.file()));
}

TEST(HttpTls, AMissingCaFileSendsNothing) {
    const Certificate certificate;
    const TlsServer server(certificate);
    expect_refused(reply_of(server, certificate.file() + ".missing"));
}

} // namespace
} // namespace outbox_relay::test
