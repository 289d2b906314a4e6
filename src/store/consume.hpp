#pragma once

#include "store/outbox.hpp"

namespace outbox_relay::store {

/// A pass that settles in the claim's transaction: consume storage (the seed, "Consume storage"), where
/// published rows are deleted and may be appended to a delivery log; and a pass on demand on retain
/// storage, where they are marked.
class ConsumeStore : public OutboxStore {
  public:
    using OutboxStore::OutboxStore;

    void begin() override;
    void note_published(const core::Row &row) noexcept override;
    void settle(const core::Settlement &settlement) override;
    std::size_t settle_chunk() const override { return 0; }
    void commit() override;
    void rollback() noexcept override;

  private:
    void suspect_single_row() noexcept;
    void remember_rest();
    pg::Value ctids(std::span<const std::uint32_t> handles) const;
    void settle_published(const std::vector<std::uint32_t> &handles);
    void require_logged(std::uint64_t done, std::size_t wanted) const;
    void update_rest(const core::Settlement &settlement);
};

} // namespace outbox_relay::store
