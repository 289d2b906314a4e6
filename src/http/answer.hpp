#pragma once

#include <array>
#include <cstddef>
#include <string_view>

namespace outbox_relay::http {

/// The answer to one request, as it comes in: recognises the end of the final header block and keeps
/// the little that matters. Its size is fixed whatever the endpoint sends, and nothing here allocates
/// or throws, so it may be fed from C callbacks.
class Answer {
  public:
    static constexpr std::size_t kMaxHeaderBytes = 64 * 1024; ///< all header blocks together
    static constexpr int kMaxInterimBlocks = 32;              ///< 1xx answers before the final one
    static constexpr std::size_t kMaxExcerptBytes = 512;
    static constexpr std::size_t kMaxRetryAfterBytes = 128;

    /// Forgets everything: a new exchange begins.
    void restart() noexcept { *this = Answer(); }

    /// Takes a whole header line with its line end: status lines, fields, the empty line that ends a
    /// block, and trailers. False: not HTTP or beyond the bounds, problem() says why.
    bool take_header_line(std::string_view line) noexcept;

    /// Takes bytes of the body. All are counted; of an answer that is not 2xx the first are kept.
    void take_body(std::string_view bytes) noexcept;

    /// Remembers why no more is read.
    void stop(const char *problem) noexcept { problem_ = problem; }

    bool header_complete() const noexcept { return header_complete_; }
    /// Status of the final answer, 0 before its header block is complete.
    int status() const noexcept { return header_complete_ ? status_ : 0; }
    bool is_success() const noexcept { return status() / 100 == 2; }
    /// Raw value of Retry-After in the final block; empty when absent, or too long to be one.
    std::string_view retry_after() const noexcept {
        return {retry_after_.data(), header_complete_ ? retry_after_bytes_ : 0};
    }
    std::string_view excerpt() const noexcept { return {excerpt_.data(), excerpt_bytes_}; }
    std::size_t body_bytes() const noexcept { return body_bytes_; }
    /// What was wrong, a static text; null when nothing was.
    const char *problem() const noexcept { return problem_; }

  private:
    bool refuse(const char *problem) noexcept;
    bool begin_block(std::string_view status_line) noexcept;
    bool end_block() noexcept;
    void take_field(std::string_view line) noexcept;

    bool in_block_ = false;
    bool header_complete_ = false;
    int status_ = 0;
    int interim_blocks_ = 0;
    std::size_t header_bytes_ = 0;
    std::size_t body_bytes_ = 0;
    std::size_t retry_after_bytes_ = 0;
    std::size_t excerpt_bytes_ = 0;
    const char *problem_ = nullptr;
    std::array<char, kMaxRetryAfterBytes> retry_after_;
    std::array<char, kMaxExcerptBytes> excerpt_;
};

} // namespace outbox_relay::http
