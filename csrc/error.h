// Errors inside the library are exceptions; entry points convert them to a status and a message.
#pragma once

#include <cstdarg>
#include <exception>

#include "goldsmith.h"

namespace gs {

struct Error : std::exception {
    gs_status status;
    char text[1024];

    Error(gs_status status, const char* format, std::va_list values);
    const char* what() const noexcept override { return text; }
};

// Throws an Error with a printf-style message.
[[noreturn]] void fail(gs_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));

// Returns the status of the current exception and stores its message for gs_message().
gs_status caught() noexcept;

// Fails if the structure comes from another version of the header.
template <class Args> void check_size(const Args* args) {
    if (args == nullptr || args->size != sizeof(Args))
        fail(GS_INTERNAL, "the library and its caller use different versions of goldsmith.h: run make");
}

// Runs the body of an entry point and converts all exceptions to a status.
template <class Body> gs_status guarded(Body&& body) noexcept {
    try {
        body();
        return GS_OK;
    } catch (...) {
        return caught();
    }
}

}  // namespace gs
