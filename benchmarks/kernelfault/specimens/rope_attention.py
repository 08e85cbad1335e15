"""Attention with rotary positions: q and k are rotated in pairs (d, d + D/2), then softmax(q k^T / sqrt(D)) v."""

from __future__ import annotations

import math

import torch

from goldsmith import assay


@assay.case(S=[12], D=[8])
def tokens(make, S, D):
    return {"q": make.normal(S, D), "k": make.normal(S, D), "v": make.normal(S, D), "theta": 100.0}


@assay.case(S=[17], D=[12])
def odd(make, S, D):
    return tokens[0].draw(make, S, D)


@assay.case(S=[24], D=[6])
def long(make, S, D):
    return tokens[0].draw(make, S, D)


def angles(S, D, theta, dtype):
    return torch.arange(S, dtype=dtype).unsqueeze(1) * theta ** (-torch.arange(D // 2, dtype=dtype) * 2 / D)


def golden(q, k, v, theta):
    S, D = q.shape
    at = angles(S, D, theta, q.dtype)
    sin, cos = at.sin(), at.cos()

    def rotated(t):
        left, right = t[:, : D // 2], t[:, D // 2 :]
        return torch.cat([left * cos - right * sin, right * cos + left * sin], 1)

    q_rot = assay.stage("q_rot", rotated(q))
    k_rot = assay.stage("k_rot", rotated(k))
    scores = assay.stage("scores", q_rot @ k_rot.mT / math.sqrt(D))
    hidden = ~torch.ones(S, S, dtype=torch.bool).tril()
    weights = assay.stage("weights", torch.softmax(scores.masked_fill(hidden, -math.inf), -1))
    return weights @ v


def turn(t, at):
    """Rotate pairs in float64 angles, as a kernel that reads a table would have them."""
    half = t.shape[1] // 2
    sin, cos = at.sin().to(t.dtype), at.cos().to(t.dtype)
    return torch.cat([t[:, :half] * cos - t[:, half:] * sin, t[:, half:] * cos + t[:, :half] * sin], 1)


def kernel(q, k, v, theta):
    S, D = q.shape
    at = angles(S, D, theta, torch.float64)
    q_rot = assay.stage("q_rot", turn(q, at))
    k_rot = assay.stage("k_rot", turn(k, at))
    scores = assay.stage("scores", (q_rot @ k_rot.mT) * D**-0.5)
    column, row = torch.arange(S), torch.arange(S).unsqueeze(1)
    seen = scores.masked_fill(column > row, -math.inf)
    e = torch.exp(seen - seen.amax(-1, keepdim=True))
    weights = assay.stage("weights", e / e.sum(-1, keepdim=True))
    return weights @ v


def target():
    return assay.Target(kernel, golden, cases=[tokens, odd, long], name="rope_attention")
