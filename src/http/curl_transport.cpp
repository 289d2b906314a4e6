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

void check(CURLMcode code, const char *call) {
    if (code == CURLM_OUT_OF_MEMORY)
        throw std::bad_alloc();
    if (code != CURLM_OK)
        throw std::runtime_error(std::string(call) + ": " + curl_multi_strerror(code));
}

} // namespace

CurlTransport::CurlTransport(TransportSettings settings)
    : settings_(std::move(settings)), last_used_us_(steady_us()) {
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
    std::unique_ptr<Transfer> transfer = take_handle();
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

/// Ends what has its answer and has waited for the rest of the body for long enough.
void CurlTransport::collect_awaiting_body(std::vector<core::Reply> &replies) {
    body_awaited_ = false;
    const std::int64_t now = steady_us();
    for (std::size_t i = active_.size(); i-- > 0;) {
        Transfer &transfer = *active_[i];
        if (!transfer.header_complete() || !transfer.is_answered())
            continue;
        if (transfer.body_awaited_from == 0)
            transfer.body_awaited_from = now;
        if (now - transfer.body_awaited_from < kBodyPatienceUs) {
            body_awaited_ = true;
            continue;
        }
        const SignalBlock block;
        std::unique_ptr<Transfer> owned = deactivate(transfer);
        replies.push_back(owned->give_up());
        keep_handle(std::move(owned));
    }
}

int CurlTransport::bounded_wait_ms(int max_wait_ms) const {
    constexpr int kPatienceMs = static_cast<int>(kBodyPatienceUs / 1000);
    return body_awaited_ ? std::min(max_wait_ms, kPatienceMs) : max_wait_ms;
}

void CurlTransport::poll(int max_wait_ms, std::vector<core::Reply> &replies) {
    const std::size_t before = replies.size();
    if (!active_.empty())
        perform();
    collect(replies);
    collect_awaiting_body(replies);
    if (replies.size() != before || active_.empty() || max_wait_ms <= 0) {
        last_used_us_ = steady_us();
        return;
    }
    check(curl_multi_poll(multi_.get(), nullptr, 0, bounded_wait_ms(max_wait_ms), nullptr),
          "curl_multi_poll");
    perform();
    collect(replies);
    collect_awaiting_body(replies);
    last_used_us_ = steady_us();
}

void CurlTransport::cancel(std::vector<core::Reply> &replies) {
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
    body_awaited_ = false;
    last_used_us_ = steady_us();
}

bool CurlTransport::is_idle_too_long(std::int64_t max_idle_ms) const {
    return in_flight() == 0 && steady_us() - last_used_us_ > max_idle_ms * 1000;
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
