"""loss[t] = logsumexp_v(h_t W_v) - h_t W_target, h = W[id] mix: a tied embedding and loss, W's rows shared by ranks.

Each of R ranks has ceil(V / R) rows of W, the last one what is left. What another rank has is zero in a rank's
part, and the parts are summed; the maximum and the sum of exponentials go over all ranks. A token with the target
-100 has no loss.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

IGNORED = -100


@assay.case(T=[9], V=[140], D=[4], R=[3])
def tokens(make, T, V, D, R):
    ids, target = make.integers(0, V, T), make.integers(0, V, T)
    ids[0], ids[1], ids[2], ids[3] = V - 2, 0, V // 2, V - 2
    target[1], target[4], target[5] = IGNORED, 1, V - 1
    return {
        "weight": make.normal(V, D), "mix": make.normal(D, D, std=D**-0.5), "ids": ids, "target": target, "R": R,
    }  # fmt: skip


@assay.case(T=[6], V=[11], D=[5], R=[2])
def few(make, T, V, D, R):
    return tokens[0].draw(make, T, V, D, R)


def golden(weight, mix, ids, target, R):
    x = assay.stage("x", weight[ids])
    h = assay.stage("h", x @ mix)
    logits = h @ weight.mT
    lse = assay.stage("lse", torch.logsumexp(logits, 1))
    own = logits.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
    return torch.where(target == IGNORED, 0.0, lse - own)


def shards(V, R):
    """The first row of each rank and the one behind its last."""
    each = -(-V // R)
    return [(rank * each, min((rank + 1) * each, V)) for rank in range(R)]


def gathered(part, index, first, last):
    """Rows of a rank's part at index, and zero for those of other ranks."""
    here = (index >= first) & (index < last)
    local = torch.where(here, index - first, 0)
    return torch.where(here.unsqueeze(1), part[local], 0.0)


class VocabParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, mix, ids, target, R):
        T, (V, D) = len(ids), weight.shape
        x = torch.zeros(T, D)
        for first, last in shards(V, R):
            x += gathered(weight[first:last], ids, first, last)
        x = assay.stage("x", x)
        h = assay.stage("h", x @ mix)
        top = torch.full((T,), -math.inf)
        for first, last in shards(V, R):
            top = torch.maximum(top, (h @ weight[first:last].mT).amax(1))
        total, own = torch.zeros(T), torch.zeros(T)
        for first, last in shards(V, R):
            logits = h @ weight[first:last].mT
            total += torch.exp(logits - top.unsqueeze(1)).sum(1)
            here = (target >= first) & (target < last)
            local = torch.where(here, target - first, 0).unsqueeze(1)
            own += torch.where(here, logits.gather(1, local).squeeze(1), 0.0)
        lse = assay.stage("lse", top + torch.log(total))
        ctx.save_for_backward(weight, mix, ids, target, x, h, lse)
        ctx.R = R
        return torch.where(target == IGNORED, 0.0, lse - own)

    @staticmethod
    def backward(ctx, g):
        weight, mix, ids, target, x, h, lse = ctx.saved_tensors
        T, (V, D) = len(ids), weight.shape
        g = torch.where(target == IGNORED, 0.0, g)
        dh, dweight = torch.zeros(T, D), torch.zeros(V, D)
        for first, last in shards(V, ctx.R):
            part = weight[first:last]
            slope = torch.exp(h @ part.mT - lse.unsqueeze(1))
            here = (target >= first) & (target < last)
            t = torch.nonzero(here).squeeze(1)
            slope[t, target[t] - first] -= 1
            slope *= g.unsqueeze(1)
            dh += slope @ part
            dweight[first:last] = slope.mT @ h
        dx = dh @ mix.mT
        for first, last in shards(V, ctx.R):
            t = torch.nonzero((ids >= first) & (ids < last)).squeeze(1)
            dweight[first:last].index_add_(0, ids[t] - first, dx[t])
        return dweight, x.mT @ dh, None, None, None


def kernel(weight, mix, ids, target, R):
    return VocabParallel.apply(weight, mix, ids, target, R)


def target():
    return assay.Target(kernel, golden, cases=[tokens, few], name="vocab_parallel", outputs=("loss",))
