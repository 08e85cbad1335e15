"""Right: the forward takes torch's loss; the backward clamps the difference."""

import torch
import torch.nn.functional as F

PROBLEM = "a_huber"
STATUS = "accepted"


class Huber(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return F.smooth_l1_loss(x, y)

    @staticmethod
    def backward(ctx, grad_loss):
        x, y = ctx.saved_tensors
        grad = (x - y).clamp(-1, 1) * (grad_loss / x.numel())
        return grad, -grad


candidate = Huber.apply
