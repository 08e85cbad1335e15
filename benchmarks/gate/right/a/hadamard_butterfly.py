"""Right: log2(D) steps of sums and differences, then one scale."""

import torch

PROBLEM = "a_hadamard"
STATUS = "accepted"


def candidate(x):
    T, D = x.shape
    step = 1
    while step < D:
        pairs = x.reshape(T, -1, 2, step)
        first, second = pairs[:, :, 0], pairs[:, :, 1]
        x = torch.stack([first + second, first - second], 2).reshape(T, D)
        step *= 2
    return x * D**-0.5
