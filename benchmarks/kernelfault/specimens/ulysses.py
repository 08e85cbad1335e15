"""Causal attention whose tokens are shared by R ranks: each rank gets all tokens of some heads, and gives them back.

An exchange before (tokens for heads) and one after (heads for tokens), DeepSpeed's Ulysses. Exchanges run on a thread
(a stand-in for a collective under way) and are waited for. A rank's attention goes over blocks of keys with a running
maximum and saves its logsumexp. Tensors may be bfloat16; sums, and the results that are saved, are float32.
"""

from __future__ import annotations

import math
import threading
import time

import torch

from goldsmith import assay

BLOCK = 3
DELAY = 0.0005  # seconds that an exchange takes at least


@assay.case(T=[7], H=[4], D=[5], R=[2])
def tokens(make, T, H, D, R):
    return {"q": make.normal(T, H, D, std=1.5), "k": make.normal(T, H, D), "v": make.normal(T, H, D), "R": R}


@assay.case(T=[5], H=[3], D=[4], R=[3])
def ranks(make, T, H, D, R):
    return tokens[0].draw(make, T, H, D, R)


@assay.case(T=[8], H=[6], D=[3], R=[2])
def many(make, T, H, D, R):
    return tokens[0].draw(make, T, H, D, R)


def golden(q, k, v):
    T, _, D = q.shape
    scores = assay.stage("scores", torch.einsum("thd,shd->hts", q, k) * D**-0.5)
    p = torch.softmax(scores.masked_fill(torch.ones(T, T).triu(1).bool(), -math.inf), 2)
    return torch.einsum("hts,shd->thd", p, v)


class Exchange:
    """Copies (into, from) under way."""

    def __init__(self, copies):
        def work():
            time.sleep(DELAY)
            with torch.no_grad():
                for into, source in copies:
                    into.copy_(source)

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def wait(self):
        self.thread.join()


def shares(size, R):
    each = -(-size // R)
    return [slice(min(r * each, size), min((r + 1) * each, size)) for r in range(R)]


def to_heads(x, R):
    """All tokens of each rank's heads as [R, T, H / R, D], and the exchange that brings them."""
    T, H, D = x.shape
    out = torch.empty(R, T, H // R, D, dtype=x.dtype)
    sent = [
        (out[r, rows], x[rows, r * (H // R) : (r + 1) * (H // R)]) for rows in shares(T, R) for r in range(R)
    ]  # fmt: skip
    return out, Exchange(sent)


def to_tokens(parts):
    """All heads of each rank's tokens, as [T, H, D], and the exchange that brings them."""
    R, T, each, D = parts.shape
    out = torch.empty(T, R * each, D, dtype=parts.dtype)
    sent = [(out[rows, r * each : (r + 1) * each], parts[r, rows]) for rows in shares(T, R) for r in range(R)]
    return out, Exchange(sent)


def attend(q, k, v):
    """Of one rank's heads: y in float32, logsumexps [T, H / R]."""
    T, H, D = q.shape
    scale, t = D**-0.5, torch.arange(T)
    top, total = torch.full((T, H), -math.inf), torch.zeros(T, H)
    acc = torch.zeros(T, H, D)
    for s in range(0, T, BLOCK):
        keys, values = k[s : s + BLOCK].float(), v[s : s + BLOCK].float()
        scores = torch.einsum("thd,shd->ths", q.float(), keys) * scale
        later = s + torch.arange(len(keys)) > t.unsqueeze(1)
        scores = scores.masked_fill(later.unsqueeze(1), -math.inf)
        higher = torch.maximum(top, scores.amax(2))
        p, shrink = torch.exp(scores - higher.unsqueeze(2)), torch.exp(top - higher)
        total = total * shrink + p.sum(2)
        acc = acc * shrink.unsqueeze(2) + torch.einsum("ths,shd->thd", p, values)
        top = higher
    return acc / total.unsqueeze(2), top + torch.log(total)


def attend_backward(q, k, v, y, lse, g):
    """Of one rank's heads: gradients of q, k and v."""
    (T, H, D), dtype = q.shape, q.dtype
    q, k, v, g = q.float(), k.float(), v.float(), g.float()
    scale, t = D**-0.5, torch.arange(T)
    dq, dk, dv = torch.zeros(T, H, D), torch.empty(T, H, D), torch.empty(T, H, D)
    delta = (g * y).sum(2)
    for s in range(0, T, BLOCK):
        part = slice(s, min(s + BLOCK, T))
        scores = torch.einsum("thd,shd->ths", q, k[part]) * scale
        later = torch.arange(T)[part] > t.unsqueeze(1)
        p = torch.exp(scores - lse.unsqueeze(2)).masked_fill(later.unsqueeze(1), 0.0)
        dv[part] = torch.einsum("ths,thd->shd", p, g)
        ds = p * (torch.einsum("thd,shd->ths", g, v[part]) - delta.unsqueeze(2)) * scale
        dq += torch.einsum("ths,shd->thd", ds, k[part])
        dk[part] = torch.einsum("ths,thd->shd", ds, q)
    return dq.to(dtype), dk.to(dtype), dv.to(dtype)


class Ulysses(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, R):
        (qs, first), (ks, second), (vs, third) = to_heads(q, R), to_heads(k, R), to_heads(v, R)
        first.wait()
        second.wait()
        third.wait()
        ys, lses = torch.empty(qs.shape), torch.empty(qs.shape[:3])
        for r in range(R):
            ys[r], lses[r] = attend(qs[r], ks[r], vs[r])
        y, last = to_tokens(ys.to(q.dtype))
        last.wait()
        ctx.save_for_backward(qs, ks, vs, ys, lses)
        return y

    @staticmethod
    def backward(ctx, g):
        qs, ks, vs, ys, lses = ctx.saved_tensors
        R = len(qs)
        gs, asked = to_heads(g, R)
        grads = torch.empty(3, *qs.shape, dtype=qs.dtype)
        asked.wait()
        for r in range(R):
            grads[0, r], grads[1, r], grads[2, r] = attend_backward(qs[r], ks[r], vs[r], ys[r], lses[r], gs[r])
        back = [to_tokens(grad) for grad in grads]
        for _, exchange in back:
            exchange.wait()
        return back[0][0], back[1][0], back[2][0], None


def kernel(q, k, v, R):
    return Ulysses.apply(q, k, v, R)


def target():
    return assay.Target(
        kernel, golden, cases=[tokens, ranks, many], name="ulysses", outputs=("y",), dtypes=(torch.bfloat16,)
    )  # fmt: skip
