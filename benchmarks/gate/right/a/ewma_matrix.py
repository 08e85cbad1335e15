"""Right: a triangular matrix of powers of the decay, kept for each length because it depends on nothing else."""

import functools

import torch

PROBLEM = "a_ewma"
STATUS = "accepted"


@functools.cache
def _weights(T):
    t = torch.arange(T, dtype=torch.float64)
    age = t[:, None] - t
    return torch.where(age < 0, 0.0, 0.1 * 0.9**age)


def candidate(x):
    return (_weights(len(x)) @ x.double()).to(x.dtype)
