"""Right: the forward saves the derivative instead of the input, so that the backward is one product."""

import math

import torch

PROBLEM = "a_gelu"
STATUS = "accepted"


class Gelu(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        below = torch.erf(x * math.sqrt(0.5)).add_(1).mul_(0.5)
        slope = torch.exp(-0.5 * x * x).mul_(x).mul_(1 / math.sqrt(2 * math.pi)).add_(below)
        ctx.save_for_backward(slope)
        return below.mul_(x)

    @staticmethod
    def backward(ctx, grad_y):
        return grad_y * ctx.saved_tensors[0]


candidate = Gelu.apply
