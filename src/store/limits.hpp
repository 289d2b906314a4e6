#pragma once

#include "store/route.hpp"

namespace outbox_relay::store {

/// The time limits of a pass's session, in milliseconds; never 0, but for the last.
struct Limits {
    int statement_ms;
    int lock_ms;
    int idle_ms;
    /// transaction_timeout of the owner's role or the database, which the relay itself has none of; 0: none.
    int transaction_ms;
};

/// What a pass of `owner` works under: the route's own limits, or a stricter one that the session,
/// the database or the owner's role has (pg_db_role_setting, read anew each time: a change has no
/// other way to reach a session that runs on). A limit of 0 is none. (The seed: "A stricter limit the
/// session already has … stays in force".) Needs a transaction.
Limits limits_for(Oid owner, const Effective &settings);

/// A number that changes when ALTER DATABASE or ALTER ROLE ALL changes a parameter of ours for this
/// database. The server applies those to new sessions only: a worker that sees another number than
/// at its start makes place for a new one. Needs a transaction.
std::uint64_t configured_parameters();

} // namespace outbox_relay::store
