"""Right: one row of x at a time, so the difference of all pairs never exists."""

import torch

PROBLEM = "a_distance"
STATUS = "accepted"


class Distance(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, z):
        ctx.save_for_backward(x, z)
        return torch.stack([(row - z).square().sum(-1) for row in x])

    @staticmethod
    def backward(ctx, grad_y):
        x, z = ctx.saved_tensors
        dx, dz = torch.empty_like(x), torch.zeros_like(z)
        for m, row in enumerate(x):
            part = 2 * grad_y[m, :, None] * (row - z)
            dx[m] = part.sum(0)
            dz -= part
        return dx, dz


candidate = Distance.apply
