"""Right: k times the best score that is left; scores are masked in a copy."""

import torch

PROBLEM = "a_router"
STATUS = "accepted"


class Router(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, k):
        left = scores.detach().clone()
        picks = []
        for _ in range(k):
            picks.append(left.argmax(-1, keepdim=True))
            left.scatter_(1, picks[-1], -torch.inf)
        index = torch.cat(picks, 1)
        weight = torch.softmax(scores.gather(1, index), -1)
        ctx.save_for_backward(index, weight)
        ctx.mark_non_differentiable(index)
        ctx.shape = scores.shape
        return weight, index

    @staticmethod
    def backward(ctx, grad_weight, _):
        index, weight = ctx.saved_tensors
        grad = weight * (grad_weight - (grad_weight * weight).sum(-1, keepdim=True))
        return grad.new_zeros(ctx.shape).scatter_add(1, index, grad), None


candidate = Router.apply
