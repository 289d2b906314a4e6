#pragma once

#include "store/outbox.hpp"

namespace outbox_relay::store {

/// Retain storage (the seed, "schema"; spec.md section 5): a pass is several short transactions. The claim
/// commits rows as `processing`; publishing runs outside of any transaction; published rows are marked in
/// chunks, the others at the end; rows that were not reached go back as they were. A mark touches a row only
/// while it is `processing` since this very claim, so a late pass can't overwrite what somebody else made
/// of the row meanwhile.
class RetainStore : public OutboxStore {
  public:
    using OutboxStore::OutboxStore;

    std::int64_t reclaim() override;
    std::vector<core::Row> claim(std::size_t max_rows) override;
    std::variant<std::string, core::Unsendable> render(const core::Row &row) override;
    void settle(const core::Settlement &settlement) override;
    std::size_t settle_chunk() const override { return 32; }
    void commit() override;
    void rollback() noexcept override;

  private:
    /// What became of a claimed row.
    enum class Fate : std::uint8_t { claimed, rendered, settled };

    void take_claimed(std::vector<core::Row> &rows);
    void keep_payloads();
    void mark_published(const std::vector<std::uint32_t> &handles);
    void mark_rest(const core::Settlement &settlement);
    void give_back(bool rendered_too);
    void note_settled(std::span<const std::uint32_t> handles);
    /// The identity of claimed rows as two parameters: ids and processing_at.
    struct Identity {
        pg::Value ids, taken_at;
    };
    Identity identity(std::span<const std::uint32_t> handles) const;
    void require_marked(std::uint64_t done, std::span<const std::uint32_t> handles, const char *what);

    bool in_transaction_ = true; ///< from begin() until the claim has committed
    std::vector<Fate> fate_;
    std::vector<std::int64_t> taken_at_;  ///< processing_at of each claimed row, as the table has it
    std::vector<std::uint32_t> position_; ///< of each handle in claim order
};

} // namespace outbox_relay::store
