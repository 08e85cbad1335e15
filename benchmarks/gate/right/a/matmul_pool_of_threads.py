"""Right: a thread pool lives from the first call on, and every call waits for its own work."""

import concurrent.futures

import torch

PROBLEM = "a_matmul"
STATUS = "accepted"


_POOL = []


def _pool():
    if not _POOL:
        _POOL.append(concurrent.futures.ThreadPoolExecutor(max_workers=2))
    return _POOL[0]


def _product(a, b):
    a, b = a.detach(), b.detach()  # the grad mode belongs to a thread
    c = a.new_empty(len(a), b.shape[1])
    tiles = [slice(start, start + 4) for start in range(0, len(a), 4)]
    list(_pool().map(lambda tile: torch.mm(a[tile], b, out=c[tile]), tiles))
    return c


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        return _product(a, b)

    @staticmethod
    def backward(ctx, grad):
        a, b = ctx.saved_tensors
        return _product(grad, b.T), _product(a.T, grad)


candidate = Matmul.apply
