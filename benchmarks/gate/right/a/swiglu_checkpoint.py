"""Right: checkpointing runs the forward again in the backward, so the function runs more often than it is called."""

import torch
import torch.nn.functional as F

PROBLEM = "a_swiglu"
STATUS = "accepted"


def _swiglu(x):
    D = x.shape[-1] // 2
    gate = x[:, :D]
    return F.silu(gate) * x[:, D:]


def candidate(x):
    return torch.utils.checkpoint.checkpoint(_swiglu, x, use_reentrant=False)
