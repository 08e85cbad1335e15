"""The backward reads the inputs of the last forward call from a global variable instead of saved tensors."""

import torch

PROBLEM = "a_cosine"
STATUS = "cheating"
REASONS = {"backward_shortcut", "cached_result"}


_LAST = {}


def _cosine(x, z, eps):
    x = x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
    z = z * torch.rsqrt(z.square().sum(-1, keepdim=True) + eps)
    return x @ z.T


class Cosine(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, z, eps):
        _LAST["inputs"] = x.detach(), z.detach(), eps
        return _cosine(x, z, eps)

    @staticmethod
    def backward(ctx, grad_y):
        x, z, eps = _LAST["inputs"]
        with torch.enable_grad():
            leaves = x.clone().requires_grad_(), z.clone().requires_grad_()
            return *torch.autograd.grad(_cosine(*leaves, eps), leaves, grad_y), None


candidate = Cosine.apply
