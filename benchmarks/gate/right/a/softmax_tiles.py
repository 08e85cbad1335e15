"""Right: tiles of 16 columns with a running maximum; the temporaries are changed in place, the input is not."""

import torch

PROBLEM = "a_softmax"
STATUS = "accepted"


class Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        top = x.new_full((len(x), 1), -torch.inf)
        total = torch.zeros_like(top)
        for tile in x.split(16, -1):
            new_top = torch.maximum(top, tile.amax(-1, keepdim=True))
            base = torch.where(new_top == -torch.inf, 0.0, new_top)
            total.mul_(torch.exp(top - base)).add_(torch.exp(tile - base).sum(-1, keepdim=True))
            top = new_top
        y = x - top
        y.exp_().div_(total)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        (y,) = ctx.saved_tensors
        return torch.addcmul(grad_y * y, y, (grad_y * y).sum(-1, keepdim=True), value=-1)


def candidate(x):
    return Softmax.apply(x)
