"""The verification of drafted tokens: how many are taken, and the distribution that the next token is drawn from.

Draft token t is taken when u < p[t] / q[t], up to the first that is not. The next token then has max(p - q, 0), summed
to one, at the first refused place, and p of the place behind the draft when all are taken. The vocabulary goes in
tiles: once for logsumexps, and once for the shares, whose sum is divided out at the end.
"""

from __future__ import annotations

import math

import torch

from goldsmith import assay

TILE = 4


@assay.case(B=[4], G=[3], V=[10])
def requests(make, B, G, V):
    target, noise = make.normal(B, G + 1, V, std=1.5), make.normal(B, G, V)
    u = 0.05 + 0.9 * make.uniform(B, G)
    u[0], u[1, 0], u[B - 1, 0] = 0.02, 0.97, 0.02
    tokens = (target[:, :G] + noise).argmax(2)
    tokens[1, 0] = target[1, 0].argmin()
    return {
        "target": target, "draft": target[:, :G] + noise, "tokens": tokens, "u": u, "temperature": 0.8,
    }  # fmt: skip


@assay.case(B=[3], G=[4], V=[7])
def long_draft(make, B, G, V):
    return {**requests[0].draw(make, B, G, V), "temperature": 1.3}


@assay.case(B=[5], G=[2], V=[13])
def wide(make, B, G, V):
    return {**requests[0].draw(make, B, G, V), "temperature": 0.6}


def golden(target, draft, tokens, u, temperature):
    p = assay.stage("logp", torch.log_softmax(target / temperature, 2))
    q = assay.stage("logq", torch.log_softmax(draft / temperature, 2))
    G, at = tokens.shape[1], tokens.unsqueeze(2)
    ratio = (p[:, :G].gather(2, at) - q.gather(2, at)).squeeze(2)
    margin = assay.stage("margin", ratio - torch.log(u))
    taken = assay.stage("taken", margin > 0)
    count = taken.long().cumprod(1).sum(1)
    rest = (torch.exp(p[:, :G]) - torch.exp(q)).clamp(min=0)
    rest = torch.cat([rest, torch.exp(p[:, G:])], 1)
    rest = assay.stage("rest", rest.gather(1, count[:, None, None].expand(-1, 1, p.shape[2])).squeeze(1))
    return rest / rest.sum(1, keepdim=True), count


def tiles(V):
    return [slice(v, min(v + TILE, V)) for v in range(0, V, TILE)]


def lse_of(logits, temperature):
    """The logsumexp over the vocabulary, tile by tile, [B, G]."""
    top, total = torch.full(logits.shape[:2], -math.inf), torch.zeros(logits.shape[:2])
    for v in tiles(logits.shape[2]):
        part = logits[:, :, v] / temperature
        higher = torch.maximum(top, part.amax(2))
        total = total * torch.exp(top - higher) + torch.exp(part - higher.unsqueeze(2)).sum(2)
        top = higher
    return top + torch.log(total)


def forward(target, draft, tokens, u, temperature):
    (B, G), V = tokens.shape, target.shape[2]
    p_lse, q_lse = lse_of(target, temperature), lse_of(draft, temperature)
    at = tokens.unsqueeze(2)
    p = target[:, :G].gather(2, at).squeeze(2) / temperature - p_lse[:, :G]
    q = draft.gather(2, at).squeeze(2) / temperature - q_lse
    margin = assay.stage("margin", p - q - torch.log(u))
    taken = assay.stage("taken", margin > 0)
    count = torch.empty(B, dtype=torch.int64)
    y, total = torch.empty(B, V), torch.zeros(B, 1)
    for b in range(B):
        n = 0
        while n < G and taken[b, n]:
            n += 1
        count[b] = n
        for v in tiles(V):
            share = torch.exp(target[b, n, v] / temperature - p_lse[b, n])
            if n < G:
                share = (share - torch.exp(draft[b, n, v] / temperature - q_lse[b, n])).clamp(min=0)
            y[b, v] = share
            total[b] += share.sum()
    return y / total, count


def target():
    return assay.Target(
        forward, golden, cases=[requests, long_draft, wide], name="spec_verify", outputs=("next", "count"),
        backward=None, decisions={"taken": assay.sign(of="margin")},
    )  # fmt: skip
