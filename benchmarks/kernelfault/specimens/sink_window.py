"""o_i = sum_j p_ij v_j,  p_ij = exp(z_ij) / (exp(sink) + sum_j' exp(z_ij')),  z = scale q_i . k_j, i - window < j <= i.

Attention that sees the last `window` tokens, with grouped queries and a learned sink per head, which takes weight and
gives nothing. Triton, float32: blocks of queries with a running maximum over the blocks of keys within the window. The
backward forms the weights again from lse: by keys for k and v, all query heads of the group in turn, by queries for q.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK = 16


@assay.case(B=[1], HQ=[4], HK=[2], T=[37], D=[6])
def grouped(make, B, HQ, HK, T, D):
    return {
        "q": make.normal(B, HQ, T, D), "k": make.normal(B, HK, T, D), "v": make.normal(B, HK, T, D),
        "sink": make.normal(HQ), "window": 19, "scale": 0.4,
    }  # fmt: skip


@assay.case(B=[2], HQ=[2], HK=[1], T=[20], D=[8])
def narrow(make, B, HQ, HK, T, D):
    q = make.normal(B, T, HQ, D).transpose(1, 2)
    return {**grouped[0].draw(make, B, HQ, HK, T, D), "q": q, "window": 5, "scale": 0.25}


def golden(q, k, v, sink, window, scale):
    T, group = q.shape[2], q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    ago = torch.arange(T, device=q.device)[:, None] - torch.arange(T, device=q.device)
    z = (scale * (q @ k.mT)).masked_fill((ago < 0) | (ago >= window), -torch.inf)
    z = torch.cat((z, sink[:, None, None].expand(*z.shape[:3], 1)), -1)
    lse = assay.stage("lse", torch.logsumexp(z, -1))
    return torch.exp(z[..., :-1] - lse.unsqueeze(-1)) @ v


# b batch, h query head, r key head, i queries, j keys, d dim
@triton.jit
def _fwd_kernel(q_ptr, k_ptr, v_ptr, sink_ptr, o_ptr, lse_ptr, HQ, HK, T, D, window, scale, BLOCK: tl.constexpr,
                BLOCK_D: tl.constexpr):  # fmt: skip
    bh, block = tl.program_id(0), tl.program_id(1)
    b, h = bh // HQ, bh % HQ
    r = h // (HQ // HK)
    step, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    i = block * BLOCK + step
    at = (bh * T + i[:, None]) * D + d[None, :]
    m = (i[:, None] < T) & (d[None, :] < D)
    q = tl.load(q_ptr + at, mask=m, other=0.0)
    top = tl.zeros([BLOCK], tl.float32) + tl.load(sink_ptr + h)
    total = tl.zeros([BLOCK], tl.float32) + 1.0
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    first = tl.maximum(block * BLOCK - window + 1, 0) // BLOCK
    for n in range(first, block + 1):
        j = n * BLOCK + step
        key = ((b * HK + r) * T + j[:, None]) * D + d[None, :]
        mk = (j[:, None] < T) & (d[None, :] < D)
        k = tl.load(k_ptr + key, mask=mk, other=0.0)
        v = tl.load(v_ptr + key, mask=mk, other=0.0)
        z = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        ago = i[:, None] - j[None, :]
        z = tl.where((ago >= 0) & (ago < window) & (j[None, :] < T), z, -float("inf"))
        new = tl.maximum(top, tl.max(z, 1))
        fade = tl.exp(top - new)
        p = tl.exp(z - new[:, None])
        total = total * fade + tl.sum(p, 1)
        acc = acc * fade[:, None] + tl.dot(p, v, input_precision="ieee")
        top = new
    tl.store(o_ptr + at, acc / total[:, None], mask=m)
    tl.store(lse_ptr + bh * T + i, top + tl.log(total), mask=i < T)


@triton.jit
def _delta_kernel(o_ptr, g_ptr, sink_ptr, lse_ptr, delta_ptr, part_ptr, HQ, T, D, BLOCK: tl.constexpr,
                  BLOCK_D: tl.constexpr):  # fmt: skip
    bh, block = tl.program_id(0), tl.program_id(1)
    i, d = block * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    at = (bh * T + i[:, None]) * D + d[None, :]
    m = (i[:, None] < T) & (d[None, :] < D)
    delta = tl.sum(tl.load(o_ptr + at, mask=m, other=0.0) * tl.load(g_ptr + at, mask=m, other=0.0), 1)
    tl.store(delta_ptr + bh * T + i, delta, mask=i < T)
    lse = tl.load(lse_ptr + bh * T + i, mask=i < T, other=float("inf"))
    p_sink = tl.exp(tl.load(sink_ptr + bh % HQ) - lse)
    tl.store(part_ptr + bh * tl.num_programs(1) + block, -tl.sum(p_sink * delta))


@triton.jit
def _bwd_keys_kernel(q_ptr, k_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, HQ, HK, T, D, window, scale,
                     BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    br, n = tl.program_id(0), tl.program_id(1)
    b, r = br // HK, br % HK
    step, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    j = n * BLOCK + step
    key = (br * T + j[:, None]) * D + d[None, :]
    mk = (j[:, None] < T) & (d[None, :] < D)
    k = tl.load(k_ptr + key, mask=mk, other=0.0)
    v = tl.load(v_ptr + key, mask=mk, other=0.0)
    dk = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    end = tl.minimum((n + 1) * BLOCK + window - 1, T)
    for member in range(0, HQ // HK):
        bh = b * HQ + r * (HQ // HK) + member
        for first in range(n * BLOCK, end, BLOCK):
            i = first + step
            at = (bh * T + i[:, None]) * D + d[None, :]
            m = (i[:, None] < T) & (d[None, :] < D)
            q = tl.load(q_ptr + at, mask=m, other=0.0)
            g = tl.load(g_ptr + at, mask=m, other=0.0)
            lse = tl.load(lse_ptr + bh * T + i, mask=i < T, other=0.0)
            delta = tl.load(delta_ptr + bh * T + i, mask=i < T, other=0.0)
            z = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
            ago = i[:, None] - j[None, :]
            seen = (ago >= 0) & (ago < window) & (i[:, None] < T)
            p = tl.where(seen, tl.exp(z - lse[:, None]), 0.0)
            dv += tl.dot(tl.trans(p), g, input_precision="ieee")
            dz = p * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None])
            dk += tl.dot(tl.trans(dz), q, input_precision="ieee")
    tl.store(dk_ptr + key, dk * scale, mask=mk)
    tl.store(dv_ptr + key, dv, mask=mk)


@triton.jit
def _bwd_queries_kernel(q_ptr, k_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, dq_ptr, HQ, HK, T, D, window, scale,
                        BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    bh, block = tl.program_id(0), tl.program_id(1)
    b, h = bh // HQ, bh % HQ
    r = h // (HQ // HK)
    step, d = tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    i = block * BLOCK + step
    at = (bh * T + i[:, None]) * D + d[None, :]
    m = (i[:, None] < T) & (d[None, :] < D)
    q = tl.load(q_ptr + at, mask=m, other=0.0)
    g = tl.load(g_ptr + at, mask=m, other=0.0)
    lse = tl.load(lse_ptr + bh * T + i, mask=i < T, other=0.0)
    delta = tl.load(delta_ptr + bh * T + i, mask=i < T, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    first = tl.maximum(block * BLOCK - window + 1, 0) // BLOCK
    for n in range(first, block + 1):
        j = n * BLOCK + step
        key = ((b * HK + r) * T + j[:, None]) * D + d[None, :]
        mk = (j[:, None] < T) & (d[None, :] < D)
        k = tl.load(k_ptr + key, mask=mk, other=0.0)
        v = tl.load(v_ptr + key, mask=mk, other=0.0)
        z = tl.dot(q, tl.trans(k), input_precision="ieee") * scale
        ago = i[:, None] - j[None, :]
        p = tl.where((ago >= 0) & (ago < window) & (j[None, :] < T), tl.exp(z - lse[:, None]), 0.0)
        dz = p * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None])
        dq += tl.dot(dz, k, input_precision="ieee")
    tl.store(dq_ptr + at, dq * scale, mask=m)


class SinkWindow(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, sink, window, scale):
        q, k, v, sink = q.contiguous(), k.contiguous(), v.contiguous(), sink.contiguous()
        (B, HQ, T, D), HK = q.shape, k.shape[1]
        o, lse = torch.empty_like(q), q.new_empty(B, HQ, T)
        grid, block_d = (B * HQ, triton.cdiv(T, BLOCK)), max(16, triton.next_power_of_2(D))
        _fwd_kernel[grid](q, k, v, sink, o, lse, HQ, HK, T, D, window, scale, BLOCK, block_d)
        lse = assay.stage("lse", lse)
        ctx.save_for_backward(q, k, v, sink, o, lse)
        ctx.settings = window, scale
        return o

    @staticmethod
    def backward(ctx, g):
        q, k, v, sink, o, lse = ctx.saved_tensors
        (B, HQ, T, D), HK, g = q.shape, k.shape[1], g.contiguous()
        blocks, block_d = triton.cdiv(T, BLOCK), max(16, triton.next_power_of_2(D))
        dq, dk, dv, delta = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v), torch.empty_like(lse)
        part = lse.new_empty(B, HQ, blocks)
        _delta_kernel[(B * HQ, blocks)](o, g, sink, lse, delta, part, HQ, T, D, BLOCK, block_d)
        sizes = HQ, HK, T, D, *ctx.settings, BLOCK, block_d
        _bwd_keys_kernel[(B * HK, blocks)](q, k, v, g, lse, delta, dk, dv, *sizes)
        _bwd_queries_kernel[(B * HQ, blocks)](q, k, v, g, lse, delta, dq, *sizes)
        return dq, dk, dv, part.sum((0, 2)), None, None


def kernel(q, k, v, sink, window, scale):
    return SinkWindow.apply(q, k, v, sink, window, scale)


def target():
    return assay.Target(kernel, golden, cases=[grouped, narrow], name="sink_window", outputs=("o",))
