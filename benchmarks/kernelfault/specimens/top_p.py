"""y = p / sum p over the fewest tokens whose probabilities reach top_p, and 0 elsewhere: the nucleus of a distribution.

p = softmax(logits / temperature). Probabilities are sorted, summed by blocks of columns with a carry, cut where what
stands before a token reaches top_p, and put back into the vocabulary's order.
"""

from __future__ import annotations

import torch

from goldsmith import assay

ROWS, COLUMNS = 4, 4


@assay.case(T=[7], V=[13])
def tokens(make, T, V):
    return {"logits": make.normal(T, V), "temperature": 0.7, "top_p": 0.8, "width": V}


@assay.case(T=[5], V=[10])
def warm(make, T, V):
    return {**tokens[0].draw(make, T, V), "temperature": 1.5, "top_p": 0.6}


def golden(logits, temperature, top_p):
    p = assay.stage("p", torch.softmax(logits / temperature, -1))
    order = assay.stage("order", p.argsort(-1, descending=True))
    ordered = p.gather(-1, order)
    before = ordered.cumsum(-1) - ordered
    room = assay.stage("room", top_p - before)
    inside = assay.stage("inside", room > 0)
    kept = ordered * inside
    kept = assay.stage("kept", kept / kept.sum(-1, keepdim=True))
    return torch.zeros_like(p).scatter(-1, order, kept)


class TopP(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, temperature, top_p):
        T, V = logits.shape
        scaled = logits / temperature
        e = torch.exp(scaled - scaled.amax(-1, keepdim=True))
        p = assay.stage("p", e / e.sum(-1, keepdim=True))
        order = assay.stage("order", p.argsort(-1, descending=True))
        ordered = p.gather(-1, order)
        room = torch.empty(T, V)
        for at in range(0, T, ROWS):
            rows = slice(at, min(at + ROWS, T))
            carry = torch.zeros(rows.stop - at, 1)
            for first in range(0, V, COLUMNS):
                columns = slice(first, min(first + COLUMNS, V))
                block = ordered[rows, columns]
                sums = carry + block.cumsum(-1)
                room[rows, columns] = top_p - torch.cat([carry, sums[:, :-1]], 1)
                carry = sums[:, -1:]
        room = assay.stage("room", room)
        inside = assay.stage("inside", room > 0)
        kept = ordered * inside
        kept = assay.stage("kept", kept / kept.sum(-1, keepdim=True))
        y = torch.zeros(T, V)
        y.scatter_(1, order, kept)
        ctx.save_for_backward(p, y)
        ctx.temperature = temperature
        return y

    @staticmethod
    def backward(ctx, g):
        p, y = ctx.saved_tensors
        inner = (g * y).sum(-1, keepdim=True)
        return y * (g - inner) / ctx.temperature, None, None


def kernel(logits, temperature, top_p):
    return TopP.apply(logits, temperature, top_p)


def target():
    return assay.Target(
        kernel, golden, cases=[tokens, warm], name="top_p",
        decisions={"order": assay.topk(scores="p", k="width"), "inside": assay.sign(of="room")},
    )  # fmt: skip
