#pragma once

namespace outbox_relay::worker {

/// Registers the launcher with the postmaster and asks for shared memory. From _PG_init, while
/// shared_preload_libraries are loaded.
void register_workers();

} // namespace outbox_relay::worker
