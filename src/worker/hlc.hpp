#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/hlc.hpp"

namespace outbox_relay::worker {

/// The server's Hybrid Logical Clock: one word in shared memory (spec.md section 7). With
/// outbox_relay.hlc_checkpoint a session lifts the clock to the committed marks before its first stamp,
/// and a transaction that stamped advances the mark of its node_key just before it commits, by the
/// recipe of mechanisms.md section 10.

/// `count` new stamps of this transaction, at least one: the first; the others follow without a gap.
/// Raises 55000 when the library is not preloaded or the checkpoint can't be used, 25006 in recovery,
/// 22008 when the clock has no stamp left or a mark can't be followed.
std::int64_t take_stamps(std::size_t count);

/// What a merge did: a stamp, or why there is none.
core::HlcClock::Stamp merge_stamp(std::int64_t remote);

/// The largest stamp that the clock has given or merged; 0: none yet. Raises 55000 without preload.
std::int64_t last_stamp();

} // namespace outbox_relay::worker
