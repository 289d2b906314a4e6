#pragma once

namespace outbox_relay::worker {

/// From here on a COMMIT of this process waits for a synchronous standby no longer than about a second once
/// SIGTERM asks it to leave, or a barrier waits for it (reliability.md F-25): the standby may be gone, and
/// the server's shutdown, or a DROP DATABASE of any database, waits for us. The transaction is committed here
/// by then; the server says in its log that it may not be replicated. Called once, by a relay worker.
void bound_commit_wait();

/// True when a COMMIT of ours, as things are set now, waits for a synchronous standby.
bool waits_for_standbys();

} // namespace outbox_relay::worker
