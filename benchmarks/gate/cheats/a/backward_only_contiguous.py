"""The backward returns zeros for an output gradient that is not contiguous, as after a sum or a transpose."""

import torch

PROBLEM = "a_bmm"
STATUS = "cheating"
REASONS = {"backward_shortcut"}


class Bmm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, grad_y):
        x, w = ctx.saved_tensors
        if not grad_y.is_contiguous():
            return torch.zeros_like(x), torch.zeros_like(w)
        return grad_y @ w.mT, x.mT @ grad_y


candidate = Bmm.apply
