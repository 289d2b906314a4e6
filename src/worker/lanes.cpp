#include "worker/lanes.hpp"

#include <algorithm>
#include <cstring>

#include "core/text.hpp"
#include "settings/settings.hpp"
#include "worker/memory.hpp"

#include "pg/clock.hpp"
#include "pg/entry.hpp"
#include "pg/guard.hpp"

extern "C" {
#include "postmaster/bgworker.h"
#include "storage/ipc.h"
#include "storage/latch.h"
#include "storage/proc.h"
#include "storage/shmem.h"
#include "utils/hsearch.h"
#include "utils/timestamp.h"
}

namespace outbox_relay::worker {

namespace {

/// Entry of the shared hash from key to slot.
struct LaneEntry {
    LaneKey key;
    int index;
};

constexpr const char *kTranche = "outbox_relay lanes";

Shared *shared_memory = nullptr;
Lane *lanes = nullptr;
WorkerSlot *workers = nullptr;
HTAB *lane_hash = nullptr;

shmem_request_hook_type previous_request_hook = nullptr;
shmem_startup_hook_type previous_startup_hook = nullptr;

Size lanes_bytes() {
    return mul_size(static_cast<Size>(settings::parameters.max_lanes), sizeof(Lane));
}

Size workers_bytes() {
    return mul_size(static_cast<Size>(max_worker_processes), sizeof(WorkerSlot));
}

void initialise_lane(Lane &lane) {
    std::memset(static_cast<void *>(&lane), 0, sizeof(lane));
    lane.holder = -1;
    lane.remembered_chunk = -1;
    pg_atomic_init_u64(&lane.wake_us, 0);
    pg_atomic_init_u64(&lane.live_claim, 0);
    pg_atomic_init_u32(&lane.in_flight, 0);
}

void initialise() {
    std::memset(static_cast<void *>(shared_memory), 0, sizeof(Shared));
    shared_memory->lock = &GetNamedLWLockTranche(kTranche)->lock;
    shared_memory->max_lanes = settings::parameters.max_lanes;
    shared_memory->max_workers = max_worker_processes;
    pg_atomic_init_u32(&shared_memory->launcher_proc, 0);
    pg_atomic_init_u32(&shared_memory->launcher_told, 0);
    pg_atomic_init_u32(&shared_memory->lost_pokes, 0);
    for (Database &database : shared_memory->databases)
        for (pg_atomic_uint32 *count : {&database.pokes, &database.lists})
            pg_atomic_init_u32(count, 0);
    for (int i = 0; i < shared_memory->max_lanes; ++i)
        initialise_lane(lanes[i]);
    for (int i = 0; i < shared_memory->max_workers; ++i) {
        std::memset(static_cast<void *>(&workers[i]), 0, sizeof(WorkerSlot));
        workers[i].lane = -1;
        pg_atomic_init_u32(&workers[i].proc, 0);
        pg_atomic_init_u32(&workers[i].waiting, 0);
    }
}

extern "C" {

static void outbox_relay_shmem_request() {
    if (previous_request_hook != nullptr)
        previous_request_hook();
    RequestAddinShmemSpace(sizeof(Shared));
    RequestAddinShmemSpace(lanes_bytes());
    RequestAddinShmemSpace(workers_bytes());
    RequestAddinShmemSpace(memory_bytes());
    RequestAddinShmemSpace(hash_estimate_size(settings::parameters.max_lanes, sizeof(LaneEntry)));
    RequestNamedLWLockTranche(kTranche, 1);
}

static void outbox_relay_shmem_startup() {
    if (previous_startup_hook != nullptr)
        previous_startup_hook();
    LWLockAcquire(AddinShmemInitLock, LW_EXCLUSIVE);
    bool found = false;
    bool found_other = false;
    shared_memory = static_cast<Shared *>(ShmemInitStruct("outbox_relay", sizeof(Shared), &found));
    lanes = static_cast<Lane *>(ShmemInitStruct("outbox_relay lanes", lanes_bytes(), &found_other));
    workers =
        static_cast<WorkerSlot *>(ShmemInitStruct("outbox_relay workers", workers_bytes(), &found_other));
    void *memory = ShmemInitStruct("outbox_relay rows", memory_bytes(), &found_other);
    attach_memory(memory);
    if (!found) {
        initialise();
        initialise_memory(memory);
    }
    HASHCTL control;
    std::memset(&control, 0, sizeof(control));
    control.keysize = sizeof(LaneKey);
    control.entrysize = sizeof(LaneEntry);
    lane_hash = ShmemInitHash("outbox_relay lane keys", settings::parameters.max_lanes,
                              settings::parameters.max_lanes, &control, HASH_ELEM | HASH_BLOBS);
    LWLockRelease(AddinShmemInitLock);
}
}

} // namespace

void request_shared_memory() {
    previous_request_hook = shmem_request_hook;
    shmem_request_hook = outbox_relay_shmem_request;
    previous_startup_hook = shmem_startup_hook;
    shmem_startup_hook = outbox_relay_shmem_startup;
}

Shared *shared() {
    return shared_memory;
}

Lane &lane_at(int index) {
    return lanes[index];
}

WorkerSlot &worker_at(int index) {
    return workers[index];
}

LockedLanes::LockedLanes(LWLockMode mode) {
    pg::guard([mode] { (void)LWLockAcquire(shared_memory->lock, mode); });
}

LockedLanes::~LockedLanes() {
    LWLockRelease(shared_memory->lock);
}

LaneKey lane_key(Oid database, const std::string &route, const std::optional<core::Uuid> &tenant) {
    LaneKey key;
    std::memset(static_cast<void *>(&key), 0, sizeof(key));
    key.database = database;
    strlcpy(key.route, route.c_str(), sizeof(key.route));
    if (tenant) {
        key.has_tenant = 1;
        std::memcpy(key.tenant, tenant->bytes.data(), sizeof(key.tenant));
    }
    return key;
}

std::optional<core::Uuid> tenant_of(const LaneKey &key) {
    if (key.has_tenant == 0)
        return std::nullopt;
    core::Uuid tenant;
    std::memcpy(tenant.bytes.data(), key.tenant, tenant.bytes.size());
    return tenant;
}

int find_lane(const LaneKey &key) {
    const auto *entry = static_cast<const LaneEntry *>(hash_search(lane_hash, &key, HASH_FIND, nullptr));
    return entry == nullptr ? -1 : entry->index;
}

namespace {

/// Nobody would miss it: its route is paused, bound elsewhere or of a database that nothing is relayed in.
bool is_abandoned(const Lane &lane) {
    return lane.used && !lane.served && lane.holder < 0 && lane.remembered_rows == 0;
}

/// A free slot, else an abandoned one, which is given back first. Looks on where it last found one: thousands
/// of lanes may be made in a row.
int free_lane() {
    static int last = 0;
    int abandoned = -1;
    for (int i = 0; i < shared_memory->max_lanes; ++i) {
        const int at = (last + i) % shared_memory->max_lanes;
        if (!lanes[at].used)
            return last = at;
        if (abandoned < 0 && is_abandoned(lanes[at]))
            abandoned = at;
    }
    if (abandoned >= 0)
        drop_lane(abandoned);
    return abandoned;
}

bool may_give_way(const Lane &lane, std::int64_t due_us, bool for_list) {
    return lane.used && lane.holder < 0 && lane.remembered_rows == 0 && lane.due_us > due_us &&
           (!lane.lists_tenants || for_list) &&
           pg_atomic_read_u64(const_cast<pg_atomic_uint64 *>(&lane.wake_us)) == 0;
}

/// What gives way first: a healthy lane, and of these the one that is due last.
bool gives_way_before(const Lane &lane, const Lane &other) {
    const bool healthy = lane.health.failures == 0 && lane.health.publish_failures == 0;
    const bool other_healthy = other.health.failures == 0 && other.health.publish_failures == 0;
    return healthy != other_healthy ? healthy : lane.due_us > other.due_us;
}

} // namespace

int make_lane(const LaneKey &key) {
    const int known = find_lane(key);
    if (known >= 0)
        return known;
    const int index = free_lane();
    if (index < 0)
        return -1;
    bool found = false;
    auto *entry = static_cast<LaneEntry *>(hash_search(lane_hash, &key, HASH_ENTER_NULL, &found));
    if (entry == nullptr)
        return -1;
    entry->index = index;
    Lane &lane = lanes[index];
    const std::uint32_t generation = lane.generation + 1;
    initialise_lane(lane);
    lane.used = true;
    lane.generation = generation;
    lane.key = key;
    lane.served = true;
    lane.state = LaneState::due;
    lane.due_us = 0;
    lane.stats_reset = GetCurrentTimestamp();
    return index;
}

int seize_lane(const LaneKey &key, std::int64_t due_us, bool for_list) {
    int victim = -1;
    for (int i = 0; i < shared_memory->max_lanes; ++i)
        if (may_give_way(lanes[i], due_us, for_list) &&
            (victim < 0 || gives_way_before(lanes[i], lanes[victim])))
            victim = i;
    if (victim < 0)
        return -1;
    drop_lane(victim);
    return make_lane(key);
}

void drop_lane(int index) {
    Lane &lane = lanes[index];
    forget_rows(lane);
    (void)hash_search(lane_hash, &lane.key, HASH_REMOVE, nullptr);
    lane.used = false;
    ++lane.generation;
}

namespace {

bool has_worker(Oid database) {
    for (int i = 0; i < shared_memory->max_workers; ++i)
        if (workers[i].used && workers[i].database == database)
            return true;
    return false;
}

/// Frees the slot of a database that has nothing to relay, and its lanes; -1 when all have something.
int free_idle_database() {
    for (int i = 0; i < kMaxDatabases; ++i) {
        Database &database = shared_memory->databases[i];
        const Oid oid = database.oid;
        if (database.state != DatabaseState::no_routes || has_worker(oid))
            continue;
        database.oid = InvalidOid;
        pg_memory_barrier();
        // Who pokes it counts first and then looks whether it still is this database's (wake.cpp).
        if (pg_atomic_read_u32(&database.pokes) != database.pokes_seen) {
            database.oid = oid;
            continue;
        }
        for (int at = 0; at < shared_memory->max_lanes; ++at)
            if (lanes[at].used && lanes[at].key.database == oid)
                drop_lane(at);
        return i;
    }
    return -1;
}

} // namespace

int find_database(Oid oid, bool make) {
    int free_slot = -1;
    for (int i = 0; i < kMaxDatabases; ++i) {
        const Database &database = shared_memory->databases[i];
        if (database.oid == oid)
            return i;
        if (database.oid == InvalidOid && free_slot < 0)
            free_slot = i;
    }
    if (!make)
        return -1;
    if (free_slot < 0)
        free_slot = free_idle_database();
    if (free_slot < 0)
        return -1;
    Database &database = shared_memory->databases[free_slot];
    database.state = DatabaseState::unknown;
    database.pokes_seen = 0;
    database.last_start_us = 0;
    database.failures = 0;
    database.drains_beyond = -1;
    database.no_slot = false;
    database.overflow_warned = false;
    std::memset(database.foreign_warned, 0, sizeof(database.foreign_warned));
    pg_atomic_write_u32(&database.pokes, 0);
    database.oid = oid;
    return free_slot;
}

void wake_process(std::uint32_t proc_plus_one) {
    if (proc_plus_one != 0)
        SetLatch(&GetPGProcByNumber(static_cast<int>(proc_plus_one - 1))->procLatch);
}

void wake_worker(Oid database) {
    for (int i = 0; i < shared_memory->max_workers; ++i) {
        WorkerSlot &worker = workers[i];
        if (worker.database != database || pg_atomic_read_u32(&worker.waiting) == 0)
            continue;
        std::uint32_t expected = 1;
        if (!pg_atomic_compare_exchange_u32(&worker.waiting, &expected, 0))
            continue;
        wake_process(pg_atomic_read_u32(&worker.proc));
        return;
    }
}

void copy_text(char *field, std::size_t size, const std::string &text) {
    const std::string cut = core::clean_text(text, size - 1);
    std::memcpy(field, cut.data(), cut.size());
    field[cut.size()] = '\0';
}

bool shared_memory_ready() {
    return shared_memory != nullptr;
}

} // namespace outbox_relay::worker
