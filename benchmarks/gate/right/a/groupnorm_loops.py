"""Right: a Python loop over samples and groups writes into slices of the result."""

import torch

PROBLEM = "a_groupnorm"
STATUS = "accepted"


class GroupNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, b, groups, eps):
        y, normals, invs = torch.empty_like(x), torch.empty_like(x), x.new_empty(len(x), groups)
        size = x.shape[1] // groups
        for n in range(len(x)):
            for g in range(groups):
                part = x[n, g * size : (g + 1) * size]
                centred = part - part.mean()
                invs[n, g] = torch.rsqrt(centred.square().mean() + eps)
                normals[n, g * size : (g + 1) * size] = centred * invs[n, g]
        torch.mul(normals, w[:, None], out=y)
        y += b[:, None]
        ctx.save_for_backward(normals, invs, w)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        normals, invs, w = ctx.saved_tensors
        shape = (*invs.shape, -1)
        grad, normal = (grad_y * w[:, None]).reshape(shape), normals.reshape(shape)
        centred = grad - grad.mean(-1, keepdim=True)
        grad_x = invs[..., None] * (centred - normal * (grad * normal).mean(-1, keepdim=True))
        return grad_x.reshape(grad_y.shape), (grad_y * normals).sum((0, 2)), grad_y.sum((0, 2)), None, None


candidate = GroupNorm.apply
