"""out[n] = sum over the entries e of segment n of p[e] v[e],  p = softmax(x / heat) within each segment and head.

Attentive pooling of ragged sets: `offsets` has the segments' borders, and an empty segment's result is 0. Triton,
float32: a program has a segment and a head and reads its entries in blocks with a running maximum. The backward has a
program for every segment too; heat is learned per head and its gradient comes from the segments' shares.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK = 8


@assay.case(N=[5], E=[29], H=[2], D=[6])
def ragged(make, N, E, H, D):
    return {
        "x": 2 * make.normal(E, H), "v": make.normal(E, H, D), "heat": 1 + make.uniform(H),
        "offsets": make.offsets(N, E),
    }  # fmt: skip


@assay.case(N=[3], E=[20], H=[1], D=[16])
def views(make, N, E, H, D):
    return {**ragged[0].draw(make, N, E, H, D), "v": make.normal(H, D, E).permute(2, 0, 1)}


def golden(x, v, heat, offsets):
    E, N = x.shape[0], offsets.shape[0] - 1
    entry = torch.arange(E, device=x.device)
    inside = (entry >= offsets[:-1, None]) & (entry < offsets[1:, None])
    logits = (x / heat).masked_fill(~inside.unsqueeze(-1), -torch.inf)
    filled = inside.any(1)
    lse = torch.logsumexp(logits[filled], 1)
    p = torch.exp(logits[filled] - lse.unsqueeze(1))
    out = v.new_zeros(N, *v.shape[1:])
    return out.index_copy(0, filled.nonzero().squeeze(1), torch.einsum("neh,ehd->nhd", p, v))


@triton.jit
def _fwd_kernel(x_ptr, v_ptr, heat_ptr, offsets_ptr, out_ptr, lse_ptr, H, D, BLOCK: tl.constexpr,
                BLOCK_D: tl.constexpr):  # fmt: skip
    n, h = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(offsets_ptr + n), tl.load(offsets_ptr + n + 1)
    d = tl.arange(0, BLOCK_D)
    heat = tl.load(heat_ptr + h)
    top, total = -float("inf"), 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in range(begin, end, BLOCK):
        e = first + tl.arange(0, BLOCK)
        logit = tl.load(x_ptr + e * H + h, mask=e < end, other=-float("inf")) / heat
        new = tl.maximum(top, tl.max(logit))
        fade = tl.exp(top - new)
        p = tl.exp(logit - new)
        v = tl.load(
            v_ptr + (e[:, None] * H + h) * D + d[None, :], mask=(e[:, None] < end) & (d[None, :] < D), other=0.0
        )
        acc = acc * fade + tl.sum(p[:, None] * v, 0)
        total = total * fade + tl.sum(p)
        top = new
    if end > begin:
        acc = acc / total
        tl.store(lse_ptr + n * H + h, top + tl.log(total))
    tl.store(out_ptr + (n * H + h) * D + d, acc, mask=d < D)


@triton.jit
def _bwd_kernel(x_ptr, v_ptr, heat_ptr, offsets_ptr, out_ptr, lse_ptr, g_ptr, dx_ptr, dv_ptr, part_ptr, H, D,
                BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    n, h = tl.program_id(0), tl.program_id(1)
    begin, end = tl.load(offsets_ptr + n), tl.load(offsets_ptr + n + 1)
    d = tl.arange(0, BLOCK_D)
    heat = tl.load(heat_ptr + h)
    g = tl.load(g_ptr + (n * H + h) * D + d, mask=d < D, other=0.0)
    out = tl.load(out_ptr + (n * H + h) * D + d, mask=d < D, other=0.0)
    mean = tl.sum(g * out)
    share = 0.0
    if end > begin:
        lse = tl.load(lse_ptr + n * H + h)
        for first in range(begin, end, BLOCK):
            e = first + tl.arange(0, BLOCK)
            inside = (e[:, None] < end) & (d[None, :] < D)
            x = tl.load(x_ptr + e * H + h, mask=e < end, other=0.0)
            v = tl.load(v_ptr + (e[:, None] * H + h) * D + d[None, :], mask=inside, other=0.0)
            p = tl.where(e < end, tl.exp(x / heat - lse), 0.0)
            dlogit = p * (tl.sum(v * g[None, :], 1) - mean)
            share -= tl.sum(dlogit * x) / (heat * heat)
            tl.store(dx_ptr + e * H + h, dlogit / heat, mask=e < end)
            tl.store(dv_ptr + (e[:, None] * H + h) * D + d[None, :], p[:, None] * g[None, :], mask=inside)
    tl.store(part_ptr + n * H + h, share)


class RaggedPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, v, heat, offsets):
        x, v, heat, offsets = x.contiguous(), v.contiguous(), heat.contiguous(), offsets.contiguous()
        N, (H, D) = offsets.shape[0] - 1, v.shape[1:]
        out, lse = v.new_empty(N, H, D), v.new_empty(N, H)
        _fwd_kernel[(N, H)](x, v, heat, offsets, out, lse, H, D, BLOCK, triton.next_power_of_2(D))
        ctx.save_for_backward(x, v, heat, offsets, out, lse)
        return out

    @staticmethod
    def backward(ctx, g):
        x, v, heat, offsets, out, lse = ctx.saved_tensors
        N, H, D = out.shape
        dx, dv, part = torch.empty_like(x), torch.empty_like(v), torch.empty_like(lse)
        _bwd_kernel[(N, H)](
            x, v, heat, offsets, out, lse, g.contiguous(), dx, dv, part, H, D, BLOCK, triton.next_power_of_2(D)
        )  # fmt: skip
        return dx, dv, part.sum(0), None


def kernel(x, v, heat, offsets):
    return RaggedPool.apply(x, v, heat, offsets)


def target():
    return assay.Target(kernel, golden, cases=[ragged, views], name="ragged_pool", outputs=("out",))
