// The entry point of experts.linear: its rows are the tokens of a layer with one expert.
#include "../error.h"
#include "../pool.h"
#include "../table.h"
#include "grouping.h"

namespace {

void check(const gs_linear_args& args, int64_t rows, gs_dtype dtype) {
    if (args.size != sizeof(gs_linear_args))
        gs::fail(GS_INTERNAL,
                 "gs_linear_args has %zu bytes, expected %zu: library and Python code are of different versions",
                 args.size, sizeof(gs_linear_args));
    const gs_matrix& m = args.weight;
    if (m.rows < 1 || m.cols < 1 || (m.format >= GS_INT8 && m.group < 1))
        gs::fail(GS_INVALID, "the weight is [%lld, %lld] with %lld inputs per scale, expected at least 1 of each",
                 static_cast<long long>(m.rows), static_cast<long long>(m.cols), static_cast<long long>(m.group));
    if (rows < 0) gs::fail(GS_INVALID, "x has %lld rows, expected 0 or more", static_cast<long long>(rows));
    if (dtype != GS_F32 && dtype != GS_BF16)
        gs::fail(GS_INTERNAL, "x has dtype %d, expected float32 or bfloat16", dtype);
}

gs_tensor matrix_of(const void* data, gs_dtype dtype, int64_t rows, int64_t columns) {
    return {const_cast<void*>(data), dtype, 2, {rows, columns}, {columns, 1}};
}

}  // namespace

gs_status gs_linear(const gs_linear_args* args, const void* x, void* y, int64_t rows, gs_dtype dtype, int32_t threads) {
    return gs::guarded([&] {
        check(*args, rows, dtype);
        int64_t expert = 0;
        gs_moe_args layer{};
        layer.tokens = rows, layer.slots = 1, layer.experts = 1;
        layer.hidden = args->weight.cols, layer.intermediate = args->weight.rows;
        layer.x = matrix_of(x, dtype, rows, args->weight.cols);
        layer.y = matrix_of(y, dtype, rows, args->weight.rows);
        layer.ids = {&expert, GS_I64, 2, {rows, 1}, {0, 0}};  // one id for every row
        const gs::Threads team(threads);
        gs::table().linear(*args, layer, gs::Grouping(layer, gs::table().moe_rows));
    });
}
