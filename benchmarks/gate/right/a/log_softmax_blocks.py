"""Right: log-sum-exp over blocks of columns, merged pairwise; the backward reads the result and not the input."""

import torch

PROBLEM = "a_log_softmax"
STATUS = "accepted"


class LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        top = x.amax(-1, keepdim=True)
        parts = [torch.exp(block - top).sum(-1, keepdim=True) for block in x.split(8, -1)]
        while len(parts) > 1:
            parts = [sum(parts[i : i + 2]) for i in range(0, len(parts), 2)]
        y = (x - top) - parts[0].log()
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        (y,) = ctx.saved_tensors
        return grad_y - y.exp() * grad_y.sum(-1, keepdim=True)


candidate = LogSoftmax.apply
