#include "pg/session.hpp"

#include <cstdio>

extern "C" {
#include "nodes/pathnodes.h"
#include "nodes/pg_list.h"
#include "optimizer/plancat.h"
#include "utils/guc.h"
#include "utils/timeout.h"
}

namespace pg {

namespace detail {

namespace {

void set_in_nest(const char *name, const char *value) {
    (void)set_config_option(name, value, PGC_USERSET, PGC_S_SESSION, GUC_ACTION_SAVE, true, 0, false);
}

/// claims.md rule 1: without these, stale statistics turn a claim into a sort of the backlog.
void pin_plans() {
    set_in_nest("enable_sort", "off");
    set_in_nest("enable_incremental_sort", "off");
    set_in_nest("enable_seqscan", "off");
    set_in_nest("enable_bitmapscan", "off");
}

} // namespace

namespace {

Oid only_index = InvalidOid;
bool hooked = false;
get_relation_info_hook_type previous_hook = nullptr;

extern "C" {

/// Two indexes may give the order that a claim asks for, when one has one column more that the claim holds
/// constant; stale statistics would take the one that has to filter. Where the index is no more, the table's
/// others are left alone.
static void outbox_relay_relation_info(PlannerInfo *root, Oid relation, bool inherits, RelOptInfo *info) {
    if (previous_hook != nullptr)
        previous_hook(root, relation, inherits, info);
    if (!OidIsValid(only_index))
        return;
    ListCell *cell = nullptr;
    foreach (cell, info->indexlist) {
        auto *index = static_cast<IndexOptInfo *>(lfirst(cell));
        if (index->indexoid != only_index)
            continue;
        info->indexlist = list_make1(index);
        return;
    }
}
}

} // namespace

OnlyIndex::OnlyIndex(Oid index) : before_(only_index) {
    if (OidIsValid(index) && !hooked) {
        previous_hook = get_relation_info_hook;
        get_relation_info_hook = outbox_relay_relation_info;
        hooked = true;
    }
    only_index = index;
}

OnlyIndex::~OnlyIndex() {
    only_index = before_;
}

Restore enter(const Context &context) {
    Restore restore;
    GetUserIdAndSecContext(&restore.role, &restore.security);
    restore.guc_level = NewGUCNestLevel();
    restore.timed = context.statement_timeout_ms > 0;

    set_in_nest("search_path", "pg_catalog, pg_temp");
    if (context.ordered_plans)
        pin_plans();
    if (context.lock_timeout_ms > 0) {
        char value[16];
        pg_snprintf(value, sizeof(value), "%d", context.lock_timeout_ms);
        set_in_nest("lock_timeout", value);
    }
    SetUserIdAndSecContext(context.role, restore.security | SECURITY_RESTRICTED_OPERATION);
    if (restore.timed)
        enable_timeout_after(STATEMENT_TIMEOUT, context.statement_timeout_ms);
    return restore;
}

void leave(const Restore &restore) {
    if (restore.timed) {
        disable_timeout(STATEMENT_TIMEOUT, true);
        // A timer that fired after the statement's last check would cancel the next one.
        if (get_timeout_indicator(STATEMENT_TIMEOUT, true))
            QueryCancelPending = false;
    }
    AtEOXact_GUC(false, restore.guc_level);
    SetUserIdAndSecContext(restore.role, restore.security);
}

} // namespace detail

void set_local(const char *name, const char *value) {
    guard([name, value] {
        (void)set_config_option(name, value, PGC_SUSET, PGC_S_SESSION, GUC_ACTION_LOCAL, true, 0, false);
    });
}

void pin_setting(const char *name, const char *value) {
    guard([name, value] { SetConfigOption(name, value, PGC_SUSET, PGC_S_OVERRIDE); });
}

} // namespace pg
