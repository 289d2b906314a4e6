/// The bound that bench/relay is measured against: one thread, one libcurl multi handle, a fixed number of
/// transfers in flight, the same requests as the relay's, nothing else.
///
///   curl_loop URL REQUESTS CONCURRENCY BODY_BYTES     prints requests per second

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <deque>
#include <stdexcept>
#include <string>

#include <curl/curl.h>

namespace {

struct Slot {
    CURL *easy = nullptr;
    curl_slist *headers = nullptr;
};

size_t discard(char *, size_t size, size_t count, void *) {
    return size * count;
}

/// A JSON document of exactly `bytes` bytes.
std::string make_body(size_t bytes) {
    std::string body = "{\"n\": 1, \"pad\": \"";
    body.append(bytes > body.size() + 2 ? bytes - body.size() - 2 : 0, 'x');
    return body + "\"}";
}

/// Puts a request into the slot: the header families of a binary request are built anew each time, as the
/// relay must.
void prepare(Slot &slot, const char *url, const std::string &body, long number) {
    curl_slist_free_all(slot.headers);
    slot.headers = nullptr;
    const std::string id = "00000000-0000-7000-8000-" + std::to_string(100000000000 + number);
    for (const char *name : {"ce-specversion: 1.0", "ce-type: order.placed", "ce-source: /bench/orders",
                             "ce-time: 2026-01-01T00:00:00.000000Z", "forze_event_type: order.placed",
                             "forze_occurred_at: 2026-01-01T00:00:00.000000Z",
                             "Content-Type: application/json", "Accept:", "Expect:"})
        slot.headers = curl_slist_append(slot.headers, name);
    for (const char *name :
         {"ce-id: ", "ce-partitionkey: ", "forze_event_id: ", "forze_key: ", "Idempotency-Key: "})
        slot.headers = curl_slist_append(slot.headers, (name + id).c_str());
    curl_easy_setopt(slot.easy, CURLOPT_URL, url);
    curl_easy_setopt(slot.easy, CURLOPT_HTTPHEADER, slot.headers);
    curl_easy_setopt(slot.easy, CURLOPT_POSTFIELDSIZE, static_cast<long>(body.size()));
    curl_easy_setopt(slot.easy, CURLOPT_POSTFIELDS, body.c_str());
    curl_easy_setopt(slot.easy, CURLOPT_WRITEFUNCTION, discard);
    curl_easy_setopt(slot.easy, CURLOPT_NOSIGNAL, 1L);
    curl_easy_setopt(slot.easy, CURLOPT_PROXY, "");
    curl_easy_setopt(slot.easy, CURLOPT_BUFFERSIZE, 1024L);
    curl_easy_setopt(slot.easy, CURLOPT_PRIVATE, &slot);
}

/// Takes what has ended off the multi handle and starts the next requests in its place; gives how many ended.
long turn_over(CURLM *multi, const char *url, const std::string &body, long &started, long total) {
    long ended = 0;
    int left = 0;
    while (const CURLMsg *message = curl_multi_info_read(multi, &left)) {
        CURL *easy = message->easy_handle;
        long status = 0;
        curl_easy_getinfo(easy, CURLINFO_RESPONSE_CODE, &status);
        if (message->data.result != CURLE_OK || status / 100 != 2)
            throw std::runtime_error(std::string("a request failed: ") +
                                     curl_easy_strerror(message->data.result));
        Slot *slot = nullptr;
        curl_easy_getinfo(easy, CURLINFO_PRIVATE, &slot);
        curl_multi_remove_handle(multi, easy);
        ++ended;
        if (started < total) {
            prepare(*slot, url, body, started++);
            curl_multi_add_handle(multi, easy);
        }
    }
    return ended;
}

void run(CURLM *multi, std::deque<Slot> &slots, const char *url, const std::string &body, long total) {
    long started = 0;
    for (Slot &slot : slots) {
        slot.easy = curl_easy_init();
        prepare(slot, url, body, started++);
        curl_multi_add_handle(multi, slot.easy);
    }
    for (long ended = 0; ended < total;) {
        int running = 0;
        curl_multi_perform(multi, &running);
        ended += turn_over(multi, url, body, started, total);
        if (running > 0)
            curl_multi_poll(multi, nullptr, 0, 100, nullptr);
    }
}

} // namespace

int main(int count, char **arguments) {
    if (count != 5) {
        std::fprintf(stderr, "usage: curl_loop URL REQUESTS CONCURRENCY BODY_BYTES\n");
        return 2;
    }
    const long total = std::atol(arguments[2]);
    const std::string body = make_body(static_cast<size_t>(std::atol(arguments[4])));
    curl_global_init(CURL_GLOBAL_DEFAULT);
    CURLM *multi = curl_multi_init();
    std::deque<Slot> slots(static_cast<size_t>(std::atol(arguments[3])));
    curl_multi_setopt(multi, CURLMOPT_MAXCONNECTS, static_cast<long>(slots.size()));
    const auto start = std::chrono::steady_clock::now();
    try {
        run(multi, slots, arguments[1], body, total);
    } catch (const std::exception &error) {
        std::fprintf(stderr, "curl_loop: %s\n", error.what());
        return 1;
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf("%.0f\n", static_cast<double>(total) / took.count());
    for (Slot &slot : slots) {
        curl_multi_remove_handle(multi, slot.easy);
        curl_easy_cleanup(slot.easy);
        curl_slist_free_all(slot.headers);
    }
    curl_multi_cleanup(multi);
    return 0;
}
