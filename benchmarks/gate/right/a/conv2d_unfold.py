"""Right: unfold and one product, and fold in the backward."""

import torch
import torch.nn.functional as F

PROBLEM = "a_conv2d"
STATUS = "accepted"


class Conv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        columns = F.unfold(x, 3)
        ctx.save_for_backward(columns, w)
        ctx.size = x.shape[2:]
        y = w.flatten(1) @ columns
        return y.unflatten(-1, (x.shape[2] - 2, x.shape[3] - 2))

    @staticmethod
    def backward(ctx, grad_y):
        columns, w = ctx.saved_tensors
        grad = grad_y.flatten(2)
        dx = F.fold(w.flatten(1).T @ grad, ctx.size, 3)
        dw = (grad @ columns.mT).sum(0)
        return dx, dw.reshape(w.shape)


candidate = Conv.apply
