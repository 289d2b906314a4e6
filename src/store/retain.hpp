#pragma once

#include <optional>
#include <span>
#include <vector>

#include "store/outbox.hpp"

#include "pg/error.hpp"

namespace outbox_relay::store {

/// Retain storage (the seed, "schema"; spec.md section 5): a pass is several short transactions. The claim
/// commits rows as `processing`; publishing runs outside of any transaction; published rows are marked in
/// chunks, the others at the end; rows that were not reached go back as they were. A mark touches a row only
/// while it is `processing` since this very claim, so a late pass can't overwrite what somebody else made
/// of the row meanwhile.
///
/// A mark that fails is tried again in halves: a row that can't be marked, or a table too slow for 32 rows
/// in one statement, costs no other row its mark. What was acknowledged and could not be marked, or was not
/// sent and could not be given back, is remembered by the lane: its next pass tries again before anything
/// else, and no reclaim takes what was acknowledged. A row that alone can't be marked although others can is
/// set aside: it fails no further pass, and is tried again from time to time.
class RetainStore : public OutboxStore {
  public:
    using OutboxStore::OutboxStore;

    void begin() override;
    std::int64_t settled_late() const override { return settled_.duplicates_avoided; }
    Settled settled() const override { return settled_; }
    std::int64_t reclaim() override;
    std::vector<core::Row> claim(std::size_t max_rows) override;
    std::variant<std::string, core::Unsendable> render(const core::Row &row) override;
    void note_published(const core::Row &row) noexcept override;
    void settle(const core::Settlement &settlement) override;
    std::size_t settle_chunk() const override { return 32; }
    void commit() override;
    void rollback() noexcept override;

  private:
    /// What became of a claimed row. judged: it is to be tried again or has failed, and has no mark yet.
    enum class Fate : std::uint8_t { claimed, rendered, published, judged, settled };

    /// Marking some rows, a transaction for as many at a time as the table takes.
    struct Marking {
        std::size_t marked = 0;
        std::vector<std::size_t> left;  ///< places of the rows that could not be marked
        std::vector<std::size_t> alone; ///< of these, those that were tried alone
        std::optional<pg::Error> error; ///< the first
        int failures_in_a_row = 0;

        bool gives_up() const;
        bool table_is_at_fault() const;
    };
    template <class Mark>
    void mark_range(Marking &marking, std::size_t from, std::size_t to, Mark &&mark);
    template <class Mark>
    Marking mark_in_chunks(std::size_t count, std::size_t chunk, Mark &&mark);
    using Counter = std::int64_t Settled::*;
    template <class Mark>
    void mark_handles(const std::vector<std::uint32_t> &handles, const std::vector<Counter> &counters,
                      std::size_t chunk, Mark &&mark);

    void take_claimed(std::vector<core::Row> &rows);
    void keep_payloads();
    void settle_late();
    void mark_late(const std::vector<RowVersion> &rows, std::optional<pg::Error> &error);
    void give_back_late(const std::vector<RowVersion> &rows);
    std::int64_t mark_published(std::span<const RowVersion> rows);
    void mark_rest(const core::Settlement &settlement);
    void give_back_unsent();
    void give_back(std::span<const RowVersion> rows);
    bool is_to_go_back(std::uint32_t handle) const;
    void set_aside(std::vector<RowVersion> &versions);
    void remember();
    std::vector<RowVersion> versions_of(std::span<const std::uint32_t> handles) const;
    void require_marked(std::uint64_t done, std::span<const RowVersion> rows, const char *what);

    bool in_transaction_ = true; ///< from begin() until the claim has committed
    bool gave_back_ = false;     ///< what was not sent, as far as that is possible
    bool ended_ = false;         ///< all that a pass can do is done
    std::vector<Fate> fate_;
    std::vector<std::uint32_t> position_; ///< of each handle in claim order
    std::vector<RowVersion> late_;        ///< of earlier passes, and not settled
    std::vector<core::Uuid> unmarkable_;  ///< rows that were published and alone could not be marked
    std::optional<pg::Error> late_error_; ///< why rows of earlier passes could not be settled
    std::optional<pg::Error> error_;      ///< why rows of this pass could not be
    Settled settled_;
};

} // namespace outbox_relay::store
