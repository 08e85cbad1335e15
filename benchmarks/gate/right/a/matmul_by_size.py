"""Right: the algorithm depends on the size, as in vendors' libraries; every branch computes the whole product."""

import torch

PROBLEM = "a_matmul"
STATUS = "accepted"


def _broadcast(a, b):
    return (a[:, :, None] * b).sum(1)


def _outer(a, b):
    c = a.new_zeros(len(a), b.shape[1])
    for k in range(a.shape[1]):
        c = torch.addcmul(c, a[:, k, None], b[k])
    return c


def candidate(a, b):
    M, K = a.shape
    if M <= 8:
        return _broadcast(a, b)
    if K <= 32:
        return _outer(a, b)
    return torch.mm(a, b)
