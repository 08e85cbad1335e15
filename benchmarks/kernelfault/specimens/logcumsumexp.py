"""y[t] = log(exp(x0) + sum_{s <= t} exp(x[s])) along rows, in blocks: a scan by doubling, and a carry between blocks.

dx[t] = exp(x[t] - y[t]) r[t],  r[t] = g[t] + exp(y[t] - y[t+1]) r[t+1]: no exponent is positive.
"""

from __future__ import annotations

import torch

from goldsmith import assay

BLOCK = 8


@assay.case(R=[3], T=[21])
def rows(make, R, T):
    return {"x": make.normal(R, T), "x0": make.normal(R)}


@assay.case(R=[5], T=[10])
def short(make, R, T):
    return rows[0].draw(make, R, T)


def golden(x, x0):
    return torch.logcumsumexp(torch.cat((x0.unsqueeze(1), x), 1), 1)[:, 1:]


def scan(block):
    """The inclusive scan of a block's columns: each round joins what is twice as far."""
    reach = 1
    while reach < block.shape[1]:
        joined = torch.logaddexp(block[:, reach:], block[:, :-reach])
        block = torch.cat((block[:, :reach], joined), 1)
        reach *= 2
    return block


class LogCumSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, x0):
        y, carry = torch.empty(x.shape), x0
        for at in range(0, x.shape[1], BLOCK):
            block = scan(x[:, at : at + BLOCK])
            block = torch.logaddexp(block, carry.unsqueeze(1))
            y[:, at : at + BLOCK] = block
            carry = block[:, -1]
        ctx.save_for_backward(x, x0, y)
        return y

    @staticmethod
    def backward(ctx, g):
        x, x0, y = ctx.saved_tensors
        dx, r = torch.empty(x.shape), torch.zeros(len(x))
        for start in reversed(range(0, x.shape[1], BLOCK)):
            stop = min(start + BLOCK, x.shape[1])
            if stop < x.shape[1]:
                r = r * torch.exp(y[:, stop - 1] - y[:, stop])
            for t in reversed(range(start, stop)):
                r = g[:, t] + r
                dx[:, t] = torch.exp(x[:, t] - y[:, t]) * r
                if t > start:
                    r = r * torch.exp(y[:, t - 1] - y[:, t])
        return dx, r * torch.exp(x0 - y[:, 0])


def kernel(x, x0):
    return LogCumSumExp.apply(x, x0)


def target():
    return assay.Target(kernel, golden, cases=[rows, short], name="logcumsumexp")
