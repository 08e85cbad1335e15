"""y[t] = gate[t] (sum_{s <= t} h[t - s] z[s] + skip z[t]),  z = a b,  h[t] = taps[t] exp(-t decay): Hyena's operator.

A causal convolution as long as the sequence, by blocks of outputs and inputs, and its backward, which gathers the
gradient of each tap from all pairs of blocks.
"""

from __future__ import annotations

import torch

from goldsmith import assay

BLOCK = 4


@assay.case(T=[11], C=[3])
def tokens(make, T, C):
    return {
        "a": make.normal(T, C), "b": make.normal(T, C), "gate": make.normal(T, C), "taps": make.normal(T, C),
        "decay": 0.3 * make.uniform(C), "skip": make.normal(C),
    }  # fmt: skip


@assay.case(T=[6], C=[5])
def short(make, T, C):
    return tokens[0].draw(make, T, C)


def golden(a, b, gate, taps, decay, skip):
    T = len(a)
    z = assay.stage("z", a * b)
    h = assay.stage("h", taps * torch.exp(-torch.arange(T).unsqueeze(1) * decay))
    rows = [(h[: t + 1].flip(0) * z[: t + 1]).sum(0) for t in range(T)]
    mixed = assay.stage("mixed", torch.stack(rows) + skip * z)
    return gate * mixed


def blocks(T):
    return [torch.arange(at, min(at + BLOCK, T)) for at in range(0, T, BLOCK)]


class LongConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, a, b, gate, taps, decay, skip):
        T, C = a.shape
        z = assay.stage("z", a * b)
        h = assay.stage("h", taps * torch.exp(-torch.arange(T).unsqueeze(1) * decay))
        mixed = torch.empty(T, C)
        for i, out in enumerate(blocks(T)):
            acc = skip * z[out]
            for into in blocks(T)[: i + 1]:
                lag = out.unsqueeze(1) - into
                product = h[lag.clamp(min=0)] * z[into]
                acc += torch.where((lag >= 0).unsqueeze(2), product, 0.0).sum(1)
            mixed[out] = acc
        mixed = assay.stage("mixed", mixed)
        ctx.save_for_backward(a, b, gate, taps, decay, skip, mixed)
        return gate * mixed

    @staticmethod
    def backward(ctx, g):
        a, b, gate, taps, decay, skip, mixed = ctx.saved_tensors
        T, C = a.shape
        steps = torch.arange(T).unsqueeze(1)
        z, fade = a * b, torch.exp(-steps * decay)
        h = taps * fade
        dmixed = g * gate
        dz, dh = torch.empty(T, C), torch.zeros(T, C)
        for j, into in enumerate(blocks(T)):
            acc = skip * dmixed[into]
            for out in blocks(T)[j:]:
                lag = out.unsqueeze(1) - into
                causal, near = (lag >= 0).unsqueeze(2), lag.clamp(min=0)
                acc += torch.where(causal, h[near] * dmixed[out].unsqueeze(1), 0.0).sum(0)
                pairs = torch.where(causal, dmixed[out].unsqueeze(1) * z[into], 0.0)
                dh.index_add_(0, near.flatten(), pairs.flatten(0, 1))
            dz[into] = acc
        ddecay = -(steps * dh * h).sum(0)
        return dz * b, dz * a, g * mixed, dh * fade, ddecay, (dmixed * z).sum(0)


def kernel(a, b, gate, taps, decay, skip):
    return LongConv.apply(a, b, gate, taps, decay, skip)


def target():
    return assay.Target(kernel, golden, cases=[tokens, short], name="long_conv", outputs=("y",))
