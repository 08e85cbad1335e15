#include "error.h"

#include <cstdio>
#include <new>

namespace gs {
namespace {

thread_local char message[1024];

gs_status keep(gs_status status, const char* text) {
    std::snprintf(message, sizeof message, "%s", text);
    return status;
}

}  // namespace

Error::Error(gs_status s, const char* format, std::va_list values) : status(s) {
    std::vsnprintf(text, sizeof text, format, values);
}

void fail(gs_status status, const char* format, ...) {
    std::va_list values;
    va_start(values, format);
    Error error(status, format, values);
    va_end(values);
    throw error;
}

gs_status caught() noexcept {
    try {
        throw;
    } catch (const Error& error) {
        return keep(error.status, error.text);
    } catch (const std::bad_alloc&) {
        return keep(GS_NO_MEMORY, "the native library could not allocate the memory for this call");
    } catch (const std::exception& error) {
        return keep(GS_INTERNAL, error.what());
    } catch (...) {
        return keep(GS_INTERNAL, "an exception of unknown type in the native library");
    }
}

}  // namespace gs

const char* gs_message(void) { return gs::message; }
