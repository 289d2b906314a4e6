#include "http/curl_transport.hpp"

#include "http/library.hpp"
#include "http/signal_block.hpp"

#include <algorithm>
#include <iterator>
#include <new>
#include <stdexcept>
#include <utility>

#include "core/no_postgres.hpp"

namespace outbox_relay::http {

namespace {

/// An answer that can no longer change is waited for no longer than this: its body is read only to
/// keep the connection, and an endpoint that drips it must not hold a place in the pass.
constexpr std::int64_t kBodyPatienceUs = 1'000'000;

/// What a caller does between two calls takes less, as a rule; it is not worth telling libcurl of.
constexpr std::int64_t kShortUs = 1'000;

void check(CURLMcode code, const char *call) {
    if (code == CURLM_OUT_OF_MEMORY)
        throw std::bad_alloc();
    if (code != CURLM_OK)
        throw std::runtime_error(std::string(call) + ": " + curl_multi_strerror(code));
}

} // namespace

CurlTransport::CurlTransport(TransportSettings settings)
    : settings_(std::move(settings)), listened_us_(steady_us()) {
    initialise_library();
    open();
}

CurlTransport::~CurlTransport() {
    const SignalBlock block;
    for (const auto &transfer : active_)
        curl_multi_remove_handle(multi_.get(), transfer->handle());
    active_.clear();
    idle_.clear();
    multi_.reset();
}

void CurlTransport::open() {
    multi_.reset(curl_multi_init());
    if (multi_ == nullptr)
        throw std::bad_alloc();
    check(curl_multi_setopt(multi_.get(), CURLMOPT_MAXCONNECTS, static_cast<long>(settings_.max_connections)),
          "curl_multi_setopt");
#if LIBCURL_VERSION_NUM >= 0x081400
    // Since 8.20 threads that resolve names belong to the multi handle: a name that hangs would hold up its
    // end.
    check(curl_multi_setopt(multi_.get(), CURLMOPT_QUICK_EXIT, 1L), "curl_multi_setopt");
#endif
}

std::unique_ptr<Transfer> CurlTransport::take_handle() {
    if (idle_.empty())
        return std::make_unique<Transfer>(settings_);
    std::unique_ptr<Transfer> transfer = std::move(idle_.back());
    idle_.pop_back();
    return transfer;
}

void CurlTransport::keep_handle(std::unique_ptr<Transfer> transfer) {
    if (idle_.size() < static_cast<std::size_t>(settings_.max_connections))
        idle_.push_back(std::move(transfer));
}

void CurlTransport::start(std::uint64_t ticket, core::Request request, const core::RequestLimits &limits) {
    catch_up();
    std::unique_ptr<Transfer> transfer = take_handle();
    transfer->deaf_us = deaf_us_;
    if (auto problem = transfer->prepare(ticket, std::move(request), limits)) {
        refused_.push_back(transfer->refuse(std::move(*problem)));
        keep_handle(std::move(transfer));
        return;
    }
    active_.reserve(active_.size() + 1);
    const CURLMcode code = [&] {
        const SignalBlock block;
        return curl_multi_add_handle(multi_.get(), transfer->handle());
    }();
    if (code != CURLM_OK) {
        // No descriptors or no memory for one more, now: nothing was sent, and it is not the request's fault.
        refused_.push_back(transfer->refuse(curl_multi_strerror(code), core::Failure::connect));
        return;
    }
    transfer->slot = active_.size();
    active_.push_back(std::move(transfer));
}

std::unique_ptr<Transfer> CurlTransport::deactivate(Transfer &transfer) {
    curl_multi_remove_handle(multi_.get(), transfer.handle());
    const std::size_t slot = transfer.slot;
    std::unique_ptr<Transfer> owned = std::move(active_[slot]);
    if (slot + 1 != active_.size()) {
        active_[slot] = std::move(active_.back());
        active_[slot]->slot = slot;
    }
    active_.pop_back();
    return owned;
}

/// Takes note of the time since we last listened.
void CurlTransport::catch_up() {
    const std::int64_t now_us = steady_us();
    const std::int64_t deaf_us = now_us - listened_us_;
    deaf_us_ += deaf_us;
    listened_us_ = now_us;
    if (deaf_us < kShortUs)
        return;
    for (const auto &transfer : active_)
        transfer->excuse(deaf_us_);
}

void CurlTransport::perform() {
    const SignalBlock block;
    int running = 0;
    check(curl_multi_perform(multi_.get(), &running), "curl_multi_perform");
}

void CurlTransport::collect(std::vector<core::Reply> &replies) {
    std::move(refused_.begin(), refused_.end(), std::back_inserter(replies));
    refused_.clear();
    int left = 0;
    while (const CURLMsg *message = curl_multi_info_read(multi_.get(), &left)) {
        if (message->msg != CURLMSG_DONE)
            continue;
        const CURLcode code = message->data.result; // the message dies with remove_handle
        Transfer &transfer = Transfer::of(message->easy_handle);
        long connections = 0;
        curl_easy_getinfo(transfer.handle(), CURLINFO_NUM_CONNECTS, &connections);
        connections_made_ += static_cast<std::uint64_t>(connections);
        std::unique_ptr<Transfer> owned = deactivate(transfer);
        replies.push_back(owned->finish(code));
        keep_handle(std::move(owned));
    }
}

/// Of a transfer that has its answer the rest of the body is waited for, though not for long.
bool CurlTransport::is_overdue(Transfer &transfer, std::int64_t now_us) {
    std::int64_t end_us = transfer.ends_us(deaf_us_);
    if (transfer.header_complete() && transfer.is_answered()) {
        if (transfer.body_awaited_from == 0)
            transfer.body_awaited_from = now_us;
        end_us = std::min(end_us, transfer.body_awaited_from + kBodyPatienceUs);
    }
    if (end_us <= now_us)
        return true;
    next_end_us_ = std::min(next_end_us_, end_us);
    return false;
}

/// Ends what is out of time. To be called when everything that has arrived is taken in.
void CurlTransport::end_overdue(std::vector<core::Reply> &replies) {
    next_end_us_ = INT64_MAX;
    const std::int64_t now_us = steady_us();
    for (std::size_t i = active_.size(); i-- > 0;) {
        if (!is_overdue(*active_[i], now_us))
            continue;
        const SignalBlock block;
        std::unique_ptr<Transfer> owned = deactivate(*active_[i]);
        replies.push_back(owned->time_out());
        keep_handle(std::move(owned));
    }
}

int CurlTransport::bounded_wait_ms(int max_wait_ms) const {
    const std::int64_t left_us = next_end_us_ - steady_us();
    return left_us >= std::int64_t{1000} * max_wait_ms
               ? max_wait_ms
               : static_cast<int>(std::max<std::int64_t>(left_us, 0) / 1000 + 1);
}

void CurlTransport::poll(int max_wait_ms, std::vector<core::Reply> &replies) {
    const std::size_t before = replies.size();
    catch_up();
    if (!active_.empty())
        perform();
    collect(replies);
    end_overdue(replies);
    if (replies.size() != before || active_.empty() || max_wait_ms <= 0) {
        listened_us_ = steady_us();
        return;
    }
    check(curl_multi_poll(multi_.get(), nullptr, 0, bounded_wait_ms(max_wait_ms), nullptr),
          "curl_multi_poll");
    perform();
    collect(replies);
    end_overdue(replies);
    listened_us_ = steady_us();
}

void CurlTransport::cancel(std::vector<core::Reply> &replies) {
    catch_up();
    const SignalBlock block;
    int running = 0;
    // What it says is of no interest any more: this is how a pass ends that something has failed in.
    if (!active_.empty())
        (void)curl_multi_perform(multi_.get(), &running);
    collect(replies);
    while (!active_.empty()) {
        std::unique_ptr<Transfer> owned = deactivate(*active_.back());
        replies.push_back(owned->give_up());
        keep_handle(std::move(owned));
    }
    listened_us_ = steady_us();
}

bool CurlTransport::is_idle_too_long(std::int64_t max_idle_ms) const {
    return in_flight() == 0 && steady_us() - listened_us_ > max_idle_ms * 1000;
}

void CurlTransport::drop_idle() {
    if (in_flight() != 0)
        return;
    const SignalBlock block;
    idle_.clear();
    connections_dropped_ = connections_made_;
    open();
}

std::size_t CurlTransport::connections_open() const {
    return std::min<std::uint64_t>(connections_made_ - connections_dropped_,
                                   static_cast<std::uint64_t>(settings_.max_connections));
}

} // namespace outbox_relay::http
