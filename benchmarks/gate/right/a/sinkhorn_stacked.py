"""Right: own log-sum-exp over the two axes in turn, all 20 steps, on matrices side by side."""

import torch

PROBLEM = "a_sinkhorn"
STATUS = "accepted"


def _normalised(x, axis):
    top = x.amax(axis, keepdim=True)
    return (x - top) - torch.log(torch.exp(x - top).sum(axis, keepdim=True))


def candidate(x):
    x = x.permute(1, 2, 0)
    for _ in range(20):
        x = _normalised(_normalised(x, 1), 0)
    return torch.exp(x).permute(2, 0, 1)
