#pragma once

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>

#include "pg/postgres.hpp"

namespace pg {

/// An error of the server, or one of ours in the server's form: keeps the whole ErrorData, so that
/// SQLSTATE, DETAIL, HINT and context survive until it is raised or logged again. Copies share it.
class Error : public std::exception {
  public:
    /// Takes an ErrorData allocated in errors_context(); `caught`: it came out of the server.
    Error(ErrorData *data, bool caught);

    const char *what() const noexcept override;

    int sqlstate() const noexcept { return data_->sqlerrcode; }
    /// The SQLSTATE as its five characters.
    std::string sqlstate_text() const;
    std::string message() const;
    std::string detail() const;
    std::string hint() const;
    std::string context() const;

    const ErrorData *data() const noexcept { return data_.get(); }
    bool caught() const noexcept { return caught_; }

  private:
    std::shared_ptr<ErrorData> data_;
    bool caught_;
};

/// The parts of an error of ours. Primary message in the server's style (lower case, no full stop);
/// detail and hint are sentences.
struct Report {
    int sqlstate;
    std::string message;
    std::string detail = {};
    std::string hint = {};
};

/// An exception of a library as an error of ours: 53200 for std::bad_alloc, else XX000.
Error library_error(const std::exception &exception);

/// Throws `report` as a pg::Error.
[[noreturn]] void raise(const Report &report);

/// Writes `report` to the client and the log at `level` (below ERROR): WARNING, NOTICE, LOG. No cancel is
/// served by that: what is said is said where nothing is to be undone.
void report_at(int level, const Report &report);

/// Writes an error to the server log at LOG level, prefixed by `what`. Of one that came out of the server
/// only what quotes no row: not its DETAIL ("Failing row contains ..."), and of data exceptions (class 22)
/// the SQLSTATE alone.
void log_error(const Error &error, const std::string &what);

/// Where ErrorData that outlives its transaction is allocated.
MemoryContext errors_context();

} // namespace pg
