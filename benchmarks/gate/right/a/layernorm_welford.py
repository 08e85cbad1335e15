"""Right: mean and squared deviations of chunks are merged by Chan's formula."""

import torch

PROBLEM = "a_layernorm"
STATUS = "accepted"


class LayerNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, eps):
        mean, squares, count = x.new_zeros(len(x), 1), x.new_zeros(len(x), 1), 0
        for chunk in x.split(12, -1):
            n = chunk.shape[-1]
            chunk_mean = chunk.mean(-1, keepdim=True)
            delta = chunk_mean - mean
            squares = squares + (chunk - chunk_mean).square().sum(-1, keepdim=True)
            squares = squares + delta.square() * (count * n / (count + n))
            mean = mean + delta * (n / (count + n))
            count += n
        inv = torch.rsqrt(squares / count + eps)
        normal = (x - mean) * inv
        ctx.save_for_backward(normal, inv, w)
        return normal * w + b

    @staticmethod
    def backward(ctx, grad_y):
        normal, inv, w = ctx.saved_tensors
        grad = grad_y * w
        centred = grad - grad.mean(-1, keepdim=True)
        grad_x = inv * (centred - normal * (grad * normal).mean(-1, keepdim=True))
        return grad_x, (grad_y * normal).sum(0), grad_y.sum(0), None


candidate = LayerNorm.apply
