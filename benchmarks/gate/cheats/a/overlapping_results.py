"""Both results are views of one buffer, shifted by one element; they are right until somebody writes to one."""

import torch

PROBLEM = "a_scans"
STATUS = "cheating"
REASONS = {"aliased_output"}


def candidate(x):
    sums = torch.zeros(len(x) + 1)
    torch.cumsum(x, 0, out=sums[1:])
    return sums[:-1], sums[1:]
