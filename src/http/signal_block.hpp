#pragma once

#include <pthread.h>
#include <signal.h>

namespace outbox_relay::http {

/// Blocks every signal of this thread for a scope. Held around libcurl calls that may start a
/// resolver thread: the thread inherits the mask, so the server's signal handlers can only ever run
/// in the process's own thread.
class SignalBlock {
  public:
    SignalBlock() noexcept {
        sigset_t all;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before_);
    }
    ~SignalBlock() { pthread_sigmask(SIG_SETMASK, &before_, nullptr); }

    SignalBlock(const SignalBlock &) = delete;
    SignalBlock &operator=(const SignalBlock &) = delete;

  private:
    sigset_t before_;
};

} // namespace outbox_relay::http
