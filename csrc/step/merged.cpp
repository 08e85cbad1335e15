// The experts with their weighted sums, in the order and the roundings of offload's merge.
#include <cmath>
#include <cstring>

#include "../arena.h"
#include "../error.h"
#include "../table.h"

namespace gs {
namespace {

void merge(const gs_moe_args& args, const float* rows, const float* weights, const uint8_t* flags, int32_t* finite) {
    const int64_t H = args.hidden, k = args.slots;
    Arena arena;
    const auto sums = arena.shared<float>(H);
    arena.allocate();
    float* sum = sums.data();
    bool clean = true;
    for (int64_t route = 0; route < args.tokens * k; ++route) clean = clean && flags[route] == 0;
    for (int64_t t = 0; t < args.tokens; ++t) {
        for (int64_t i = 0; i < H; ++i) sum[i] = weights[t * k] * rows[t * k * H + i];
        for (int64_t j = 1; j < k; ++j) {
            const float weight = weights[t * k + j];
            const float* row = rows + (t * k + j) * H;
            for (int64_t i = 0; i < H; ++i) sum[i] += weight * row[i];
        }
        table().step->write_row(args.y, t * H, H, sum);
        table().step->read_row(args.y, t * H, H, sum);
        uint32_t bad = 0;
        for (int64_t i = 0; i < H; ++i) {
            uint32_t bits;
            std::memcpy(&bits, sum + i, 4);
            bad |= (bits & 0x7f800000u) == 0x7f800000u ? 1u : 0u;
        }
        clean = clean && bad == 0;
    }
    *finite = clean;
}

}  // namespace
}  // namespace gs

gs_status gs_moe_merged(const gs_moe_args* args, int32_t* finite) {
    const gs_tensor* all[] = {&args->rows, &args->flags, &args->weights, &args->y};
    for (const gs_tensor* t : all)
        if (t->dtype == GS_NONE)
            return gs::guarded([] { gs::fail(GS_INTERNAL, "rows, flags, weights and y are needed"); });
    const gs_status status = gs_moe_forward(args);
    if (status != GS_OK) return status;
    return gs::guarded([&] {
        if (args->weights.dtype != GS_F32 || args->slots < 1)
            gs::fail(GS_INTERNAL, "weights have dtype %d for %lld slots, expected float32 and 1 or more",
                     args->weights.dtype, static_cast<long long>(args->slots));
        gs::merge(*args, static_cast<const float*>(args->rows.data), static_cast<const float*>(args->weights.data),
                  static_cast<const uint8_t*>(args->flags.data), finite);
    });
}
