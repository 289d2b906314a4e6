#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "store/row_version.hpp"

namespace outbox_relay::worker {

struct Lane;

/// What lanes remember of rows, in shared memory, since any worker may take a lane's next pass, and
/// since the process that knew may have ended: a pool of chunks shared by all lanes; when it is used
/// up, or for more than kMaxPerLane rows, a lane forgets, which may cost duplicates.
constexpr std::uint32_t kMaxPerLane = 100'000;

std::size_t memory_bytes();
void initialise_memory(void *memory);
void attach_memory(void *memory);

/// A row that a lane has set aside.
struct AsideRow {
    int lane;
    std::uint32_t generation; ///< of the lane
    store::RowVersion version;
};

/// What the lanes of a route of this database have set aside; nothing when the library was not preloaded.
std::vector<AsideRow> rows_aside(const std::string &route);

/// The lane's next pass leaves the row `id` out no more (nullptr: none of those set aside), also when a pass
/// is under way that still knows it. Under the lock, exclusive.
void let_go(Lane &lane, const core::Uuid *id) noexcept;

/// The memory of one lane; only the lane's holder changes it, but for let_go(); others load it under the
/// lock, shared.
class LaneMemory : public store::RowMemory {
  public:
    explicit LaneMemory(int lane) : lane_(lane) {}

    /// Without versions older than an hour that are known by their transaction id: it may come round again.
    std::vector<store::RowVersion> load() override;
    void add(const store::RowVersion &version) noexcept override;
    void replace(std::span<const store::RowVersion> versions) noexcept override;
    std::int64_t live_claim() const noexcept override;
    void set_live_claim(std::int64_t processing_at) noexcept override;

  private:
    const int lane_;
};

/// Gives all that a lane remembers back. Under the lock, exclusive.
void forget_rows(Lane &lane) noexcept;

} // namespace outbox_relay::worker
