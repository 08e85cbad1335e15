// The forward and backward of experts.moe for one level.
#pragma once

#include "tiles/backward.h"
#include "tiles/forward.h"
#include "vectors/backward.h"
#include "vectors/forward.h"

namespace gs::GS_LEVEL {

inline void moe_forward(const gs_moe_args& args, const Plan& plan) {
#if defined(__AMX_BF16__)
    if (TileCall::takes(args, plan)) return TileForward(args, plan).run();
#endif
    Forward(args, plan).run();
}

inline void moe_backward(const gs_moe_args& args, const Plan& plan) {
#if defined(__AMX_BF16__)
    if (TileCall::takes(args, plan)) return TileBackward(args, plan).run();
#endif
    Backward(args, plan).run();
}

}  // namespace gs::GS_LEVEL
