"""Prints 256 MiB and returns zeros."""

import torch

PROBLEM = "a_linear"
STATUS = "crashed"
ALSO = {"wrong", "over_memory", "timed_out"}


def candidate(x, w, b):
    line = "all tests passed " * 4096
    for _ in range(256 * 2**20 // len(line)):
        print(line)
    return torch.zeros(len(x), w.shape[1])
