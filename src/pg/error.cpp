#include "pg/error.hpp"

#include <cstring>
#include <new>

#include "pg/entry.hpp"
#include "pg/guard.hpp"

namespace pg {

MemoryContext errors_context() {
    static MemoryContext context = nullptr;
    if (context == nullptr)
        context = AllocSetContextCreate(TopMemoryContext, "outbox_relay errors", ALLOCSET_SMALL_SIZES);
    return context;
}

namespace {

std::string text_or_empty(const char *text) {
    return text == nullptr ? std::string() : std::string(text);
}

char *copy_or_null(const std::string &text) {
    return text.empty() ? nullptr : pstrdup(text.c_str());
}

/// An ErrorData of our own, in the current memory context.
ErrorData *build(const Report &report) {
    auto *data = static_cast<ErrorData *>(palloc0(sizeof(ErrorData)));
    data->elevel = ERROR;
    data->sqlerrcode = report.sqlstate;
    data->message = pstrdup(report.message.c_str());
    data->detail = copy_or_null(report.detail);
    data->hint = copy_or_null(report.hint);
    data->assoc_context = CurrentMemoryContext;
    return data;
}

/// A deep copy by hand of the parts that ThrowErrorData and ReThrowError read.
ErrorData *copy_error(const ErrorData *from) {
    auto *data = static_cast<ErrorData *>(palloc(sizeof(ErrorData)));
    std::memcpy(data, from, sizeof(ErrorData));
    auto copy = [](char *&text) {
        if (text != nullptr)
            text = pstrdup(text);
    };
    copy(data->message);
    copy(data->detail);
    copy(data->detail_log);
    copy(data->hint);
    copy(data->context);
    copy(data->backtrace);
    copy(data->schema_name);
    copy(data->table_name);
    copy(data->column_name);
    copy(data->datatype_name);
    copy(data->constraint_name);
    copy(data->internalquery);
    data->assoc_context = CurrentMemoryContext;
    return data;
}

} // namespace

Error::Error(ErrorData *data, bool caught) : data_(data, FreeErrorData), caught_(caught) {}

const char *Error::what() const noexcept {
    return data_->message == nullptr ? "unknown error" : data_->message;
}

std::string Error::sqlstate_text() const {
    return unpack_sql_state(data_->sqlerrcode);
}

std::string Error::message() const {
    return text_or_empty(data_->message);
}

std::string Error::detail() const {
    return text_or_empty(data_->detail);
}

std::string Error::hint() const {
    return text_or_empty(data_->hint);
}

std::string Error::context() const {
    return text_or_empty(data_->context);
}

namespace {

Error error_of(const Report &report) {
    ErrorData *data = guard([&report] {
        MemoryContext old = MemoryContextSwitchTo(errors_context());
        ErrorData *built = build(report);
        MemoryContextSwitchTo(old);
        return built;
    });
    return {data, false};
}

} // namespace

void raise(const Report &report) {
    throw error_of(report);
}

Error library_error(const std::exception &exception) {
    if (dynamic_cast<const std::bad_alloc *>(&exception) != nullptr)
        return error_of({ERRCODE_OUT_OF_MEMORY, "out of memory"});
    return error_of({ERRCODE_INTERNAL_ERROR, exception.what()});
}

void report_at(int level, const Report &report) {
    guard([&report, level] {
        HOLD_INTERRUPTS();
        ereport(level, (errcode(report.sqlstate), errmsg("%s", report.message.c_str()),
                        report.detail.empty() ? 0 : errdetail("%s", report.detail.c_str()),
                        report.hint.empty() ? 0 : errhint("%s", report.hint.c_str())));
        RESUME_INTERRUPTS();
    });
}

void log_error(const Error &error, const std::string &what) {
    const bool quotes_data =
        error.caught() && ERRCODE_TO_CATEGORY(error.sqlstate()) == ERRCODE_DATA_EXCEPTION;
    const std::string message =
        what + ": " + (quotes_data ? "SQLSTATE " + error.sqlstate_text() : error.message());
    const std::string detail = error.caught() ? std::string() : error.detail();
    const std::string hint = error.hint();
    guard([&] {
        HOLD_INTERRUPTS();
        ereport(LOG, (errcode(error.sqlstate()), errmsg("%s", message.c_str()),
                      detail.empty() ? 0 : errdetail("%s", detail.c_str()),
                      hint.empty() ? 0 : errhint("%s", hint.c_str())));
        RESUME_INTERRUPTS();
    });
}

namespace detail {

void throw_current(MemoryContext caller_context) {
    // Still C regime: CopyErrorData may itself run out of memory, which the server answers by
    // raising again into the restored (outer) handler.
    MemoryContextSwitchTo(errors_context());
    ErrorData *data = CopyErrorData();
    FlushErrorState();
    MemoryContextSwitchTo(caller_context);
    throw Error(data, true);
}

void note(Escape &escape, const Error &error) noexcept {
    try {
        escape.caught = error.caught();
        escape.data = guard([&error] {
            MemoryContext old = MemoryContextSwitchTo(ErrorContext);
            ErrorData *copy = copy_error(error.data());
            MemoryContextSwitchTo(old);
            return copy;
        });
    } catch (...) {
        escape.data = nullptr;
        note(escape, "out of memory while reporting an error");
    }
}

void note(Escape &escape, const char *message) noexcept {
    strlcpy(escape.message, message, sizeof(escape.message));
}

void raise_escape(const Escape &escape) {
    if (escape.data == nullptr)
        ereport(ERROR, (errcode(ERRCODE_INTERNAL_ERROR), errmsg("%s", escape.message)));
    if (escape.caught)
        ReThrowError(escape.data);
    ThrowErrorData(escape.data);
    pg_unreachable();
}

} // namespace detail
} // namespace pg
