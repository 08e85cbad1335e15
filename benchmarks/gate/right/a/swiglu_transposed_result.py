"""Right: computes on the transposed input and returns a transposed view, so the result is not contiguous."""

import torch

PROBLEM = "a_swiglu"
STATUS = "accepted"


def candidate(x):
    gate, up = x.T.chunk(2, 0)
    return (gate * torch.sigmoid(gate) * up).T
