#include "store/route.hpp"

#include <algorithm>
#include <climits>
#include <memory>
#include <unordered_map>

#include "pg/guard.hpp"
#include "pg/spi.hpp"
#include "settings/settings.hpp"
#include "store/route_row.hpp"

extern "C" {
#include "access/genam.h"
#include "access/htup_details.h"
#include "access/table.h"
#include "access/xact.h"
#include "access/xlog.h"
#include "catalog/dependency.h"
#include "catalog/indexing.h"
#include "catalog/pg_class.h"
#include "catalog/pg_extension.h"
#include "utils/builtins.h"
#include "utils/fmgroids.h"
#include "utils/inval.h"
#include "utils/lsyscache.h"
#include "utils/rel.h"
#include "utils/relcache.h"
#include "utils/snapmgr.h"
#include "utils/syscache.h"
}

namespace outbox_relay::store {

namespace {

using Routes = std::unordered_map<std::string, std::unique_ptr<const Route>>;

/// What this backend knows. Callbacks only mark it stale: they may neither raise nor allocate, and
/// somebody up the stack may hold a Route.
struct Cache {
    bool extension_known = false;
    bool routes_stale = false;
    std::uint64_t generation = 1;
    Extension extension;
    Routes routes;
    std::vector<Routes> retired; ///< freed at the transaction's end
};

Cache &cache() {
    static Cache *const instance = new Cache;
    return *instance;
}

void forget(bool extension) noexcept {
    Cache &known = cache();
    if (extension)
        known.extension_known = false;
    known.routes_stale = true;
    ++known.generation;
}

extern "C" {

static void outbox_relay_relation_changed(Datum, Oid relation) {
    Cache &known = cache();
    if (!known.extension_known || relation == InvalidOid || relation == known.extension.route_table)
        forget(true);
}

static void outbox_relay_schema_changed(Datum, int, uint32) {
    forget(true);
}

static void outbox_relay_free_retired(XactEvent event, void *) {
    if (event == XACT_EVENT_COMMIT || event == XACT_EVENT_ABORT || event == XACT_EVENT_PREPARE)
        cache().retired.clear();
}
}

void register_callbacks() {
    static bool done = false;
    if (done)
        return;
    pg::guard([] {
        CacheRegisterRelcacheCallback(outbox_relay_relation_changed, Datum(0));
        CacheRegisterSyscacheCallback(NAMESPACEOID, outbox_relay_schema_changed, Datum(0));
        RegisterXactCallback(outbox_relay_free_retired, nullptr);
    });
    done = true;
}

/// C regime: the extension's row of pg_extension, by name; false when there is none. The extension,
/// not a schema of some name, says that the database has us.
bool scan_extension(Oid *oid, Oid *schema, char **version) {
    ::Relation catalog = table_open(ExtensionRelationId, AccessShareLock);
    ScanKeyData key;
    ScanKeyInit(&key, Anum_pg_extension_extname, BTEqualStrategyNumber, F_NAMEEQ,
                CStringGetDatum("outbox_relay"));
    SysScanDesc scan = systable_beginscan(catalog, ExtensionNameIndexId, true, nullptr, 1, &key);
    HeapTuple tuple = systable_getnext(scan);
    const bool found = HeapTupleIsValid(tuple);
    if (found) {
        auto *row = reinterpret_cast<Form_pg_extension>(GETSTRUCT(tuple));
        *oid = row->oid;
        *schema = row->extnamespace;
        bool is_null = false;
        const Datum extversion =
            heap_getattr(tuple, Anum_pg_extension_extversion, RelationGetDescr(catalog), &is_null);
        *version = is_null ? pstrdup("") : TextDatumGetCString(extversion);
    }
    systable_endscan(scan);
    table_close(catalog, AccessShareLock);
    return found;
}

/// C regime: the extension's own ordinary table outbox_route, or InvalidOid: neither a view in its
/// place nor a table that the extension does not own is it.
Oid route_table_of(Oid extension, Oid schema) {
    const Oid table = get_relname_relid("outbox_route", schema);
    if (!OidIsValid(table) || get_rel_relkind(table) != RELKIND_RELATION)
        return InvalidOid;
    return getExtensionOfObject(RelationRelationId, table) == extension ? table : InvalidOid;
}

struct Found {
    Oid oid;
    Oid schema;
    Oid table;
    const char *schema_name;
    char *version;
};

/// Scans outbox_route, all of it or the row of `name`, and hands each row to `visit` as a Route.
/// With a snapshot of its own: also a REPEATABLE READ transaction sees the route as last committed.
class RouteScan {
  public:
    RouteScan(Oid table, const std::string *name) {
        pg::guard([this, table, name] { begin(table, name); });
    }
    RouteScan(const RouteScan &) = delete;
    RouteScan &operator=(const RouteScan &) = delete;

    std::optional<Route> next() {
        HeapTuple tuple = pg::guard([this] {
            MemoryContextReset(context_);
            return systable_getnext(scan_);
        });
        if (!HeapTupleIsValid(tuple))
            return std::nullopt;
        MemoryContext old = MemoryContextSwitchTo(context_);
        Route route = parse_route(RouteRow(tuple, RelationGetDescr(table_)));
        MemoryContextSwitchTo(old);
        return route;
    }

    /// After an error the abort does it.
    void end() {
        pg::guard([this] {
            systable_endscan(scan_);
            UnregisterSnapshot(snapshot_);
            table_close(table_, AccessShareLock);
            MemoryContextDelete(context_);
        });
    }

  private:
    void begin(Oid table, const std::string *name) {
        context_ = AllocSetContextCreate(CurrentMemoryContext, "outbox_relay route", ALLOCSET_SMALL_SIZES);
        table_ = table_open(table, AccessShareLock);
        list_free(RelationGetIndexList(table_)); // fills rd_pkindex
        snapshot_ = RegisterSnapshot(GetLatestSnapshot());
        const bool by_name = name != nullptr;
        if (by_name)
            // The column's collation is "C", so is the key's.
            ScanKeyInit(&key_, static_cast<AttrNumber>(SPI_fnumber(RelationGetDescr(table_), "name")),
                        BTEqualStrategyNumber, F_TEXTEQ, CStringGetTextDatum(name->c_str()));
        const bool indexed = by_name && OidIsValid(table_->rd_pkindex);
        scan_ = systable_beginscan(table_, table_->rd_pkindex, indexed, snapshot_, by_name ? 1 : 0,
                                   by_name ? &key_ : nullptr);
    }

    MemoryContext context_ = nullptr;
    ::Relation table_ = nullptr;
    Snapshot snapshot_ = nullptr;
    SysScanDesc scan_ = nullptr;
    ScanKeyData key_;
};

void drop_stale_routes() {
    Cache &known = cache();
    if (!known.routes_stale)
        return;
    known.routes_stale = false;
    if (known.routes.empty())
        return;
    known.retired.push_back(std::move(known.routes));
    known.routes.clear();
}

constexpr std::int64_t kDayMs = 24LL * 60 * 60 * 1000;
constexpr std::int64_t kPauseMs = settings::kLongestPauseMs;

} // namespace

const std::vector<TuningColumn> &tuning_columns() {
    using R = Route;
    using E = Effective;
    const settings::Parameters &p = settings::parameters;
    static const auto *const columns = new std::vector<TuningColumn>{
        {"interval", true, 1, kPauseMs, &R::interval_ms, &E::interval_ms, &p.interval_ms},
        {"max_claim_rows", false, 1, 100000, &R::max_claim_rows, &E::max_claim_rows, &p.max_claim_rows},
        {"pass_deadline", true, 1, kDayMs, &R::pass_deadline_ms, &E::pass_deadline_ms, &p.pass_deadline_ms},
        {"pass_statement_timeout", true, 1, kDayMs, &R::pass_statement_timeout_ms,
         &E::pass_statement_timeout_ms, &p.pass_statement_timeout_ms},
        {"request_timeout", true, 0, kDayMs, &R::request_timeout_ms, &E::request_timeout_ms,
         &p.request_timeout_ms},
        {"connect_timeout", true, 1, kDayMs, &R::connect_timeout_ms, &E::connect_timeout_ms,
         &p.connect_timeout_ms},
        {"concurrency", false, 1, 1000, &R::concurrency, &E::concurrency, &p.concurrency},
        {"max_attempts", false, 0, INT_MAX, &R::max_attempts, &E::max_attempts, &p.max_attempts},
        {"retry_base_delay", true, 1, kPauseMs, &R::retry_base_delay_ms, &E::retry_base_delay_ms,
         &p.retry_base_delay_ms},
        {"retry_max_backoff", true, 1, kPauseMs, &R::retry_max_backoff_ms, &E::retry_max_backoff_ms,
         &p.retry_max_backoff_ms},
        {"breaker_threshold", false, 0, INT_MAX, &R::breaker_threshold, &E::breaker_threshold,
         &p.breaker_threshold},
        {"reclaim_stale_after", true, 0, kPauseMs, &R::reclaim_stale_after_ms, &E::reclaim_stale_after_ms,
         &p.reclaim_stale_after_ms},
    };
    return *columns;
}

Effective effective(const Route &route) {
    Effective values{};
    for (const TuningColumn &column : tuning_columns())
        values.*column.effective = (route.*column.column).value_or(*column.parameter);
    return values;
}

std::optional<Extension> find_extension() {
    register_callbacks();
    Cache &known = cache();
    if (known.extension_known)
        return known.extension;

    Found found{};
    const std::uint64_t before = known.generation;
    const bool exists = pg::guard([&found] {
        if (!scan_extension(&found.oid, &found.schema, &found.version))
            return false;
        found.table = route_table_of(found.oid, found.schema);
        found.schema_name = get_namespace_name(found.schema);
        return OidIsValid(found.table) && found.schema_name != nullptr;
    });
    if (!exists)
        return std::nullopt;
    Extension extension{found.oid, found.schema, found.table, found.schema_name};
    drop_stale_routes();
    known.extension = extension;
    // Not when a change came in while we looked: then the next call looks again.
    known.extension_known = known.generation == before;
    return extension;
}

std::string extension_version() {
    const char *version = pg::guard([] {
        Found found{};
        return scan_extension(&found.oid, &found.schema, &found.version) ? found.version : nullptr;
    });
    return version == nullptr ? std::string() : std::string(version);
}

const Route *find_route(const Extension &extension, const std::string &name) {
    register_callbacks();
    drop_stale_routes();
    Cache &known = cache();
    if (const auto at = known.routes.find(name); at != known.routes.end())
        return at->second.get();
    // NUL can't be in a text, and would cut the key short.
    if (name.find('\0') != std::string::npos)
        return nullptr;

    const std::uint64_t before = known.generation;
    RouteScan scan(extension.route_table, &name);
    std::optional<Route> route = scan.next();
    scan.end();
    if (!route.has_value())
        return nullptr;
    // What changed while we read is used this once, and not kept.
    if (known.generation != before)
        known.retired.emplace_back();
    Routes &into = known.generation == before ? known.routes : known.retired.back();
    return into.emplace(name, std::make_unique<const Route>(std::move(*route))).first->second.get();
}

std::vector<Route> all_routes(const Extension &extension) {
    std::vector<Route> routes;
    RouteScan scan(extension.route_table, nullptr);
    while (std::optional<Route> route = scan.next())
        routes.push_back(std::move(*route));
    scan.end();
    std::sort(routes.begin(), routes.end(), [](const Route &a, const Route &b) { return a.name < b.name; });
    return routes;
}

void raise_unknown_route(const std::string &name) {
    pg::raise({ERRCODE_UNDEFINED_OBJECT, "outbox route \"" + name + "\" does not exist",
               "outbox_route has no row of that name.",
               "Insert one into outbox_route, or use the name of one that is there."});
}

std::uint64_t routes_generation() {
    register_callbacks();
    return cache().generation;
}

std::string current_binding() {
    return std::to_string(GetSystemIdentifier()) + "/" + std::to_string(MyDatabaseId) + "/" +
           settings::parameters.environment;
}

} // namespace outbox_relay::store
