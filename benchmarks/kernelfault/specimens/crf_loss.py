"""loss[b] = log sum over paths of exp(score(path)) - score(tags[b]): the loss of a linear chain CRF.

A path scores start, each step's emission, each step's transition and end, over as many steps as its sequence has.
Running logsumexps (alphas) are kept, the backward comes from the end with betas and adds marginals.
"""

from __future__ import annotations

import torch

from goldsmith import assay


@assay.case(B=[4], T=[6], K=[3])
def sentences(make, B, T, K):
    length = make.integers(2, T, B)
    length[0], length[1] = T, T - 2
    return {
        "emit": make.normal(B, T, K), "tags": make.integers(0, K, B, T), "length": length,
        "trans": make.normal(K, K), "start": make.normal(K), "end": make.normal(K),
    }  # fmt: skip


@assay.case(B=[3], T=[4], K=[5])
def labels(make, B, T, K):
    return sentences[0].draw(make, B, T, K)


@assay.case(B=[5], T=[3], K=[2])
def short(make, B, T, K):
    return sentences[0].draw(make, B, T, K)


def golden(emit, tags, length, trans, start, end):
    loss = []
    for e, path, n in zip(emit, tags, length.tolist(), strict=True):
        alpha = start + e[0]
        for t in range(1, n):
            alpha = torch.logsumexp(alpha.unsqueeze(1) + trans, 0) + e[t]
        path = path[:n]
        score = start[path[0]] + e[:n].gather(1, path.unsqueeze(1)).sum() + trans[path[:-1], path[1:]].sum()
        loss.append(torch.logsumexp(alpha + end, 0) - (score + end[path[n - 1]]))
    return torch.stack(loss)


def lse(scores, dim):
    top = scores.amax(dim, keepdim=True)
    return (top + torch.log(torch.exp(scores - top).sum(dim, keepdim=True))).squeeze(dim)


class CRF(torch.autograd.Function):
    @staticmethod
    def forward(ctx, emit, tags, length, trans, start, end):
        B, T, K = emit.shape
        alphas, b = torch.empty(B, T, K), torch.arange(B)
        alpha = start + emit[:, 0]
        score = start[tags[:, 0]] + emit[b, 0, tags[:, 0]]
        alphas[:, 0] = alpha
        for t in range(1, T):
            inside = t < length
            step = lse(alpha.unsqueeze(2) + trans, 1) + emit[:, t]
            alpha = torch.where(inside.unsqueeze(1), step, alpha)
            alphas[:, t] = alpha
            added = trans[tags[:, t - 1], tags[:, t]] + emit[b, t, tags[:, t]]
            score = score + torch.where(inside, added, 0.0)
        last = length - 1
        total = lse(alpha + end, 1)
        score = score + end[tags[b, last]]
        ctx.save_for_backward(emit, tags, length, trans, end, alphas, total)
        return total - score

    @staticmethod
    def backward(ctx, g):
        emit, tags, length, trans, end, alphas, total = ctx.saved_tensors
        (B, T, K), b = emit.shape, torch.arange(len(emit))
        demit, dtrans = torch.zeros(emit.shape), torch.zeros(trans.shape)
        weight = g.unsqueeze(1)
        last = length - 1
        beta = end.expand(B, K)
        ends = torch.exp(alphas[:, T - 1] + end - total.unsqueeze(1)) * weight
        dend = ends.sum(0).index_add(0, tags[b, last], -g)
        for t in range(T - 1, 0, -1):
            inside = (t < length).unsqueeze(1)
            onward = emit[:, t] + beta
            marginal = torch.exp(alphas[:, t] + beta - total.unsqueeze(1)) * weight
            marginal[b, tags[:, t]] -= g
            demit[:, t] = torch.where(inside, marginal, 0.0)
            pairs = alphas[:, t - 1].unsqueeze(2) + trans + onward.unsqueeze(1) - total.view(B, 1, 1)
            pairs = torch.exp(pairs) * weight.unsqueeze(2)
            pairs[b, tags[:, t - 1], tags[:, t]] -= g
            dtrans += torch.where(inside.unsqueeze(2), pairs, 0.0).sum(0)
            beta = torch.where(inside, lse(trans + onward.unsqueeze(1), 2), beta)
        first = torch.exp(alphas[:, 0] + beta - total.unsqueeze(1)) * weight
        first[b, tags[:, 0]] -= g
        demit[:, 0] = first
        return demit, None, None, dtrans, first.sum(0), dend


def kernel(emit, tags, length, trans, start, end):
    return CRF.apply(emit, tags, length, trans, start, end)


def target():
    return assay.Target(kernel, golden, cases=[sentences, labels, short], name="crf_loss", outputs=("loss",))
