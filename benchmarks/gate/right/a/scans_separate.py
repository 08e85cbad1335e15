"""Right: two results in memory of their own; the exclusive sums are the inclusive ones moved by one."""

import torch

PROBLEM = "a_scans"
STATUS = "accepted"


def candidate(x):
    inclusive = x.cumsum(0)
    exclusive = torch.zeros_like(x)
    exclusive[1:] = inclusive[:-1]
    return exclusive, inclusive
