#include "worker/memory.hpp"

#include <algorithm>
#include <array>
#include <cstring>

#include "worker/lanes.hpp"

#include "pg/clock.hpp"

namespace outbox_relay::worker {

namespace {

constexpr int kChunkRows = 64;
constexpr int kChunks = 1024;
constexpr std::uint32_t kKeep_s = 3600;

/// Rows of one lane; chunks of a lane are chained, the newest first.
struct Chunk {
    int next; ///< index, -1: none
    int count;
    store::RowVersion rows[kChunkRows];
};

struct Memory {
    int free; ///< first chunk that nobody uses
    Chunk chunks[kChunks];
};

Memory *memory = nullptr;

/// Whether the next row of the lane needs another chunk.
bool is_full(const Lane &lane) {
    return lane.remembered_chunk < 0 || memory->chunks[lane.remembered_chunk].count == kChunkRows;
}

/// Gives the lane a further chunk; false when all are in use. Under the lock, exclusive.
bool grow(Lane &lane) {
    const int index = memory->free;
    if (index < 0)
        return false;
    Chunk &chunk = memory->chunks[index];
    memory->free = chunk.next;
    chunk.count = 0;
    chunk.next = lane.remembered_chunk;
    lane.remembered_chunk = index;
    return true;
}

std::uint32_t now_s() {
    return static_cast<std::uint32_t>(pg::monotonic_us() / 1'000'000);
}

/// Into the lane's first chunk, which has room.
void append(Lane &lane, const store::RowVersion &version) {
    Chunk &chunk = memory->chunks[lane.remembered_chunk];
    store::RowVersion &kept = chunk.rows[chunk.count];
    kept = version;
    if (kept.since_s == 0)
        kept.since_s = now_s();
    // Last, since the process may end between any two lines, and others may be reading.
    pg_write_barrier();
    ++chunk.count;
    ++lane.remembered_rows;
    if (version.why == store::Remembered::aside)
        ++lane.set_aside;
}

/// Calls `visit` with each row that the lane remembers.
template <class Visit>
void for_each(const Lane &lane, Visit &&visit) {
    for (int at = lane.remembered_chunk; at >= 0; at = memory->chunks[at].next) {
        Chunk &chunk = memory->chunks[at];
        const int count = chunk.count;
        pg_read_barrier();
        for (int i = 0; i < count; ++i)
            visit(chunk.rows[i]);
    }
}

/// The rows of a lane that were let go since its holder loaded them. In fixed memory: nothing may be thrown.
class LetGo {
  public:
    explicit LetGo(const Lane &lane) {
        for_each(lane, [this](const store::RowVersion &version) {
            if (version.why == store::Remembered::let_go && count_ < ids_.size())
                ids_[count_++] = version.id;
        });
    }

    bool has(const store::RowVersion &version) const {
        return version.why == store::Remembered::aside &&
               std::find(ids_.begin(), ids_.begin() + count_, version.id) != ids_.begin() + count_;
    }

  private:
    std::array<core::Uuid, store::kMaxAside> ids_;
    std::size_t count_ = 0;
};

} // namespace

std::size_t memory_bytes() {
    return sizeof(Memory);
}

void initialise_memory(void *place) {
    attach_memory(place);
    memory->free = 0;
    for (int i = 0; i < kChunks; ++i)
        memory->chunks[i].next = i + 1 == kChunks ? -1 : i + 1;
}

void attach_memory(void *place) {
    memory = static_cast<Memory *>(place);
}

void forget_rows(Lane &lane) noexcept {
    while (lane.remembered_chunk >= 0) {
        Chunk &chunk = memory->chunks[lane.remembered_chunk];
        const int next = chunk.next;
        chunk.next = memory->free;
        memory->free = lane.remembered_chunk;
        lane.remembered_chunk = next;
    }
    lane.remembered_rows = 0;
    lane.set_aside = 0;
}

std::vector<AsideRow> rows_aside(const std::string &route) {
    std::vector<AsideRow> rows;
    if (shared() == nullptr)
        return rows;
    LockedLanes locked(LW_SHARED);
    for (int i = 0; i < shared()->max_lanes; ++i) {
        const Lane &lane = lane_at(i);
        if (!lane.used || lane.set_aside == 0 || lane.key.database != MyDatabaseId || route != lane.key.route)
            continue;
        for_each(lane, [&](const store::RowVersion &version) {
            if (version.why == store::Remembered::aside)
                rows.push_back({i, lane.generation, version});
        });
    }
    return rows;
}

void let_go(Lane &lane, const core::Uuid *id) noexcept {
    for_each(lane, [&lane, id](store::RowVersion &version) {
        if (version.why != store::Remembered::aside || (id != nullptr && version.id != *id))
            return;
        version.why = store::Remembered::let_go;
        --lane.set_aside;
    });
}

std::vector<store::RowVersion> LaneMemory::load() {
    const Lane &lane = lane_at(lane_);
    std::vector<store::RowVersion> versions;
    versions.reserve(lane.remembered_rows);
    const std::uint32_t now = now_s();
    for_each(lane, [&](const store::RowVersion &version) {
        if (version.why == store::Remembered::aside ||
            (version.why != store::Remembered::let_go &&
             (version.taken_at != 0 || now - version.since_s < kKeep_s)))
            versions.push_back(version);
    });
    return versions;
}

void LaneMemory::add(const store::RowVersion &version) noexcept {
    Lane &lane = lane_at(lane_);
    if (lane.remembered_rows >= kMaxPerLane)
        return;
    if (is_full(lane)) {
        LockedLanes locked(LW_EXCLUSIVE);
        if (!grow(lane))
            return;
    }
    append(lane, version);
}

void LaneMemory::replace(std::span<const store::RowVersion> versions) noexcept {
    Lane &lane = lane_at(lane_);
    if (lane.remembered_rows == 0 && versions.empty())
        return;
    // In one: who reads meanwhile sees the old rows or the new ones.
    LockedLanes locked(LW_EXCLUSIVE);
    const LetGo gone(lane);
    forget_rows(lane);
    for (const store::RowVersion &version : versions) {
        if (gone.has(version))
            continue;
        if (lane.remembered_rows >= kMaxPerLane || (is_full(lane) && !grow(lane)))
            return;
        append(lane, version);
    }
}

std::int64_t LaneMemory::live_claim() const noexcept {
    return static_cast<std::int64_t>(pg_atomic_read_u64(&lane_at(lane_).live_claim));
}

void LaneMemory::set_live_claim(std::int64_t processing_at) noexcept {
    pg_atomic_write_u64(&lane_at(lane_).live_claim, static_cast<std::uint64_t>(processing_at));
}

} // namespace outbox_relay::worker
