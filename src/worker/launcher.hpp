#pragma once

#include "pg/postgres.hpp"

namespace outbox_relay::worker {

/// Registers the launcher with the postmaster and asks for shared memory. From _PG_init, while
/// shared_preload_libraries are loaded.
void register_workers();

/// True when workers may run in a database: it takes connections, is no template and is listed in
/// outbox_relay.databases. In a transaction.
bool serves(Oid database);

} // namespace outbox_relay::worker
