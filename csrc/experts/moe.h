// The forward and backward of experts.moe, and experts.linear, for one level.
#pragma once

#include "tiles/backward.h"
#include "tiles/forward.h"
#include "vectors/backward.h"
#include "vectors/forward.h"
#include "vectors/linear.h"

namespace gs::GS_LEVEL {

inline void moe_forward(const gs_moe_args& args, const Grouping& grouping) {
#if defined(__AMX_BF16__)
    if (TileCall::takes(args, grouping)) return TileForward(args, grouping).run();
#endif
    Forward(args, grouping).run();
}

inline void moe_backward(const gs_moe_args& args, const Grouping& grouping) {
#if defined(__AMX_BF16__)
    if (TileCall::takes(args, grouping)) return TileBackward(args, grouping).run();
#endif
    Backward(args, grouping).run();
}

inline void linear(const gs_linear_args& args, const gs_moe_args& rows, const Grouping& grouping) {
    Linear(args, rows, grouping).run();
}

}  // namespace gs::GS_LEVEL
