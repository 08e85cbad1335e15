"""The logarithm of a sentence's weight under a weighted grammar in Chomsky's normal form: the inside algorithm.

chart[i, j, a] joins all splits of words i to j and all rules a -> b c, a word alone has its own score, and a sentence
is what symbol 0 makes of all of its words. Sentences are padded to one length. Spans go by width; splits go in pairs
with a running maximum. The backward gives each span's share to its parts, from the widest span (outside).
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

SPLITS = 2


@assay.case(B=[3], T=[5], A=[3])
def sentences(make, B, T, A):
    lengths = make.integers(2, T + 1, B)
    lengths[0], lengths[B - 1] = T, 1
    return {"words": make.normal(B, T, A), "rules": make.normal(A, A, A), "lengths": lengths}


@assay.case(B=[2], T=[6], A=[2])
def long_ones(make, B, T, A):
    return sentences[0].draw(make, B, T, A)


@assay.case(B=[4], T=[3], A=[4])
def short(make, B, T, A):
    return sentences[0].draw(make, B, T, A)


def golden(words, rules, lengths):
    T = words.shape[1]
    chart = {(i, i): words[:, i] for i in range(T)}
    for width in range(1, T):
        spans = []
        for i in range(T - width):
            j = i + width
            ways = [
                rules + chart[i, m].unsqueeze(1).unsqueeze(3) + chart[m + 1, j].unsqueeze(1).unsqueeze(2)
                for m in range(i, j)
            ]  # each B, a, b, c
            spans.append(torch.logsumexp(torch.stack(ways, 2).flatten(2), 2))
        spans = assay.stage(f"width{width + 1}", torch.stack(spans, 1))
        chart |= {(i, i + width): spans[:, i] for i in range(T - width)}
    return torch.stack([chart[0, n - 1][b, 0] for b, n in enumerate(lengths.tolist())])


def joined(chart, rules, i, j, first):
    """Scores of the splits from `first` on, at most SPLITS of them: B, split, a, b, c."""
    last = min(first + SPLITS, j)
    left = chart[:, i, first:last]
    right = chart[:, first + 1 : last + 1, j]
    return rules + left[:, :, None, :, None] + right[:, :, None, None, :]


class Inside(torch.autograd.Function):
    @staticmethod
    def forward(ctx, words, rules, lengths):
        B, T, A = words.shape
        chart = torch.full((B, T, T, A), -math.inf)
        for i in range(T):
            chart[:, i, i] = words[:, i]
        for width in range(1, T):
            spans = torch.empty(B, T - width, A)
            for i in range(T - width):
                j = i + width
                top, total = torch.full((B, A), -math.inf), torch.zeros(B, A)
                for first in range(i, j, SPLITS):
                    ways = joined(chart, rules, i, j, first)
                    higher = torch.maximum(top, ways.amax((1, 3, 4)))
                    total = total * torch.exp(top - higher)
                    total = total + torch.exp(ways - higher[:, None, :, None, None]).sum((1, 3, 4))
                    top = higher
                spans[:, i] = top + torch.log(total)
            spans = assay.stage(f"width{width + 1}", spans)
            for i in range(T - width):
                chart[:, i, i + width] = spans[:, i]
        ctx.save_for_backward(chart, rules, lengths)
        return chart[torch.arange(B), 0, lengths - 1, 0]

    @staticmethod
    def backward(ctx, g):
        chart, rules, lengths = ctx.saved_tensors
        B, T = chart.shape[:2]
        share, d_rules = torch.zeros(chart.shape), torch.zeros(rules.shape)
        share[torch.arange(B), 0, lengths - 1, 0] = g
        for width in range(T - 1, 0, -1):
            for i in range(T - width):
                j = i + width
                for first in range(i, j, SPLITS):
                    ways = joined(chart, rules, i, j, first)
                    part = torch.exp(ways - chart[:, i, j, None, :, None, None]) * share[:, i, j, None, :, None, None]
                    last = first + part.shape[1]
                    share[:, i, first:last] += part.sum((2, 4))
                    share[:, first + 1 : last + 1, j] += part.sum((2, 3))
                    d_rules += part.sum((0, 1))
        return share.diagonal(dim1=1, dim2=2).mT.contiguous(), d_rules, None


def kernel(words, rules, lengths):
    return Inside.apply(words, rules, lengths)


def target():
    return assay.Target(kernel, golden, cases=[sentences, long_ones, short], name="cky_inside", outputs=("score",))
