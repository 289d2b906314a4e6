#pragma once

#include <cstddef>
#include <deque>
#include <functional>
#include <optional>
#include <queue>
#include <string>
#include <unordered_map>
#include <vector>

namespace outbox_relay::core {

/// Hands out the rows of a pass so that rows of one key never overlap and keep their claim order
/// (`ordering = key`); rows without a key are free. Rows are named by their index in claim order.
class KeyOrder {
  public:
    /// Adds a row behind those added before. No key, or `ordered` false: free.
    void add(std::size_t row, const std::optional<std::string> &key, bool ordered);

    /// The next row that may be sent now, the first in claim order among the ready ones; nothing when
    /// every remaining row waits for its key or none is left.
    std::optional<std::size_t> next();

    /// The row has ended, whatever its outcome: the next row of its key becomes ready.
    void done(std::size_t row);

    bool has_ready() const { return !ready_.empty(); }
    /// No row is left to be handed out, now or later.
    bool empty() const { return ready_.empty() && waiting_ == 0; }

  private:
    using Lines = std::unordered_map<std::string, std::deque<std::size_t>>;

    std::priority_queue<std::size_t, std::vector<std::size_t>, std::greater<>> ready_;
    Lines lines_; ///< of each key with a row ready or handed out: the rows that wait behind it
    std::unordered_map<std::size_t, std::deque<std::size_t> *> line_of_;
    std::size_t waiting_ = 0;
};

} // namespace outbox_relay::core
