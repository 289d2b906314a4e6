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
/// in one statement, costs no other row its mark. Rows that were acknowledged and are not marked when a
/// pass fails are remembered by the lane, and marked by its next pass before anything else.
class RetainStore : public OutboxStore {
  public:
    using OutboxStore::OutboxStore;

    void begin() override;
    std::int64_t settled_late() const override { return marked_late_; }
    std::int64_t reclaim() override;
    std::vector<core::Row> claim(std::size_t max_rows) override;
    std::variant<std::string, core::Unsendable> render(const core::Row &row) override;
    void note_published(const core::Row &row) noexcept override;
    void settle(const core::Settlement &settlement) override;
    std::size_t settle_chunk() const override { return 32; }
    void commit() override;
    void rollback() noexcept override;

  private:
    /// What became of a claimed row; unmarkable: its mark fails, others do not.
    enum class Fate : std::uint8_t { claimed, rendered, published, settled, unmarkable };

    /// Marking some rows, a transaction for as many at a time as the table takes.
    struct Marking {
        std::size_t marked = 0;
        std::vector<std::size_t> left;  ///< places of the rows that could not be marked
        std::optional<pg::Error> error; ///< the first
        int failures_in_a_row = 0;

        bool gives_up() const;
        bool table_is_at_fault() const;
    };
    template <class Mark>
    void mark_range(Marking &marking, std::size_t from, std::size_t to, Mark &&mark);
    template <class Mark>
    void mark_handles(const std::vector<std::uint32_t> &handles, std::size_t chunk, Mark &&mark);

    void take_claimed(std::vector<core::Row> &rows);
    void keep_payloads();
    void mark_remembered();
    std::int64_t mark_published(std::span<const RowVersion> rows);
    void mark_rest(const core::Settlement &settlement);
    void give_back(bool rendered_too);
    void remember_unmarked();
    std::vector<RowVersion> versions_of(std::span<const std::uint32_t> handles) const;
    /// The identity of rows as two parameters: ids and processing_at.
    struct Identity {
        pg::Value ids, taken_at;
    };
    static Identity identity(std::span<const RowVersion> rows);
    void require_marked(std::uint64_t done, std::span<const RowVersion> rows, const char *what);

    std::int64_t marked_late_ = 0;
    bool in_transaction_ = true; ///< from begin() until the claim has committed
    std::vector<Fate> fate_;
    std::vector<std::uint32_t> position_; ///< of each handle in claim order
    std::optional<pg::Error> unmarkable_; ///< why a single row could not be marked
};

} // namespace outbox_relay::store
