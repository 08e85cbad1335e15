// The complete C ABI of the native library; a test compares Python's ctypes declarations with this header.
//
// Every argument structure begins with its size, which the caller sets and the library checks; all other fields are
// zero unless set. A call returns a status; if it is not GS_OK, gs_message() returns the message, in the same thread.
#pragma once

#include <stddef.h>
#include <stdint.h>

#define GS_API __attribute__((visibility("default")))

#ifdef __cplusplus
extern "C" {
#endif

typedef int32_t gs_status;
enum { GS_OK = 0, GS_INVALID = 1, GS_UNSUPPORTED = 2, GS_NO_MEMORY = 3, GS_INTERNAL = 4 };

typedef int32_t gs_dtype;
enum { GS_NONE = 0, GS_F32 = 1, GS_BF16 = 2, GS_F16 = 3, GS_U8 = 4, GS_I8 = 5, GS_I32 = 6, GS_I64 = 7, GS_E8M0 = 8 };

// A tensor of up to four dimensions; strides in elements, as in torch. An absent tensor has dtype GS_NONE.
typedef struct {
    void* data;
    gs_dtype dtype;
    int32_t rank;
    int64_t sizes[4];
    int64_t strides[4];
} gs_tensor;

// One row of the table of all structures' layouts; the field "" is the structure itself.
typedef struct {
    const char* structure;
    const char* field;
    size_t offset;
    size_t size;
} gs_field;

// Probes of the processor's speed: gs_measure runs `what` on every thread for about `seconds`.
typedef int32_t gs_probe;
enum {
    GS_READ = 0,
    GS_FMA = 1,
    GS_VNNI = 2,
    GS_DOT_BF16 = 3,
    GS_AMX_INT8 = 4,
    GS_AMX_BF16 = 5,
    GS_AMX_L1 = 6,
    GS_AMX_L2 = 7,
    GS_AMX_STREAM = 8
};

typedef struct {
    size_t size;
    int32_t threads;
    gs_probe what;
    double seconds;
    int64_t bytes;      // GS_READ, GS_AMX_STREAM: bytes that all threads together read
    int64_t rows;       // GS_AMX_L2, GS_AMX_STREAM: rows of an expert, a multiple of 32
    double per_second;  // result: bytes for GS_READ, else operations (a multiply-add is two)
} gs_measure_args;

GS_API const char* gs_message(void);
GS_API const gs_field* gs_layout(void);  // ends with a row of nulls

// The name of a level, or null beyond the last one.
GS_API const char* gs_level_name(int32_t level);
GS_API int32_t gs_machine_level(void);
GS_API const char* gs_why_not_higher(void);  // "" at the highest level
GS_API int32_t gs_level(void);
GS_API gs_status gs_set_level(int32_t level);  // at most the machine's; not while a call is running

// Sets the processors of workers that start later: worker i (the caller is 0) runs on any of processors[0..count) with
// the node of processors[i % count]. count 0: workers run where the thread that starts them runs.
GS_API gs_status gs_workers_on(const int32_t* processors, const int32_t* nodes, int32_t count);

// From now on a read of a mapped file that was cut short writes this text, of at most 255 bytes, to stderr before the
// system ends the process (SIGBUS).
GS_API void gs_say_at_bus_error(const char* text);

GS_API gs_status gs_measure(gs_measure_args* args);

#include "experts/abi.h"
#include "step/abi.h"

#ifdef __cplusplus
}
#endif
