#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "core/pass.hpp"
#include "core/store.hpp"

#include "pg/spi.hpp"
#include "pg/transaction.hpp"
#include "store/limits.hpp"
#include "store/outbox_sql.hpp"
#include "store/preflight.hpp"
#include "store/route.hpp"
#include "store/row_version.hpp"
#include "store/target.hpp"

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
    std::string log_name;
    Oid tenant_index = InvalidOid; ///< which claims of a table that tenants share walk
    pg::Plan claim;
    pg::Plan claim_more;
    pg::Plan claim_fresh_first;
    pg::Plan claim_except;
    pg::Plan parked;
    pg::Plan remove;
    pg::Plan update;
    pg::Plan reclaim;
    pg::Plan take;
    pg::Plan payload;
    pg::Plan mark_published;
    pg::Plan mark_rest;
    pg::Plan give_back;
    pg::Plan still_ours;
    Target target; ///< of the next
    pg::Plan deliver;
};

/// Whose transaction a pass runs in.
enum class Frame {
    own,    ///< a worker's: the pass begins and ends it, and bounds it by timeouts
    callers ///< a client's: the pass is a savepoint in it and sets nothing
};

/// A lane's outbox table, as far as the storages share it: the transaction with its limits, preflight,
/// claiming, payloads. All statements run as the route's owner. One object a pass; what is worth keeping
/// across passes lives in OutboxPlans.
class OutboxStore : public core::Store {
  public:
    /// `odd_to_retries`: who gets the odd row when retries and fresh rows share a pass; alternate it,
    /// so that passes of one row serve both.
    /// `tenant`: whose lane it is, on a route with tenants; without one such a pass fails.
    OutboxStore(const Route &route, const std::optional<core::Uuid> &tenant, const Effective &settings,
                OutboxPlans &plans, core::PassHost &host, RowMemory &memory, Frame frame,
                bool odd_to_retries);
    ~OutboxStore() override;

    void begin() override;
    std::int64_t reclaim() override;
    std::vector<core::Row> claim(std::size_t max_rows) override;
    void ask_for_parked() override { asks_for_parked_ = true; }
    std::int64_t next_parked_us() const override { return next_parked_us_; }
    std::variant<std::string, core::Unsendable> render(const core::Row &row) override;

    /// Rows that the committed pass has set aside, by id, for the log.
    const std::vector<std::string> &newly_aside() const { return newly_aside_; }

    /// What a pass has settled for good whatever becomes of the rest of it: nothing where all is one
    /// transaction.
    struct Settled {
        std::int64_t published = 0;
        std::int64_t failed = 0;
        std::int64_t retried = 0;
        std::int64_t refused = 0;
        std::int64_t reclaimed = 0;
        std::int64_t duplicates_avoided = 0;
    };
    virtual Settled settled() const { return {}; }

    /// The table of this pass, once it has begun.
    const std::string &table() const { return checked_.qualified_name; }

  protected:
    /// What the store keeps of a claimed row until it is settled.
    struct Claimed {
        RowVersion version;
        pg::Result result; ///< of the claim: gone with its transaction
        std::uint64_t index;
        Datum payload;
        std::int64_t created_at;
    };

    void open();
    void close();
    void undo() noexcept;
    void keep_extension();
    void let_extension_go() noexcept;
    /// How a statement is planned.
    enum class Planning {
        free,
        ordered, ///< by an index, without a sort
        claim,   ///< by the tenant index, where the lane's claims walk one
        call     ///< of a function: it is on no table
    };

    pg::Result run(const pg::Plan &plan, std::span<const pg::Value> values, const char *name,
                   Planning planning = Planning::free);
    void prepare(pg::Plan &plan, const std::string &sql, std::span<const Oid> types);
    void forget_other_plans();
    [[noreturn]] void raise_swallowed(const char *what, std::uint64_t done, std::size_t wanted) const;

    /// The identity of `processing` rows as two parameters: ids and processing_at.
    struct Identity {
        pg::Value ids, taken_at;
    };
    static Identity identity(std::span<const RowVersion> rows);

    /// The columns of settle_sql() and the like for retried and parked rows.
    struct Rest {
        std::vector<std::uint32_t> handles;
        pg::Value statuses, added, available_at, errors;
    };
    static Rest rest_of(const core::Settlement &settlement);

    const Route &route_;
    const std::optional<core::Uuid> tenant_;
    const Effective &settings_;
    OutboxPlans &plans_;
    core::PassHost &host_;
    RowMemory &memory_;
    const Frame frame_;
    const bool odd_to_retries_;
    Limits limits_{};
    Oid owner_ = InvalidOid;
    Checked checked_;
    std::vector<Claimed> claimed_;
    std::vector<RowVersion> remembered_; ///< as of begin()
    std::vector<std::string> newly_aside_;
    MemoryContext pass_context_ = nullptr;   ///< lives as long as this object
    MemoryContext render_context_ = nullptr; ///< for one payload at a time

  private:
    void check_extension();
    void set_limits();
    void touch_watchdog();
    pg::Context context() const;
    pg::Context context(Planning planning) const;
    void find_target();
    std::size_t read_claimed(const pg::Result &result, std::vector<core::Row> &rows);
    /// What one claim has and another has not.
    struct Parameter {
        Oid type;
        pg::Value value;
    };

    std::size_t claim_by(pg::Plan &plan, const std::string &sql, const Parameter &own, std::size_t max_rows,
                         std::vector<core::Row> &rows);
    bool is_callers_own(const RowVersion &version) const;
    void find_parked();
    void claim_into(std::size_t max_rows, std::vector<core::Row> &rows);
    std::size_t claim_due(std::size_t max_rows, std::vector<core::Row> &rows);
    void flush_before_publishing() const;
    pg::Value claimed_ctids() const;
    pg::Value tenant_value() const;

    std::int64_t watchdog_end_us_ = 0;
    std::vector<ItemPointerData> reclaimed_; ///< versions that reclaim() has written
    bool open_ = false;
    bool keeps_extension_ = false; ///< in the transactions from here on
    bool holds_extension_ = false; ///< beyond the transaction
    bool asks_for_parked_ = false;
    std::int64_t next_parked_us_ = 0;
    pg::Savepoint savepoint_;
};

/// The store of the route's storage. In a client's transaction, and where the target is a function that is
/// called in the pass's, both storages settle in that one transaction.
std::unique_ptr<OutboxStore> make_outbox_store(const Route &route, const std::optional<core::Uuid> &tenant,
                                               const Effective &settings, OutboxPlans &plans,
                                               core::PassHost &host, RowMemory &memory, Frame frame,
                                               bool odd_to_retries);

} // namespace outbox_relay::store
