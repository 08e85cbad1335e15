// Errors inside the library are exceptions; at the border they become a status and a message.
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

// Throws an Error; the sentence is printf's.
[[noreturn]] void fail(gs_status status, const char* format, ...) __attribute__((format(printf, 2, 3)));

// The status of the exception in flight, its message kept for gs_message().
gs_status caught() noexcept;

// Refuses a structure that another version of the header has made.
template <class Args> void check_size(const Args* args) {
    if (args == nullptr || args->size != sizeof(Args))
        fail(GS_INTERNAL, "the library and its caller are of different versions of goldsmith.h: run make");
}

// Runs the body of an entry point: nothing that is thrown inside leaves it.
template <class Body> gs_status guarded(Body&& body) noexcept {
    try {
        body();
        return GS_OK;
    } catch (...) {
        return caught();
    }
}

}  // namespace gs
