#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>

namespace outbox_relay::core {

/// Hybrid Logical Clock stamps (the seed, "Causal ordering"; spec.md section 7). A stamp is packed as
/// milliseconds since 1970 << 16 | logical, a signed 64-bit value that is never negative.
namespace hlc {

inline constexpr int kLogicalBits = 16;
inline constexpr std::int64_t kMaxLogical = (std::int64_t{1} << kLogicalBits) - 1;
inline constexpr std::int64_t kMaxMs = INT64_MAX >> kLogicalBits;
/// "PPPPPPPPPPPPPPP.LLLLL": sorts as text like the value.
inline constexpr std::size_t kTextSize = 21;

/// The stamp of these parts; nothing when one is negative or too large for its place.
std::optional<std::int64_t> pack(std::int64_t ms, std::int64_t logical);

/// The parts of a stamp that is not negative.
constexpr std::int64_t physical_ms(std::int64_t stamp) {
    return stamp >> kLogicalBits;
}
constexpr std::int64_t logical(std::int64_t stamp) {
    return stamp & kMaxLogical;
}

/// The text form of a stamp that is not negative: 15 digits of milliseconds, a dot, 5 of the logical
/// part.
std::string text(std::int64_t stamp);

/// The stamp of exactly that form; nothing for any other text.
std::optional<std::int64_t> parse(std::string_view text);

} // namespace hlc

/// A clock over one word that processes may share. Lock-free; every stamp that any of them is given is
/// larger than all those given or merged before. The wall time, milliseconds since 1970, is the
/// caller's; one before 1970 counts as 1970.
class HlcClock {
  public:
    /// `last` is the largest stamp so far, 0 at first, aligned to its size.
    explicit HlcClock(std::int64_t &last) : last_(last) {}

    enum class Problem {
        none,
        malformed, ///< a negative stamp
        drift,     ///< further ahead of the wall clock than allowed
        exhausted  ///< the largest stamp has been given, or a mark leaves too little room above it
    };

    struct Stamp {
        std::int64_t value = 0; ///< the first of those asked for; the others follow without a gap
        Problem problem = Problem::none;
    };

    /// `count` new stamps, at least one: the first is max(wall << 16, last + 1).
    Stamp now(std::int64_t wall_ms, std::size_t count = 1);

    /// Merges a stamp of another clock and gives a new one above it: max(wall << 16, last + 1,
    /// remote + 1). Refuses, changing nothing, one more than `max_drift_ms` ahead of the wall.
    Stamp update(std::int64_t remote, std::int64_t wall_ms, std::int64_t max_drift_ms);

    /// Lifts the clock to `mark`, no drift guard; an older one changes nothing. Refused are a negative
    /// mark and one within kHeadroom of the largest value, which would soon leave no stamp to give.
    Problem resume(std::int64_t mark);

    /// The largest stamp so far; 0: none.
    std::int64_t last() const;

    /// Room that a mark has to leave: about fifty days of milliseconds.
    static constexpr std::int64_t kHeadroom = std::int64_t{1} << 48;

  private:
    Stamp issue(std::int64_t floor, std::size_t count);

    std::int64_t &last_;
};

} // namespace outbox_relay::core
