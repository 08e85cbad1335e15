// experts.moe of one level.
#pragma once

#include "backward.h"
#include "forward.h"

namespace gs::GS_LEVEL {

inline void moe_forward(const gs_moe_args& args, const Plan& plan) { Forward(args, plan).run(); }

inline void moe_backward(const gs_moe_args& args, const Plan& plan) { Backward(args, plan).run(); }

}  // namespace gs::GS_LEVEL
