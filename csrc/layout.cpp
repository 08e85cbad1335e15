// The layout of the ABI's structures as this compiler sees it, for the test that compares it with ctypes.
#include "goldsmith.h"

#define STRUCTURE(s) {#s, "", 0, sizeof(s)}
#define FIELD(s, f) {#s, #f, offsetof(s, f), sizeof(s::f)}

static const gs_field rows[] = {
    STRUCTURE(gs_tensor),
    FIELD(gs_tensor, data),
    FIELD(gs_tensor, dtype),
    FIELD(gs_tensor, rank),
    FIELD(gs_tensor, sizes),
    FIELD(gs_tensor, strides),

    STRUCTURE(gs_measure_args),
    FIELD(gs_measure_args, size),
    FIELD(gs_measure_args, threads),
    FIELD(gs_measure_args, what),
    FIELD(gs_measure_args, seconds),
    FIELD(gs_measure_args, bytes),
    FIELD(gs_measure_args, per_second),

    {nullptr, nullptr, 0, 0},
};

const gs_field* gs_layout(void) { return rows; }
