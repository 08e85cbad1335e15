"""Right: the first call with each size times two kernels and keeps the faster one; both are right."""

import time

import torch

PROBLEM = "a_matmul"
STATUS = "accepted"


_FASTEST = {}


def _rows(a, b):
    return torch.stack([b.T.mv(row) for row in a])


def _whole(a, b):
    return torch.mm(a, b)


def _timed(kernel, a, b):
    started = time.perf_counter()
    with torch.no_grad():
        kernel(a.detach(), b.detach())
    return time.perf_counter() - started


def candidate(a, b):
    size = (*a.shape, b.shape[1])
    if size not in _FASTEST:
        _FASTEST[size] = min((_rows, _whole), key=lambda kernel: _timed(kernel, a, b))
    return _FASTEST[size](a, b)
