// The kernels of a step at one level, as pointers; csrc/step/kernels.h describes them.
#pragma once

#include <cstdint>

#include "../goldsmith.h"

namespace gs {

struct StepKernels {
    void (*linear)(const gs_linear_args& l, int64_t begin, int64_t end, const float* x, int64_t rows, int64_t stride,
                   float* y, int64_t y_stride, bool bf16);
    void (*norm)(const float* x, const gs_tensor& weight, int64_t count, float epsilon, float* y, bool bf16);
    void (*add)(float* y, const float* x, int64_t count, bool bf16);
    void (*read_row)(const gs_tensor& t, int64_t first, int64_t count, float* to);
    void (*write_row)(const gs_tensor& t, int64_t first, int64_t count, const float* from);
    void (*attend)(const float* queries, int64_t query_count, const void* keys, const void* values, int64_t first,
                   int64_t count, int64_t D, float scaling, float* weights, float* out, float* ends, bool bf16);
};

}  // namespace gs
