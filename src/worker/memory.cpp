#include "worker/memory.hpp"

#include <algorithm>
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

/// A free chunk, -1 when all are in use. Under the lock, exclusive.
int take_chunk() {
    const int index = memory->free;
    if (index >= 0)
        memory->free = memory->chunks[index].next;
    return index;
}

std::uint32_t now_s() {
    return static_cast<std::uint32_t>(pg::monotonic_us() / 1'000'000);
}

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

std::vector<store::RowVersion> LaneMemory::load() {
    const Lane &lane = lane_at(lane_);
    std::vector<store::RowVersion> versions;
    versions.reserve(lane.remembered_rows);
    const std::uint32_t now = now_s();
    for (int at = lane.remembered_chunk; at >= 0; at = memory->chunks[at].next) {
        const Chunk &chunk = memory->chunks[at];
        std::copy_if(chunk.rows, chunk.rows + chunk.count, std::back_inserter(versions),
                     [now](const store::RowVersion &version) {
                         return version.why == store::Remembered::aside || version.taken_at != 0 ||
                                now - version.since_s < kKeep_s;
                     });
    }
    return versions;
}

namespace {

bool is_full(const Lane &lane) {
    return lane.remembered_chunk < 0 || memory->chunks[lane.remembered_chunk].count == kChunkRows;
}

/// Under the lock, exclusive.
void add_chunk(Lane &lane) noexcept {
    const int chunk = take_chunk();
    if (chunk < 0)
        return;
    memory->chunks[chunk].count = 0;
    memory->chunks[chunk].next = lane.remembered_chunk;
    lane.remembered_chunk = chunk;
}

/// Needs a chunk with room, else the row is forgotten.
void put(Lane &lane, const store::RowVersion &version) noexcept {
    if (lane.remembered_rows >= kMaxPerLane || is_full(lane))
        return;
    Chunk &chunk = memory->chunks[lane.remembered_chunk];
    store::RowVersion &kept = chunk.rows[chunk.count];
    kept = version;
    if (kept.since_s == 0)
        kept.since_s = now_s();
    // Last, since the process may end between any two lines, and others may read.
    pg_write_barrier();
    ++chunk.count;
    ++lane.remembered_rows;
    if (version.why == store::Remembered::aside)
        ++lane.set_aside;
}

} // namespace

void LaneMemory::add(const store::RowVersion &version) noexcept {
    Lane &lane = lane_at(lane_);
    if (is_full(lane)) {
        LockedLanes locked(LW_EXCLUSIVE);
        add_chunk(lane);
    }
    put(lane, version);
}

void LaneMemory::replace(std::span<const store::RowVersion> versions) noexcept {
    Lane &lane = lane_at(lane_);
    if (versions.empty() && lane.remembered_chunk < 0)
        return;
    // As one step for who looks under the lock: a pass on demand must not miss what is remembered throughout.
    LockedLanes locked(LW_EXCLUSIVE);
    forget_rows(lane);
    for (const store::RowVersion &version : versions) {
        if (is_full(lane))
            add_chunk(lane);
        put(lane, version);
    }
}

std::int64_t LaneMemory::live_claim() const noexcept {
    return static_cast<std::int64_t>(pg_atomic_read_u64(&lane_at(lane_).live_claim));
}

void LaneMemory::set_live_claim(std::int64_t processing_at) noexcept {
    pg_atomic_write_u64(&lane_at(lane_).live_claim, static_cast<std::uint64_t>(processing_at));
}

} // namespace outbox_relay::worker
