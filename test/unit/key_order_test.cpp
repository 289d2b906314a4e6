#include "core/key_order.hpp"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

using namespace outbox_relay::core;

namespace {

void run_schedule(std::uint64_t seed, bool ordered) {
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    const std::size_t rows = 1 + random() % 80;
    KeyOrder order;
    std::vector<std::optional<std::string>> keys;
    for (std::size_t i = 0; i < rows; ++i) {
        keys.push_back(random() % 5 == 0 ? std::nullopt : std::optional(std::to_string(random() % 6)));
        order.add(i, keys[i], ordered);
    }
    std::set<std::size_t> out, seen;
    std::map<std::string, std::size_t> last;
    while (!order.empty() || !out.empty()) {
        if (order.has_ready() && random() % 3 != 0) {
            const std::optional<std::size_t> row = order.next();
            ASSERT_TRUE(row.has_value());
            ASSERT_TRUE(seen.insert(*row).second) << "handed out twice";
            if (ordered && keys[*row]) {
                for (const std::size_t other : out)
                    ASSERT_NE(keys[other], keys[*row]) << "two of one key at once";
                if (last.count(*keys[*row]) > 0) {
                    ASSERT_LT(last[*keys[*row]], *row) << "out of order";
                }
                last[*keys[*row]] = *row;
            }
            out.insert(*row);
        } else if (!out.empty()) {
            auto ended = out.begin();
            std::advance(ended, static_cast<std::ptrdiff_t>(random() % out.size()));
            order.done(*ended);
            out.erase(ended);
        }
    }
    EXPECT_EQ(seen.size(), rows);
    EXPECT_FALSE(order.next().has_value());
}

} // namespace

TEST(KeyOrder, keeps_keys_in_line_whatever_the_schedule) {
    for (std::uint64_t seed = 1; seed <= 2000; ++seed)
        run_schedule(seed, true);
}

TEST(KeyOrder, holds_nothing_where_there_is_no_order) {
    for (std::uint64_t seed = 1; seed <= 200; ++seed)
        run_schedule(seed, false);
    KeyOrder order;
    order.add(0, "k", false);
    order.add(1, "k", false);
    EXPECT_EQ(order.next(), 0u);
    EXPECT_EQ(order.next(), 1u);
}

TEST(KeyOrder, takes_the_earliest_ready_row) {
    KeyOrder order;
    order.add(0, "a", true);
    order.add(1, "a", true);
    order.add(2, "b", true);
    EXPECT_EQ(order.next(), 0u);
    EXPECT_EQ(order.next(), 2u);
    EXPECT_FALSE(order.next().has_value());
    EXPECT_FALSE(order.empty());
    order.done(0);
    EXPECT_EQ(order.next(), 1u);
    EXPECT_TRUE(order.empty());
}
