#include "pg/spi.hpp"

#include <vector>

extern "C" {
#include "access/htup_details.h"
#include "pgstat.h"
#include "utils/builtins.h"
#include "utils/plancache.h"
#include "utils/snapmgr.h"
}

namespace pg {

Plan &Plan::operator=(Plan &&other) noexcept {
    if (this != &other) {
        release();
        plan_ = other.plan_;
        other.plan_ = nullptr;
    }
    return *this;
}

namespace {

/// C regime.
SPIPlanPtr keep(const char *sql, std::span<const Oid> types, int options) {
    Oid *argument_types = const_cast<Oid *>(types.data());
    SPIPlanPtr plan = SPI_prepare_cursor(sql, static_cast<int>(types.size()), argument_types, options);
    if (plan == nullptr)
        elog(ERROR, "could not prepare a statement: %s", SPI_result_code_string(SPI_result));
    if (SPI_keepplan(plan) != 0)
        elog(ERROR, "could not keep a prepared statement");
    return plan;
}

} // namespace

void Plan::prepare(const std::string &sql, std::span<const Oid> types, bool generic) {
    release();
    plan_ = guard([&] { return keep(sql.c_str(), types, generic ? CURSOR_OPT_GENERIC_PLAN : 0); });
}

void Plan::prepare_as(const Context &context, const std::string &sql, std::span<const Oid> types) {
    release();
    plan_ = run_as(context, [&] { return keep(sql.c_str(), types, CURSOR_OPT_GENERIC_PLAN); });
}

void Plan::release() noexcept {
    if (plan_ != nullptr)
        (void)SPI_freeplan(plan_);
    plan_ = nullptr;
}

Value Result::value(std::uint64_t row, int column) const {
    return guard([this, row, column] {
        bool null = false;
        const Datum datum = SPI_getbinval(table->vals[row], table->tupdesc, column, &null);
        Value value;
        value.datum = datum;
        value.null = null;
        return value;
    });
}

void spi_connect() {
    guard([] {
        if (SPI_connect() != SPI_OK_CONNECT)
            elog(ERROR, "could not connect to SPI");
    });
}

void spi_finish() {
    guard([] { (void)SPI_finish(); });
}

namespace {

/// Parameters in the two arrays that SPI takes.
struct Parameters {
    std::vector<Datum> datums;
    std::vector<char> nulls;

    explicit Parameters(std::span<const Value> values) {
        datums.reserve(values.size());
        nulls.reserve(values.size());
        for (const Value &value : values) {
            datums.push_back(value.datum);
            nulls.push_back(value.null ? 'n' : ' ');
        }
    }
};

Result finish(int code) {
    if (code < 0)
        elog(ERROR, "statement failed in SPI: %s", SPI_result_code_string(code));
    Result result;
    result.processed = SPI_processed;
    result.table = SPI_tuptable;
    return result;
}

Result run(const Plan &plan, Parameters &parameters, bool read_only, std::uint64_t max_rows) {
    return finish(SPI_execute_plan(plan.get(), parameters.datums.data(), parameters.nulls.data(), read_only,
                                   static_cast<long>(max_rows)));
}

/// C regime. A kept statement is parsed again when a name in it may mean something else, and a lock on a
/// table does not keep its schema from being renamed: whose triggers would run was checked for `relation`
/// alone.
void require_relation(const Plan &plan, Oid relation) {
    if (!OidIsValid(relation))
        return;
    CachedPlan *planned = SPI_plan_get_cached_plan(plan.get());
    const auto *source =
        static_cast<const CachedPlanSource *>(linitial(SPI_plan_get_plan_sources(plan.get())));
    // A rule that does nothing instead leaves no relation, and nothing that would run.
    const bool is_on_it = source->relationOids == NIL || list_member_oid(source->relationOids, relation);
    if (planned != nullptr)
        ReleaseCachedPlan(planned, CurrentResourceOwner);
    if (!is_on_it)
        ereport(ERROR, (errcode(ERRCODE_OBJECT_NOT_IN_PREREQUISITE_STATE),
                        errmsg("the outbox table was replaced under its name while a pass was under way"),
                        errdetail("The name means another table now than the one that the pass has checked."),
                        errhint("Pause the route before its table or schema is renamed.")));
}

} // namespace

Result execute_as(const Context &context, const Plan &plan, std::span<const Value> values, const char *name,
                  std::uint64_t max_rows) {
    Parameters parameters(values);
    return run_as(context, [&] {
        if (name != nullptr)
            pgstat_report_activity(STATE_RUNNING, name);
        PushActiveSnapshot(GetTransactionSnapshot());
        require_relation(plan, context.relation);
        Result result = run(plan, parameters, false, max_rows);
        PopActiveSnapshot();
        return result;
    });
}

Cursor::Cursor(const Context &context, const Plan &plan, std::span<const Value> values) : context_(context) {
    Parameters parameters(values);
    portal_ = run_as(context_, [&] {
        PushActiveSnapshot(GetTransactionSnapshot());
        require_relation(plan, context_.relation);
        PopActiveSnapshot();
        Portal portal =
            SPI_cursor_open(nullptr, plan.get(), parameters.datums.data(), parameters.nulls.data(), false);
        if (portal == nullptr)
            elog(ERROR, "could not open a cursor: %s", SPI_result_code_string(SPI_result));
        return portal;
    });
}

Result Cursor::fetch(std::uint64_t max_rows) {
    return run_as(context_, [this, max_rows] {
        SPI_cursor_fetch(portal_, true, static_cast<long>(max_rows));
        return finish(0);
    });
}

void Cursor::close() {
    guard([this] { SPI_cursor_close(portal_); });
}

Result execute_latest_as(const Context &context, const Plan &plan, std::span<const Value> values) {
    Parameters parameters(values);
    return run_as(context, [&] {
        const Snapshot snapshot = RegisterSnapshot(GetLatestSnapshot());
        // SPI asks for a snapshot that is active; which one the statement sees is the argument's say.
        PushActiveSnapshot(snapshot);
        Result result =
            finish(SPI_execute_snapshot(plan.get(), parameters.datums.data(), parameters.nulls.data(),
                                        snapshot, InvalidSnapshot, false, true, 0));
        PopActiveSnapshot();
        UnregisterSnapshot(snapshot);
        return result;
    });
}

Result execute(const Plan &plan, std::span<const Value> values, bool read_only, std::uint64_t max_rows) {
    Parameters parameters(values);
    return guard([&] { return run(plan, parameters, read_only, max_rows); });
}

Result execute_text(const std::string &sql, bool read_only) {
    return guard([&] { return finish(SPI_execute(sql.c_str(), read_only, 0)); });
}

Datum text_datum(const std::string &text) {
    return guard([&] { return PointerGetDatum(cstring_to_text_with_len(text.data(), text.size())); });
}

std::string text_of(Datum datum) {
    const text *value = guard([&] { return DatumGetTextPP(datum); });
    return std::string(VARDATA_ANY(value), VARSIZE_ANY_EXHDR(value));
}

} // namespace pg
