"""softmax((q k^T + rq rk^T) / sqrt(D + E)) v with k = c wk[h], v = c wv[h]: latent attention, projections absorbed.

Keys and values of all heads come from one latent c, and rk is a rotated key that heads share. Neither k nor v is ever
formed: queries are brought into the latent space, and what is attended to is brought out of it. Queries are the last of
the tokens; blocks of c go through a running maximum, and the backward goes by blocks again.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

BLOCK = 4


@assay.case(T=[5], S=[9], H=[2], D=[3], E=[2], R=[6], V=[4])
def tokens(make, T, S, H, D, E, R, V):
    return {
        "q": make.normal(T, H, D), "rq": make.normal(T, H, E), "c": make.normal(S, R), "rk": make.normal(S, E),
        "wk": make.normal(H, R, D, std=0.5), "wv": make.normal(H, R, V, std=0.5),
    }  # fmt: skip


@assay.case(T=[3], S=[7], H=[3], D=[4], E=[3], R=[5], V=[2])
def heads(make, T, S, H, D, E, R, V):
    return tokens[0].draw(make, T, S, H, D, E, R, V)


def golden(q, rq, c, rk, wk, wv):
    T, S = len(q), len(c)
    k, v = torch.einsum("sr,hrd->hsd", c, wk), torch.einsum("sr,hrv->hsv", c, wv)
    scores = torch.einsum("thd,hsd->hts", q, k) + torch.einsum("the,se->hts", rq, rk)
    later = torch.ones(T, S, dtype=torch.bool).triu(S - T + 1)
    p = torch.softmax((scores / math.sqrt(q.shape[2] + rq.shape[2])).masked_fill(later, -math.inf), -1)
    return torch.einsum("hts,hsv->thv", p, v)


def scored(inside, turned, c, rk, keys, ahead, scale):
    """The scores of one head's queries and these keys, and where they may look."""
    places = torch.arange(keys.start, keys.stop)
    seen = places <= torch.arange(len(inside)).unsqueeze(1) + ahead
    scores = (inside @ c[keys].mT + turned @ rk[keys].mT) * scale
    return scores.masked_fill(~seen, -math.inf)


def blocks(S):
    return [slice(at, min(at + BLOCK, S)) for at in range(0, S, BLOCK)]


class Latent(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, rq, c, rk, wk, wv):
        T, H, D = q.shape
        S, R = c.shape
        scale = (D + rq.shape[2]) ** -0.5
        y, latent, lse = torch.empty(T, H, wv.shape[2]), torch.empty(T, H, R), torch.empty(T, H)
        for h in range(H):
            inside = q[:, h] @ wk[h].mT
            top, total, acc = torch.full((T, 1), -math.inf), torch.zeros(T, 1), torch.zeros(T, R)
            for keys in blocks(S):
                scores = scored(inside, rq[:, h], c, rk, keys, S - T, scale)
                higher = torch.maximum(top, scores.amax(1, keepdim=True))
                shift = torch.where(higher == -math.inf, 0.0, higher)
                e, keep = torch.exp(scores - shift), torch.exp(top - shift)
                total = total * keep + e.sum(1, keepdim=True)
                acc = acc * keep + e @ c[keys]
                top = higher
            latent[:, h] = acc / total
            lse[:, h] = (top + torch.log(total)).squeeze(1)
            y[:, h] = latent[:, h] @ wv[h]
        ctx.save_for_backward(q, rq, c, rk, wk, wv, latent, lse)
        return y

    @staticmethod
    def backward(ctx, gy):
        q, rq, c, rk, wk, wv, latent, lse = ctx.saved_tensors
        T, H, D = q.shape
        S = len(c)
        scale = (D + rq.shape[2]) ** -0.5
        dq, drq, dwk, dwv = (torch.empty(t.shape) for t in (q, rq, wk, wv))
        dc, drk = torch.zeros(c.shape), torch.zeros(rk.shape)
        for h in range(H):
            dwv[h] = latent[:, h].mT @ gy[:, h]
            dlatent = gy[:, h] @ wv[h].mT
            delta = (dlatent * latent[:, h]).sum(1, keepdim=True)
            inside = q[:, h] @ wk[h].mT
            dinside, dturned = torch.zeros(inside.shape), torch.zeros(T, rq.shape[2])
            for keys in blocks(S):
                p = torch.exp(scored(inside, rq[:, h], c, rk, keys, S - T, scale) - lse[:, h].unsqueeze(1))
                ds = p * (dlatent @ c[keys].mT - delta) * scale
                dinside += ds @ c[keys]
                dturned += ds @ rk[keys]
                dc[keys] += ds.mT @ inside + p.mT @ dlatent
                drk[keys] += ds.mT @ rq[:, h]
            drq[:, h] = dturned
            dq[:, h] = dinside @ wk[h]
            dwk[h] = dinside.mT @ q[:, h]
        return dq, drq, dc, drk, dwk, dwv


def kernel(q, rq, c, rk, wk, wv):
    return Latent.apply(q, rq, c, rk, wk, wv)


def target():
    return assay.Target(kernel, golden, cases=[tokens, heads], name="latent_attention")
