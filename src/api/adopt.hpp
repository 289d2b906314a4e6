#pragma once

namespace outbox_relay::api {

/// True while outbox_adopt() of this session writes: then bound_to may change.
bool is_adopting() noexcept;

} // namespace outbox_relay::api
