#include "http/answer.hpp"

#include <algorithm>
#include <strings.h>

#include "core/no_postgres.hpp"

namespace outbox_relay::http {

namespace {

constexpr std::string_view kRetryAfter = "Retry-After:";

bool is_digit(char c) {
    return c >= '0' && c <= '9';
}

std::string_view without_line_end(std::string_view line) {
    if (line.ends_with('\n'))
        line.remove_suffix(1);
    if (line.ends_with('\r'))
        line.remove_suffix(1);
    return line;
}

std::string_view trimmed(std::string_view text) {
    const std::size_t first = text.find_first_not_of(" \t");
    if (first == std::string_view::npos)
        return {};
    return text.substr(first, text.find_last_not_of(" \t") - first + 1);
}

/// The status of "HTTP/1.1 200 OK" or "HTTP/2 200": exactly three digits from 100 on (RFC 9112,
/// section 4); 0 when the line is something else. libcurl is laxer: it reads 2000 as 200.
int parse_status(std::string_view line) {
    if (!line.starts_with("HTTP/"))
        return 0;
    const std::size_t space = line.find(' ');
    if (space == std::string_view::npos)
        return 0;
    const std::string_view rest = line.substr(space + 1);
    if (rest.size() < 3 || !std::all_of(rest.begin(), rest.begin() + 3, is_digit))
        return 0;
    if (rest.size() > 3 && rest[3] != ' ')
        return 0;
    const int status = (rest[0] - '0') * 100 + (rest[1] - '0') * 10 + (rest[2] - '0');
    return status >= 100 ? status : 0;
}

} // namespace

bool Answer::refuse(const char *problem) noexcept {
    problem_ = problem;
    return false;
}

bool Answer::take_header_line(std::string_view line) noexcept {
    header_bytes_ += line.size();
    if (header_bytes_ > kMaxHeaderBytes)
        return refuse("the response's headers are longer than 64 KiB");
    // Trailers say nothing that we want; and newer libcurls hand out what came of a line when the connection
    // ends.
    if (header_complete_ || line.empty() || line.back() != '\n')
        return true;
    line = without_line_end(line);
    if (!in_block_)
        return begin_block(line);
    if (line.empty())
        return end_block();
    take_field(line);
    return true;
}

bool Answer::begin_block(std::string_view status_line) noexcept {
    status_ = parse_status(status_line);
    if (status_ == 0)
        return refuse("the response's status line is malformed");
    in_block_ = true;
    retry_after_bytes_ = 0; // that of a 1xx block, if any, does not count
    return true;
}

bool Answer::end_block() noexcept {
    in_block_ = false;
    if (status_ >= 200) {
        header_complete_ = true;
        return true;
    }
    if (status_ == 101)
        return refuse("the endpoint switched to a protocol that was not asked for (101)");
    if (++interim_blocks_ > kMaxInterimBlocks)
        return refuse("more than 32 interim (1xx) responses");
    return true;
}

void Answer::take_field(std::string_view line) noexcept {
    if (line.size() < kRetryAfter.size() ||
        strncasecmp(line.data(), kRetryAfter.data(), kRetryAfter.size()) != 0)
        return;
    const std::string_view value = trimmed(line.substr(kRetryAfter.size()));
    retry_after_bytes_ = value.size() <= retry_after_.size() ? value.size() : 0;
    std::copy_n(value.data(), retry_after_bytes_, retry_after_.data());
}

void Answer::take_body(std::string_view bytes) noexcept {
    body_bytes_ += bytes.size();
    if (is_success())
        return;
    const std::size_t kept = std::min(bytes.size(), excerpt_.size() - excerpt_bytes_);
    std::copy_n(bytes.data(), kept, excerpt_.data() + excerpt_bytes_);
    excerpt_bytes_ += kept;
}

} // namespace outbox_relay::http
