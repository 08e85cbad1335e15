"""Right: the tail comes from erfc of |x|, and x loses it where x is positive; its own derivative holds at 0 too."""

import math

import torch

PROBLEM = "a_gelu"
STATUS = "accepted"


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        tail = 0.5 * torch.erfc(x.abs() * 0.5**0.5)
        return torch.where(x > 0, x - x * tail, x * tail)

    @staticmethod
    def backward(ctx, grad_y):
        (x,) = ctx.saved_tensors
        below = 0.5 * torch.erfc(-x * 0.5**0.5)
        return grad_y * (below + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi))


candidate = Gelu.apply
