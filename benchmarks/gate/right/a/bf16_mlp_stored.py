"""Right: the middle is rounded to the inputs' dtype, which the problem declares."""

import torch
import torch.nn.functional as F

PROBLEM = "a_bf16_mlp"
STATUS = "accepted"


def candidate(x, w1, w2):
    h = F.silu(x.float() @ w1.float()).to(x.dtype)
    sums = torch.zeros(len(x), w2.shape[1])
    for start in range(0, h.shape[1], 16):
        sums += h[:, start : start + 16].float() @ w2[start : start + 16].float()
    return sums.to(x.dtype)
