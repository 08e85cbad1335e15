"""Right: computes in a workspace that grows when needed, and returns a copy of the used part."""

import torch

PROBLEM = "a_linear"
STATUS = "accepted"


_SPACE = {"buffer": torch.zeros(0)}


def candidate(x, w, b):
    size = len(x) * w.shape[1]
    if _SPACE["buffer"].numel() < size:
        _SPACE["buffer"] = torch.zeros(size)
    y = _SPACE["buffer"][:size].view(len(x), -1)
    torch.mm(x, w, out=y)
    y.add_(b)
    return y.clone()
