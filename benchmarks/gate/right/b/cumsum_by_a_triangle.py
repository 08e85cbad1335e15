"""Right: a product with a lower triangle of ones, which is made once for each length."""

import functools

import torch

PROBLEM = "a_cumsum"
STATUS = "accepted"


@functools.lru_cache(maxsize=8)
def _triangle(T, dtype):
    return torch.ones(T, T, dtype=dtype).tril()


def candidate(x):
    return _triangle(len(x), x.dtype) @ x
