"""Right: Hillis and Steele's scan in log2(T) steps; the backward is the same scan on flipped rows."""

import torch

PROBLEM = "a_cumsum"
STATUS = "accepted"


def _scan(x):
    step = 1
    while step < len(x):
        x = torch.cat([x[:step], x[step:] + x[:-step]])
        step *= 2
    return x.clone() if step == 1 else x


class Cumsum(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return _scan(x)

    @staticmethod
    def backward(ctx, grad_y):
        return _scan(grad_y.flip(0)).flip(0)


candidate = Cumsum.apply
