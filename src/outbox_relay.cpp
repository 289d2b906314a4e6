#include <cstdint>

#include "pg/compat.hpp"
#include "pg/entry.hpp"
#include "pg/postgres.hpp"
#include "settings/settings.hpp"
#include "worker/launcher.hpp"

extern "C" {
OUTBOX_RELAY_MODULE_MAGIC;

PGDLLEXPORT void _PG_init(void);
}

/// Runs in the postmaster when the library is preloaded, else in the session that first needs it:
/// then only what needs no shared memory is there. During pg_upgrade nothing may relay.
void _PG_init(void) {
    pg::entry([] {
        const bool preloading = process_shared_preload_libraries_in_progress;
        outbox_relay::settings::define(preloading);
        if (preloading && !IsBinaryUpgrade)
            outbox_relay::worker::register_workers();
    });
}
