// The entry points of experts.moe: they make the grouping of a call and run the kernels of the current level.
#include "../error.h"
#include "../pool.h"
#include "../table.h"
#include "grouping.h"

namespace {

// Results must have the dtypes that the kernels write.
void check_results(const gs_moe_args& args) {
    const struct {
        const char* name;
        const gs_tensor& tensor;
        gs_dtype wanted;
    } all[] = {{"y", args.y, args.x.dtype},   {"g", args.g, args.x.dtype},   {"u", args.u, args.x.dtype},
               {"dy", args.dy, args.x.dtype}, {"dx", args.dx, args.x.dtype}, {"rows", args.rows, GS_F32},
               {"flags", args.flags, GS_U8}};
    for (const auto& [name, tensor, wanted] : all)
        if (tensor.dtype != GS_NONE && tensor.dtype != wanted)
            gs::fail(GS_INTERNAL, "%s has dtype %d, expected %d", name, tensor.dtype, wanted);
}

// Every extent is 0 or more, and whatever a kernel divides by is at least 1: SIGFPE would end the caller's process.
void check_extents(const gs_moe_args& args) {
    const int64_t least = args.int8 > 0 ? 1 : 0;  // integer products divide by each of these
    const struct {
        const char* name;
        int64_t value, least;
    } all[] = {{"tokens", args.tokens, 0},
               {"slots", args.slots, least},
               {"experts", args.experts, 0},
               {"hidden", args.hidden, least},
               {"intermediate", args.intermediate, least},
               {"slice_count", args.slice_count, 0},
               {"int8", args.int8, 0}};
    for (const auto& [name, value, wanted] : all)
        if (value < wanted)
            gs::fail(GS_INVALID, "%s is %lld, expected %lld or more", name, static_cast<long long>(value),
                     static_cast<long long>(wanted));
    for (int64_t s = 0; s < args.slice_count; ++s) {
        const gs_slice& slice = args.slices[s];
        if (slice.begin < 0 || slice.end < slice.begin || slice.end > args.intermediate)
            gs::fail(GS_INVALID, "slice %lld is [%lld, %lld), expected a part of [0, %lld)", static_cast<long long>(s),
                     static_cast<long long>(slice.begin), static_cast<long long>(slice.end),
                     static_cast<long long>(args.intermediate));
        for (const gs_matrix* matrix : {&slice.gate, &slice.up, &slice.down}) {
            const bool scaled = matrix->format >= GS_INT8, divides = args.int8 > 0 || (scaled && matrix->cols > 0);
            if (matrix->rows < 0 || matrix->cols < 0 || (divides && matrix->group < 1))
                gs::fail(
                    GS_INVALID,
                    "a matrix of slice %lld is [%lld, %lld] with %lld inputs per scale, expected sizes of 0 or more "
                    "and at least 1 input per scale",
                    static_cast<long long>(s), static_cast<long long>(matrix->rows),
                    static_cast<long long>(matrix->cols), static_cast<long long>(matrix->group));
        }
    }
}

template <class Kernel> gs_status call(const gs_moe_args* args, Kernel kernel) {
    return gs::guarded([&] {
        if (args->size != sizeof(gs_moe_args))
            gs::fail(GS_INTERNAL,
                     "gs_moe_args has %zu bytes, expected %zu: library and Python code are of different versions",
                     args->size, sizeof(gs_moe_args));
        check_extents(*args);
        check_results(*args);
        const gs::Threads threads(args->threads);
        kernel(*args, gs::Grouping(*args, gs::table().moe_rows));
    });
}

}  // namespace

gs_status gs_moe_forward(const gs_moe_args* args) { return call(args, gs::table().moe_forward); }

gs_status gs_moe_backward(const gs_moe_args* args) { return call(args, gs::table().moe_backward); }
