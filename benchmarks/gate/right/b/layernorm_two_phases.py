"""Right: the gradients of w and b come from partial sums of three rows each, which a second phase adds."""

import torch

PROBLEM = "a_layernorm"
STATUS = "accepted"


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        mean = x.mean(-1, keepdim=True)
        inv = torch.rsqrt((x - mean).square_().mean(-1, keepdim=True).add_(eps))
        ctx.save_for_backward(x, w, mean, inv)
        return torch.addcmul(b, (x - mean) * inv, w)

    @staticmethod
    def backward(ctx, grad_y):
        x, w, mean, inv = ctx.saved_tensors
        normal = (x - mean) * inv
        parts = [(g.sum(0), (g * n).sum(0)) for g, n in zip(grad_y.split(3), normal.split(3))]
        grad_b, grad_w = (torch.stack(each).sum(0) for each in zip(*parts))
        grad = grad_y * w
        inner = (grad * normal).mean(-1, keepdim=True)
        return inv * (grad - grad.mean(-1, keepdim=True) - normal * inner), grad_w, grad_b, None


candidate = LayerNorm.apply
