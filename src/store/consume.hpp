#pragma once

#include "store/outbox.hpp"

namespace outbox_relay::store {

/// A pass that settles in the claim's transaction: consume storage (the seed, "Consume storage"), where
/// published rows are deleted and may be appended to a delivery log; and on retain storage, where they are
/// marked, a pass on demand and one that delivers to a function.
class ConsumeStore : public OutboxStore {
  public:
    using OutboxStore::OutboxStore;

    void begin() override;
    std::optional<core::Unsendable> deliver(const core::Row &row) override;
    void note_published(const core::Row &row) noexcept override;
    void settle(const core::Settlement &settlement) override;
    std::size_t settle_chunk() const override { return 0; }
    void commit() override;
    void rollback() noexcept override;

  private:
    void take_back_processing();
    void suspect_single_row() noexcept;
    void remember_rest();
    bool was_warned(const RowVersion &suspect) const;
    pg::Value ctids(std::span<const std::uint32_t> handles) const;
    void settle_published(const std::vector<std::uint32_t> &handles);
    void require_logged(std::uint64_t done, std::size_t wanted) const;
    void update_rest(const core::Settlement &settlement);

    bool suspected_ = false; ///< this pass's one row is written down as a suspect
};

} // namespace outbox_relay::store
