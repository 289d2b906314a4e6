#pragma once

namespace outbox_relay::worker {

/// From here on a COMMIT of this process does not wait for a synchronous standby beyond a second once SIGTERM
/// asks it to leave (reliability.md F-25): the standby may be gone, and the server's shutdown, or a DROP
/// DATABASE, waits for us. The transaction is committed here by then; the server says in its log that it
/// may not be replicated. Called once, by a relay worker.
void bound_commit_wait();

} // namespace outbox_relay::worker
