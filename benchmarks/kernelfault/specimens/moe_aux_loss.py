"""aux = E sum_e load[e] importance[e] + c mean lse^2 over valid tokens, with a backward.

The losses that keep a router in balance and its logits small: load[e] is the share of choices that expert e has,
importance[e] the mean of its probability. load has no gradient.
"""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(T=[17], E=[6], K=[2])
def tokens(make, T, E, K):
    valid = torch.ones(T, dtype=torch.int64)
    valid[T - 4 :] = 0
    return {"logits": make.normal(T, E), "expert": make.integers(0, E, T, K), "valid": valid, "c": 0.1}


@assay.case(T=[9], E=[11], K=[3])
def many(make, T, E, K):
    return tokens[0].draw(make, T, E, K)


def golden(logits, expert, valid, c):
    E, K = logits.shape[1], expert.shape[1]
    seen, n = valid.to(logits.dtype), valid.sum()
    hot = torch.nn.functional.one_hot(expert, E).to(logits.dtype).sum(1)
    load = assay.stage("load", (hot * seen.unsqueeze(1)).sum(0) / (n * K))
    lse = assay.stage("lse", torch.logsumexp(logits, 1))
    p = assay.stage("p", torch.exp(logits - lse.unsqueeze(1)))
    importance = assay.stage("importance", (p * seen.unsqueeze(1)).sum(0) / n)
    return E * (load * importance).sum() + c * (lse.square() * seen).sum() / n


class Loss(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, expert, valid, c):
        (_, E), K = logits.shape, expert.shape[1]
        seen, n = valid.float(), int(valid.sum())
        load = torch.zeros(E).index_add_(0, expert.flatten(), seen.repeat_interleave(K))
        load = assay.stage("load", load / (n * K))
        top = logits.amax(1, keepdim=True)
        total = torch.exp(logits - top).sum(1, keepdim=True)
        lse = assay.stage("lse", (top + torch.log(total)).squeeze(1))
        p = assay.stage("p", torch.exp(logits - lse.unsqueeze(1)))
        importance = assay.stage("importance", seen @ p / n)
        ctx.save_for_backward(p, lse, load, seen)
        ctx.n, ctx.c = n, c
        return (load * importance).sum() * E + c * (seen * lse * lse).sum() / n

    @staticmethod
    def backward(ctx, g):
        p, lse, load, seen = ctx.saved_tensors
        dp = assay.stage("p.grad", g * len(load) * load * seen.unsqueeze(1) / ctx.n)
        inner = (dp * p).sum(1, keepdim=True)
        z = 2 * ctx.c * g * lse * seen / ctx.n
        return p * (dp - inner) + z.unsqueeze(1) * p, None, None, None


def kernel(logits, expert, valid, c):
    return Loss.apply(logits, expert, valid, c)


def target():
    return assay.Target(kernel, golden, cases=[tokens, many], name="moe_aux_loss", outputs=("aux",))
