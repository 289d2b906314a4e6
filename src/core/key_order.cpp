#include "core/key_order.hpp"

#include "core/no_postgres.hpp"

namespace outbox_relay::core {

void KeyOrder::add(std::size_t row, const std::optional<std::string> &key, bool ordered) {
    if (!ordered || !key) {
        ready_.push(row);
        return;
    }
    const auto [line, first] = lines_.try_emplace(*key);
    line_of_.emplace(row, &line->second);
    if (first) {
        ready_.push(row);
        return;
    }
    line->second.push_back(row);
    ++waiting_;
}

std::optional<std::size_t> KeyOrder::next() {
    if (ready_.empty())
        return std::nullopt;
    const std::size_t row = ready_.top();
    ready_.pop();
    return row;
}

void KeyOrder::done(std::size_t row) {
    const auto known = line_of_.find(row);
    if (known == line_of_.end() || known->second->empty())
        return;
    ready_.push(known->second->front());
    known->second->pop_front();
    --waiting_;
}

} // namespace outbox_relay::core
