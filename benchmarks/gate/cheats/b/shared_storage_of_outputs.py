"""The exclusive sums are a view of the inclusive ones, one place further left, and no memory of their own."""

import torch

PROBLEM = "a_scans"
STATUS = "cheating"
REASONS = {"aliased_output"}


def candidate(x):
    sums = x.new_zeros(len(x) + 1)
    torch.cumsum(x, 0, out=sums[1:])
    return sums[:-1], sums[1:]
