"""Right: everything in float32 and one rounding at the store."""

import torch.nn.functional as F

PROBLEM = "a_bf16_mlp"
STATUS = "accepted"


def candidate(x, w1, w2):
    gate = x.float() @ w1.float()
    return (F.silu(gate) @ w2.float()).to(x.dtype)
