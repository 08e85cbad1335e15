// The entry points of experts.moe: the plan of the call, then the kernels of the level.
#include "../error.h"
#include "../pool.h"
#include "../table.h"
#include "plan.h"

namespace {

template <class Kernel> gs_status call(const gs_moe_args* args, Kernel kernel) {
    return gs::guarded([&] {
        if (args->size != sizeof(gs_moe_args))
            gs::fail(GS_INTERNAL,
                     "gs_moe_args has %zu bytes, wanted %zu: library and Python code are of different versions",
                     args->size, sizeof(gs_moe_args));
        const gs::Threads threads(args->threads);
        kernel(*args, gs::Plan(*args, gs::table().moe_rows));
    });
}

}  // namespace

gs_status gs_moe_forward(const gs_moe_args* args) { return call(args, gs::table().moe_forward); }

gs_status gs_moe_backward(const gs_moe_args* args) { return call(args, gs::table().moe_backward); }
