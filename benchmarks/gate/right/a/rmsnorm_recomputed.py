"""Right: the backward saves only the inputs and computes 1/rms again."""

import torch
import torch.nn.functional as F

PROBLEM = "a_rmsnorm"
STATUS = "accepted"


class RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, eps):
        ctx.save_for_backward(x, w)
        ctx.eps = eps
        return F.rms_norm(x, x.shape[-1:], w, eps)

    @staticmethod
    def backward(ctx, grad_y):
        x, w = ctx.saved_tensors
        inv = (x.square().mean(-1, keepdim=True) + ctx.eps).rsqrt_()
        grad = grad_y * w
        inner = (grad * x).mean(-1, keepdim=True)
        return grad * inv - x * (inner * inv.pow(3)), (grad_y * x * inv).sum(0), None


candidate = RMSNorm.apply
