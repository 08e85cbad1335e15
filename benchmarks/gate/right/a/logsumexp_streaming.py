"""Right: one column after another updates a maximum and a sum; the result is a view of a wider buffer."""

import torch

PROBLEM = "a_logsumexp"
STATUS = "accepted"


class LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        top, total = x[:, 0], torch.ones_like(x[:, 0])
        for column in x.unbind(1)[1:]:
            new_top = torch.maximum(top, column)
            base = torch.where(new_top == -torch.inf, 0.0, new_top)
            total = total * torch.exp(top - base) + torch.exp(column - base)
            top = new_top
        y = torch.stack([top + total.log(), total], 1)[:, 0]
        ctx.save_for_backward(x, y)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        x, y = ctx.saved_tensors
        return torch.exp(x - y[:, None]) * grad_y[:, None]


candidate = LogSumExp.apply
