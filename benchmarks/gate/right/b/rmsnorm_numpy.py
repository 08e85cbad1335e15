"""Right: numpy does the forward and the backward, in float64."""

import numpy as np
import torch

PROBLEM = "a_rmsnorm"
STATUS = "accepted"


class RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        ctx.save_for_backward(x, w)
        rows = x.numpy().astype(np.float64)
        ctx.inv = 1 / np.sqrt((rows**2).mean(-1, keepdims=True) + eps)
        return torch.from_numpy(rows * ctx.inv * w.numpy()).to(x.dtype)

    @staticmethod
    def backward(ctx, grad_y):
        x, w = (t.numpy().astype(np.float64) for t in ctx.saved_tensors)
        g, normal = grad_y.numpy().astype(np.float64), x * ctx.inv
        inner = (g * w * normal).mean(-1, keepdims=True)
        grad_x, grad_w = ctx.inv * (g * w - normal * inner), (g * normal).sum(0)
        return torch.from_numpy(grad_x).to(grad_y.dtype), torch.from_numpy(grad_w).to(grad_y.dtype), None


candidate = RmsNorm.apply
