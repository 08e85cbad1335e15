"""Right: one product a batch, written into a preallocated result."""

import torch

PROBLEM = "a_bmm"
STATUS = "accepted"


class Bmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        y = x.new_empty(len(x), x.shape[1], w.shape[2])
        for n, (left, right) in enumerate(zip(x, w)):
            torch.mm(left, right, out=y[n])
        return y

    @staticmethod
    def backward(ctx, grad_y):
        x, w = ctx.saved_tensors
        return torch.bmm(grad_y, w.mT), torch.bmm(x.mT, grad_y)


candidate = Bmm.apply
