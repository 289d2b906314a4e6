#pragma once

#include <optional>
#include <span>
#include <string>

#include "core/uuid.hpp"
#include "worker/memory.hpp"

namespace outbox_relay::worker {

/// Remembers that rows of this lane were staged in the current transaction: when it commits, the
/// lane becomes due and an idle worker of this database is woken. A rollback to a savepoint may
/// leave a spurious wake; PREPARE TRANSACTION wakes nobody (the poll finds the rows). Does nothing
/// when the library is not preloaded.
void wake_at_commit(const std::string &route, const std::optional<core::Uuid> &tenant);

/// The same for the lanes of all tenants of `route`, of which there may be more than a transaction can
/// remember, or of which it takes too much to tell which have rows.
void wake_tenants_at_commit(const std::string &route);

/// Remembers to give rows that lanes have set aside another try: at commit, those of a rollback to a
/// savepoint too. Not by PREPARE TRANSACTION.
void let_go_at_commit(std::span<const AsideRow> rows);

/// Remembers that outbox_route changed: at commit the launcher looks at this database again and its
/// workers read the routes anew. Does nothing when the library is not preloaded.
void poke_at_commit();

} // namespace outbox_relay::worker
