"""Right: frees memory before it allocates; the collection touches no other object."""

import gc

import torch

PROBLEM = "a_tanh_scale"
STATUS = "accepted"


def candidate(x, w, scale):
    gc.collect(0)
    y = torch.empty(len(x), w.shape[1])
    torch.mm(x, w, out=y)
    return torch.tanh(y, out=y).mul_(scale)
