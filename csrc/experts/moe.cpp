// The entry points of experts.moe: they make the plan of a call and run the kernels of the current level.
#include "../error.h"
#include "../pool.h"
#include "../table.h"
#include "plan.h"

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
            gs::fail(GS_INTERNAL, "%s has dtype %d, wanted %d", name, tensor.dtype, wanted);
}

template <class Kernel> gs_status call(const gs_moe_args* args, Kernel kernel) {
    return gs::guarded([&] {
        if (args->size != sizeof(gs_moe_args))
            gs::fail(GS_INTERNAL,
                     "gs_moe_args has %zu bytes, wanted %zu: library and Python code are of different versions",
                     args->size, sizeof(gs_moe_args));
        check_results(*args);
        const gs::Threads threads(args->threads);
        kernel(*args, gs::Plan(*args, gs::table().moe_rows));
    });
}

}  // namespace

gs_status gs_moe_forward(const gs_moe_args* args) { return call(args, gs::table().moe_forward); }

gs_status gs_moe_backward(const gs_moe_args* args) { return call(args, gs::table().moe_backward); }
