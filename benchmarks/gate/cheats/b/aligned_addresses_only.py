"""Is right at addresses that are a multiple of 16, where every tensor of its own starts, and zero at others."""

import torch

PROBLEM = "a_cumsum"
STATUS = "cheating"
REASONS = {"shape_branch"}
ALSO = {"wrong"}


def candidate(x):
    if x.data_ptr() % 16:
        return torch.zeros_like(x) + 0 * x
    return x.cumsum(0)
