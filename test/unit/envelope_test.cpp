#include "core/envelope.hpp"
#include "core/url_template.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <set>

using namespace outbox_relay::core;

namespace {

Row full_row() {
    Row row;
    row.event_id = *parse_uuid("0190a5f2-1c3e-7abc-8def-0123456789ab");
    row.event_type = "order.placed";
    row.ordering_key = "customer 3";
    row.occurred_at_us = 1'796'102'400'000'001;
    row.tenant_id = *parse_uuid("00000000-0000-0000-0000-000000000001");
    row.execution_id = *parse_uuid("00000000-0000-0000-0000-000000000002");
    row.correlation_id = *parse_uuid("00000000-0000-0000-0000-000000000003");
    row.causation_id = *parse_uuid("00000000-0000-0000-0000-000000000004");
    row.traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01";
    row.hlc = (1'796'102'400'000LL << 16) | 7;
    return row;
}

EnvelopeSettings settings() {
    EnvelopeSettings settings;
    settings.route = "orders";
    settings.url = "http://endpoint/in";
    settings.source = "/shop/orders";
    settings.user_agent = "outbox_relay/1.0";
    return settings;
}

std::map<std::string, std::string> headers_of(const std::variant<Request, NotEncodable> &built) {
    std::map<std::string, std::string> headers;
    for (const std::string &line : std::get<Request>(built).headers) {
        const std::size_t colon = line.find(": ");
        EXPECT_TRUE(headers.emplace(line.substr(0, colon), line.substr(colon + 2)).second) << line;
    }
    return headers;
}

std::string reason(const Row &row, EnvelopeSettings with = settings()) {
    const auto built = build_request(with, row, "{}");
    return std::holds_alternative<NotEncodable>(built) ? std::get<NotEncodable>(built).reason : "";
}

using Headers = std::map<std::string, std::string>;

} // namespace

TEST(Envelope, sends_both_families_whole) {
    EnvelopeSettings all = settings();
    all.hlc = all.trace = true;
    all.headers = {{"X-Key", "v"}};
    const auto built = build_request(all, full_row(), "{\"a\": 1}");
    EXPECT_EQ(std::get<Request>(built).body, "{\"a\": 1}");
    EXPECT_EQ(std::get<Request>(built).method, "POST");
    const std::string id = "0190a5f2-1c3e-7abc-8def-0123456789ab";
    const std::string tenant = "00000000-0000-0000-0000-000000000001";
    const std::string execution = "00000000-0000-0000-0000-000000000002";
    const std::string correlation = "00000000-0000-0000-0000-000000000003";
    const std::string causation = "00000000-0000-0000-0000-000000000004";
    EXPECT_EQ(headers_of(built), (Headers{{"Content-Type", "application/json"},
                                          {"Idempotency-Key", id},
                                          {"User-Agent", "outbox_relay/1.0"},
                                          {"traceparent", *full_row().traceparent},
                                          {"X-Key", "v"},
                                          {"ce-specversion", "1.0"},
                                          {"ce-id", id},
                                          {"ce-type", "order.placed"},
                                          {"ce-source", "/shop/orders"},
                                          {"ce-time", "2026-12-01T05:20:00.000001Z"},
                                          {"ce-partitionkey", "customer%203"},
                                          {"ce-correlationid", correlation},
                                          {"ce-causationid", causation},
                                          {"ce-tenantid", tenant},
                                          {"ce-executionid", execution},
                                          {"ce-hlc", "001796102400000.00007"},
                                          {"forze_event_id", id},
                                          {"forze_event_type", "order.placed"},
                                          {"forze_key", "customer%203"},
                                          {"forze_occurred_at", "2026-12-01T05:20:00.000001+00:00"},
                                          {"forze_correlation_id", correlation},
                                          {"forze_causation_id", causation},
                                          {"forze_execution_id", execution},
                                          {"forze_tenant_id", tenant},
                                          {"forze_hlc", "001796102400000.00007"}}));
}

TEST(Envelope, leaves_out_what_is_unset_or_off) {
    Row row = full_row();
    row.ordering_key.reset();
    row.tenant_id.reset();
    row.execution_id.reset();
    row.correlation_id.reset();
    row.causation_id.reset();
    const Headers headers = headers_of(build_request(settings(), row, "1"));
    EXPECT_EQ(headers.at("ce-partitionkey"), row.event_id.text());
    EXPECT_EQ(headers.at("forze_key"), row.event_id.text());
    for (const char *absent : {"ce-correlationid", "ce-causationid", "ce-tenantid", "ce-executionid",
                               "ce-hlc", "forze_tenant_id", "forze_hlc", "traceparent"})
        EXPECT_EQ(headers.count(absent), 0u) << absent;

    EnvelopeSettings none = settings();
    none.cloudevents = none.forze = false;
    EXPECT_EQ(headers_of(build_request(none, row, "1")).size(), 3u);
    none.trace = true;
    row.traceparent = "nonsense";
    EXPECT_EQ(headers_of(build_request(none, row, "1")).count("traceparent"), 0u);
    none.hlc = none.cloudevents = true;
    row.hlc = -1;
    EXPECT_EQ(headers_of(build_request(none, row, "1")).count("ce-hlc"), 0u);
}

TEST(Envelope, refuses_what_cannot_be_a_request) {
    Row row = full_row();
    EXPECT_EQ(reason(row), "");
    row.event_type = "";
    EXPECT_EQ(reason(row), "event_type is empty");
    row = full_row();
    row.occurred_at_us.reset();
    EXPECT_EQ(reason(row), "occurred_at is infinite");
    row.occurred_at_us = INT64_MAX;
    EXPECT_NE(reason(row).find("years"), std::string::npos);
    row = full_row();
    row.problem = "a problem";
    EXPECT_EQ(reason(row), "a problem");
    row = full_row();
    row.event_type = std::string(3000, ' ');
    EXPECT_NE(reason(row).find("ce-type"), std::string::npos);
    EnvelopeSettings tenants = settings();
    tenants.url = "http://endpoint/{tenant_id}";
    row = full_row();
    EXPECT_EQ(reason(row, tenants), "");
    row.tenant_id.reset();
    EXPECT_NE(reason(row, tenants).find("placeholder"), std::string::npos);
}

TEST(Envelope, no_line_can_be_split) {
    Row row = full_row();
    row.event_type = "a\r\nX-Injected: yes";
    row.ordering_key = std::string("k\0\n", 3);
    for (const auto &[name, value] : headers_of(build_request(settings(), row, "1")))
        EXPECT_EQ(value.find_first_of(std::string("\r\n\0", 3)), std::string::npos) << name;
}

TEST(Envelope, knows_its_own_headers) {
    for (const char *ours : {"CE-Anything", "forze_x", "Webhook-Id", "content-type", "Content-Length", "HOST",
                             "Transfer-Encoding", "connection", "Idempotency-Key", "TraceParent"})
        EXPECT_TRUE(is_envelope_header(ours)) << ours;
    for (const char *theirs : {"Authorization", "X-Ce-Id", "Accept"})
        EXPECT_FALSE(is_envelope_header(theirs)) << theirs;
}

TEST(UrlTemplate, finds_placeholders) {
    EXPECT_FALSE(has_placeholders("http://h/p"));
    EXPECT_TRUE(has_placeholders("http://h/{route}"));
    EXPECT_FALSE(unknown_placeholder("http://h/{event_type}/{ordering_key}/{tenant_id}/{event_id}/{route}"));
    EXPECT_EQ(unknown_placeholder("http://h/{nope}"), "{nope}");
    for (const char *bad :
         {"http://h/{", "http://h/}", "http://h/{event_type", "http://h/{}", "http://h/{{route}}"})
        EXPECT_TRUE(unknown_placeholder(bad).has_value()) << bad;
}

TEST(UrlTemplate, values_stay_in_their_place) {
    Row row = full_row();
    row.event_type = "a/../b?c#d \xc3\xa9%";
    EXPECT_EQ(fill_url("http://h/{event_type}/x", "orders", row),
              "http://h/a%2F..%2Fb%3Fc%23d%20%C3%A9%25/x");
    EXPECT_EQ(fill_url("http://h/{route}?t={tenant_id}", "or ders", row),
              "http://h/or%20ders?t=00000000-0000-0000-0000-000000000001");
    row.event_type = "..";
    EXPECT_FALSE(fill_url("http://h/{event_type}/x", "orders", row).has_value());
    row.ordering_key.reset();
    EXPECT_FALSE(fill_url("http://h/{ordering_key}", "orders", row).has_value());
    row.ordering_key = "";
    EXPECT_FALSE(fill_url("http://h/{ordering_key}", "orders", row).has_value());
    row.tenant_id.reset();
    EXPECT_FALSE(fill_url("http://h/{tenant_id}", "orders", row).has_value());
}
