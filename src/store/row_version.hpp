#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "core/uuid.hpp"

#include "pg/postgres.hpp"

extern "C" {
#include "access/transam.h"
#include "storage/itemptr.h"
}

namespace outbox_relay::store {

/// Why a lane remembers a version of a row.
enum class Remembered : std::uint8_t {
    published, ///< the endpoint has acknowledged it, no pass has settled it yet
    suspect,   ///< it was alone in a pass that failed to settle
    warned,    ///< it was a suspect, and another row then settled alone; not left out
    aside,     ///< it alone fails to settle: passes leave it out
    let_go,    ///< it was set aside, and somebody asked for another try
    unsent     ///< retain: claimed by a pass that sent nothing of it, and not given back yet
};

/// A version of a row. (relation, id, xmin) is its identity: VACUUM FULL and CLUSTER move rows under
/// the same relation and xmin, so a place alone would name another row afterwards. The place is kept
/// all the same: where it differs the answer is "unknown", which costs a duplicate, never a loss.
struct RowVersion {
    core::Uuid id;
    Oid relation = InvalidOid;
    TransactionId xmin = InvalidTransactionId;
    ItemPointerData ctid{};
    Remembered why = Remembered::published;
    std::uint32_t since_s = 0; ///< monotonic seconds; 0: filled in when it is remembered
    /// On retain storage what identifies the row instead: processing_at of the claim that committed it as
    /// `processing` (as timestamptz has it). 0: a version that is still as it was claimed.
    std::int64_t taken_at = 0;

    /// The endpoint has it, and the row is still `processing`: to reclaim it would be to send it again.
    bool is_acknowledged_in_processing() const {
        return taken_at != 0 && (why == Remembered::published || why == Remembered::aside);
    }

    bool same_version(const RowVersion &other) const {
        return id == other.id && relation == other.relation && xmin == other.xmin &&
               taken_at == other.taken_at &&
               ItemPointerEquals(const_cast<ItemPointer>(&ctid), const_cast<ItemPointer>(&other.ctid));
    }
};

/// Rows that a lane sets aside at most.
constexpr std::size_t kMaxAside = 100;

/// What a lane remembers of rows between its passes, also when the process that knew has ended.
class RowMemory {
  public:
    virtual ~RowMemory() = default;

    virtual std::vector<RowVersion> load() = 0;
    /// Adds one version; kept whatever becomes of the pass or the process.
    virtual void add(const RowVersion &version) noexcept = 0;
    virtual void replace(std::span<const RowVersion> versions) noexcept = 0;

    /// processing_at of the lane's live pass on retain storage (microseconds since 2000, as timestamptz
    /// has it; 0: none): rows that nobody may take for stale.
    virtual std::int64_t live_claim() const noexcept = 0;
    virtual void set_live_claim(std::int64_t processing_at) noexcept = 0;
};

} // namespace outbox_relay::store
