#pragma once

#include <cstdint>
#include <optional>
#include <string>

#include "pg/postgres.hpp"

extern "C" {
#include "access/attnum.h"
}

namespace outbox_relay::store {

/// The application's table of durable marks of the Hybrid Logical Clock (the seed, "Restart
/// monotonicity"): node_key text primary key, hlc bigint not null. spec.md section 7.
struct Checkpoint {
    Oid relation = InvalidOid;
    Oid owner = InvalidOid;
    std::string qualified_name;
    AttrNumber node_key = 0;
    AttrNumber hlc = 0;
};

/// The table that `name` (schema.table) names now. Raises what makes it no checkpoint: 22023 malformed
/// name, 42P01 unknown, 42809 wrong kind, 42703 and 42804 columns, 42P10 no unique key on node_key.
Checkpoint find_checkpoint(const std::string &name);

/// The largest mark over all keys that is committed now; nothing when there is none. Reads without
/// regard to rights and policies, and leaves no trace in a serializable transaction.
std::optional<std::int64_t> committed_mark(const Checkpoint &checkpoint);

/// The same of one key.
std::optional<std::int64_t> committed_mark(const Checkpoint &checkpoint, const std::string &node_key);

/// Puts those who advance the mark of `node_key` in a queue, to the end of the transaction (or
/// unlock_mark()): a private lock, since waiting on the row itself fails under REPEATABLE READ. True
/// when somebody else had to be waited for.
bool lock_mark(const Checkpoint &checkpoint, const std::string &node_key);
void unlock_mark(const Checkpoint &checkpoint, const std::string &node_key);

/// Raises the mark of `node_key` to at least `mark` in this transaction, as the table's owner in a
/// restricted context, under any isolation level. Raises 55000 when a trigger or rule swallows it.
void advance_as_owner(const Checkpoint &checkpoint, const std::string &node_key, std::int64_t mark);

/// The same as the current user, by an ordinary statement (GREATEST upsert). Waits in the queue.
void advance_as_caller(const Checkpoint &checkpoint, const std::string &node_key, std::int64_t mark);

/// The largest mark over all keys, as the current user sees the table; nothing when there is none.
std::optional<std::int64_t> load_as_caller(const Checkpoint &checkpoint);

} // namespace outbox_relay::store
