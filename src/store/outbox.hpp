#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "core/pass.hpp"
#include "core/store.hpp"

#include "pg/spi.hpp"
#include "store/limits.hpp"
#include "store/outbox_sql.hpp"
#include "store/preflight.hpp"
#include "store/route.hpp"
#include "store/row_version.hpp"

extern "C" {
#include "storage/itemptr.h"
}

namespace outbox_relay::store {

/// The kept statements of one outbox table under one owner; made when a pass first needs them.
struct OutboxPlans {
    Oid relation = InvalidOid;
    Oid owner = InvalidOid;
    ClaimShape shape;
    std::string qualified_name;
    pg::Plan claim;
    pg::Plan claim_more;
    pg::Plan claim_except;
    pg::Plan remove;
    pg::Plan update;
    pg::Plan reclaim;
};

/// A lane's outbox table in consume storage: one transaction from begin() to commit(), all statements
/// as the route's owner. One object a pass; what is worth keeping across passes lives in OutboxPlans.
class ConsumeStore : public core::Store {
  public:
    /// `odd_to_retries`: who gets the odd row when retries and fresh rows share a pass; alternate it,
    /// so that passes of one row serve both.
    ConsumeStore(const Route &route, const Effective &settings, OutboxPlans &plans, core::PassHost &host,
                 RowMemory &memory, bool odd_to_retries);

    void begin() override;
    std::int64_t reclaim() override;
    std::vector<core::Row> claim(std::size_t max_rows) override;
    std::variant<std::string, core::Unsendable> render(const core::Row &row) override;
    void note_published(const core::Row &row) noexcept override;
    void settle(const core::Settlement &settlement) override;
    std::size_t settle_chunk() const override { return 0; }
    void commit() override;
    void rollback() noexcept override;

    /// Rows that the committed pass has set aside, by id, for the log.
    const std::vector<std::string> &newly_aside() const { return newly_aside_; }

  private:
    /// What the store keeps of a claimed row until it is settled.
    struct Claimed {
        RowVersion version;
        Datum payload;
        std::int64_t created_at;
    };

    void check_extension();
    void set_limits();
    void touch_watchdog();
    pg::Result run(const pg::Plan &plan, std::span<const pg::Value> values, const char *name,
                   bool ordered_plans = false);
    void prepare(pg::Plan &plan, const std::string &sql, std::span<const Oid> types);
    void forget_other_plans();
    std::size_t read_claimed(const pg::Result &result, std::vector<core::Row> &rows);
    void claim_into(std::size_t max_rows, std::vector<core::Row> &rows);
    void flush_before_publishing() const;
    void suspect_single_row() noexcept;
    void remember_rest();
    Datum ctid_array(std::span<const std::uint32_t> handles) const;
    Datum claimed_ctids() const;
    void remove_published(const std::vector<std::uint32_t> &handles);
    void update_rest(const core::Settlement &settlement);

    const Route &route_;
    const Effective &settings_;
    OutboxPlans &plans_;
    core::PassHost &host_;
    RowMemory &memory_;
    const bool odd_to_retries_;
    Limits limits_{};
    Oid owner_ = InvalidOid;
    Checked checked_;
    std::int64_t watchdog_end_us_ = 0;
    std::vector<Claimed> claimed_;
    std::vector<RowVersion> remembered_; ///< as of begin()
    std::vector<std::string> newly_aside_;
    MemoryContext render_context_ = nullptr;
};

} // namespace outbox_relay::store
