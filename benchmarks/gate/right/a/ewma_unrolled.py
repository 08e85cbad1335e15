"""Right: all 300 steps, four to a turn of the loop, written to a preallocated result."""

import torch

PROBLEM = "a_ewma"
STATUS = "accepted"


def candidate(x):
    y = torch.empty_like(x)
    h = torch.zeros_like(x[0])
    for start in range(0, len(x), 4):
        for t in range(start, min(start + 4, len(x))):
            h = torch.mul(h, 0.9).add_(x[t], alpha=0.1)
            y[t] = h
    return y
