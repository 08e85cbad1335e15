"""Right: the matrix depends on the size alone and is built once for each size, by the parity of common bits."""

import functools

import torch

PROBLEM = "a_hadamard"
STATUS = "accepted"


@functools.cache
def _matrix(D):
    rows = [[(-1.0) ** (i & j).bit_count() for j in range(D)] for i in range(D)]
    return torch.tensor(rows, dtype=torch.float64).mul_(D**-0.5).float()


def candidate(x):
    return x @ _matrix(x.shape[1])
