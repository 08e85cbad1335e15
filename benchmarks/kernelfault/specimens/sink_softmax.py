"""p[h, t, s] = exp(z - lse), z = scale scores over the keys s that t sees, lse over them and over sink[h].

The softmax of attention with a learnt sink, which takes its share and is not returned. Query t of T stands at place
t + S - T and sees the last `window` places up to its own. Triton, float32: a program has one row and walks over blocks
of keys; the sinks' gradient comes from rows' shares in a workspace, which a second kernel adds up.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK, ROWS = 8, 4


@assay.case(H=[3], T=[11], S=[27], window=[14])
def decode(make, H, T, S, window):
    return {"scores": make.normal(H, T, S, std=2.0), "sink": 2 + make.normal(H), "scale": 0.6, "window": window}


@assay.case(H=[2], T=[19], S=[19], window=[19])
def full(make, H, T, S, window):
    scores = make.normal(T, S, H, std=2.0).permute(2, 0, 1)
    return {"scores": scores, "sink": make.normal(H), "scale": 1.3, "window": window}


def golden(scores, sink, scale, window):
    H, T, S = scores.shape
    place, key = torch.arange(S - T, S, device=scores.device).unsqueeze(1), torch.arange(S, device=scores.device)
    sees = (key <= place) & (key > place - window)
    z = (scale * scores).masked_fill(~sees, -torch.inf)
    return torch.softmax(torch.cat([z, sink.view(H, 1, 1).expand(H, T, 1)], -1), -1)[..., :-1]


@triton.jit
def _fwd_kernel(x_ptr, sink_ptr, p_ptr, share_ptr, sxh, sxt, sxs, T, S, scale, window, BLOCK: tl.constexpr):
    h, t = tl.program_id(0), tl.program_id(1)
    place = t + S - T
    sink = tl.load(sink_ptr + h)
    top, total = sink, 1.0
    x_ptr += h * sxh + t * sxt
    p_ptr += (h * T + t) * S
    for start in range(0, place + 1, BLOCK):
        s = start + tl.arange(0, BLOCK)
        sees = (s <= place) & (s > place - window)
        z = tl.load(x_ptr + s * sxs, mask=sees, other=0.0) * scale
        z = tl.where(sees, z, -float("inf"))
        higher = tl.maximum(top, tl.max(z, 0))
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), 0)
        top = higher
    tl.store(share_ptr + h * T + t, tl.exp(sink - top) / total)
    for start in range(0, S, BLOCK):
        s = start + tl.arange(0, BLOCK)
        sees = (s <= place) & (s > place - window)
        z = tl.load(x_ptr + s * sxs, mask=sees, other=0.0) * scale
        p = tl.where(sees, tl.exp(z - top) / total, 0.0)
        tl.store(p_ptr + s, p, mask=s < S)


@triton.jit
def _bwd_kernel(g_ptr, p_ptr, share_ptr, dx_ptr, part_ptr, sgh, sgt, sgs, T, S, scale, BLOCK: tl.constexpr):
    h, t = tl.program_id(0), tl.program_id(1)
    row = h * T + t
    g_ptr += h * sgh + t * sgt
    inner = 0.0
    for start in range(0, S, BLOCK):
        s = start + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + s * sgs, mask=s < S, other=0.0)
        p = tl.load(p_ptr + row * S + s, mask=s < S, other=0.0)
        inner += tl.sum(g * p, 0)
    for start in range(0, S, BLOCK):
        s = start + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + s * sgs, mask=s < S, other=0.0)
        p = tl.load(p_ptr + row * S + s, mask=s < S, other=0.0)
        tl.store(dx_ptr + row * S + s, p * (g - inner) * scale, mask=s < S)
    tl.store(part_ptr + row, -tl.load(share_ptr + row) * inner)


@triton.jit
def _rows_kernel(part_ptr, dsink_ptr, T, ROWS: tl.constexpr):
    h = tl.program_id(0)
    acc = tl.zeros([ROWS], tl.float32)
    for start in range(0, T, ROWS):
        t = start + tl.arange(0, ROWS)
        acc += tl.load(part_ptr + h * T + t, mask=t < T, other=0.0)
    tl.store(dsink_ptr + h, tl.sum(acc, 0))


class SinkSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, scores, sink, scale, window):
        H, T, S = scores.shape
        p, share = scores.new_empty(H, T, S), scores.new_empty(H, T)
        _fwd_kernel[(H, T)](scores, sink.contiguous(), p, share, *scores.stride(), T, S, scale, window, BLOCK)
        ctx.save_for_backward(p, share)
        ctx.scale = scale
        return p

    @staticmethod
    def backward(ctx, g):
        p, share = ctx.saved_tensors
        H, T, S = p.shape
        dscores, part, dsink = torch.empty_like(p), torch.empty_like(share), p.new_empty(H)
        _bwd_kernel[(H, T)](g, p, share, dscores, part, *g.stride(), T, S, ctx.scale, BLOCK)
        _rows_kernel[(H,)](part, dsink, T, ROWS)
        return dscores, dsink, None, None


def kernel(scores, sink, scale, window):
    return SinkSoftmax.apply(scores, sink, scale, window)


def target():
    return assay.Target(kernel, golden, cases=[decode, full], name="sink_softmax", outputs=("p",))
