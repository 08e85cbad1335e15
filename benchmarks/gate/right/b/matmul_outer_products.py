"""Right: adds K products of a column and a row in its own float64 workspace, which it keeps for the next call."""

import torch

PROBLEM = "a_matmul"
STATUS = "accepted"

_space = {}


class Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b):
        ctx.save_for_backward(a, b)
        shape = (a.shape[0], b.shape[1])
        total = _space.setdefault(shape, torch.empty(shape, dtype=torch.float64)).zero_()
        for column, row in zip(a.T.double(), b.double()):
            total.addr_(column, row)
        return total.to(a.dtype, copy=True)

    @staticmethod
    def backward(ctx, grad_y):
        a, b = ctx.saved_tensors
        return grad_y @ b.T, a.T @ grad_y


candidate = Matmul.apply
