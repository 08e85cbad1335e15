"""Causal attention of packed qkv [T, 3, H, D] over the key blocks that a layout [H, NB, NB] lets a query block see.

o = softmax(D^-1/2 q k^T + mask) v. Triton, float32: a program has a block of queries of one head and walks over its
list of key blocks; the backward has a kernel for delta = sum(g o), one for dq over the same lists, and one for dk and
dv over the transposed lists. T need not fill the last block.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK = 8


@assay.case(T=[29], H=[2], D=[12])
def tokens(make, T, H, D):
    blocks = -(-T // BLOCK)
    layout = (make.uniform(H, blocks, blocks) < 0.4).to(torch.int32)
    layout[:, range(blocks), range(blocks)] = 1
    layout[0, 2, 0], layout[1, blocks - 1, 1], layout[1, 2, 1] = 1, 1, 0
    return {"qkv": make.normal(T, 3, H, D), "layout": layout}


@assay.case(T=[21], H=[3], D=[5])
def narrow(make, T, H, D):
    drawn = tokens[0].draw(make, T, 2, D)
    layout = torch.cat([drawn["layout"], drawn["layout"][:1].roll(1, 1)])
    layout[2, range(layout.shape[1]), range(layout.shape[1])] = 1
    return {"qkv": make.normal(T, 3, H, D), "layout": layout}


def golden(qkv, layout):
    T, _, _, D = qkv.shape
    q, k, v = (qkv[:, part].transpose(0, 1) for part in range(3))
    seen = layout.repeat_interleave(BLOCK, 1).repeat_interleave(BLOCK, 2)[:, :T, :T].bool().tril()
    scores = (q @ k.mT * D**-0.5).masked_fill(~seen, -torch.inf)
    return (torch.softmax(scores, -1) @ v).transpose(0, 1)


@triton.jit
def _fwd_kernel(q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, count_ptr, list_ptr, st, sh, T, H, D, NB, scale,
                BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    t, d = row * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    at = t[:, None] * st + head * sh + d[None, :]
    inside = (t < T)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + at, mask=inside, other=0.0) * scale
    top = tl.full([BLOCK], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK], tl.float32)
    acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    count = tl.load(count_ptr + head * NB + row)
    for n in range(count):
        s = tl.load(list_ptr + (head * NB + row) * NB + n) * BLOCK + tl.arange(0, BLOCK)
        there = s[:, None] * st + head * sh + d[None, :]
        exists = (s < T)[:, None] & (d < D)[None, :]
        k = tl.load(k_ptr + there, mask=exists, other=0.0)
        v = tl.load(v_ptr + there, mask=exists, other=0.0)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee")
        scores = tl.where((s[None, :] <= t[:, None]) & (s < T)[None, :], scores, -float("inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        p = tl.exp(scores - higher[:, None])
        shrink = tl.exp(top - higher)
        total = total * shrink + tl.sum(p, 1)
        acc = acc * shrink[:, None] + tl.dot(p, v, input_precision="ieee")
        top = higher
    o = acc / total[:, None]
    tl.store(o_ptr + (t[:, None] * H + head) * D + d[None, :], o, mask=inside)
    tl.store(lse_ptr + head * T + t, top + tl.log(total), mask=t < T)


@triton.jit
def _delta_kernel(g_ptr, o_ptr, delta_ptr, T, H, D, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    row, head = tl.program_id(0), tl.program_id(1)
    t, d = row * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    at = (t[:, None] * H + head) * D + d[None, :]
    inside = (t < T)[:, None] & (d < D)[None, :]
    g = tl.load(g_ptr + at, mask=inside, other=0.0)
    o = tl.load(o_ptr + at, mask=inside, other=0.0)
    tl.store(delta_ptr + head * T + t, tl.sum(g * o, 1), mask=t < T)


@triton.jit
def _dq_kernel(q_ptr, k_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, dq_ptr, count_ptr, list_ptr, st, sh, dst, T, H, D, NB,
               scale, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    row, head = tl.program_id(0), tl.program_id(1)
    t, d = row * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    inside = (t < T)[:, None] & (d < D)[None, :]
    q = tl.load(q_ptr + t[:, None] * st + head * sh + d[None, :], mask=inside, other=0.0)
    g = tl.load(g_ptr + (t[:, None] * H + head) * D + d[None, :], mask=inside, other=0.0)
    lse = tl.load(lse_ptr + head * T + t, mask=t < T, other=0.0)
    delta = tl.load(delta_ptr + head * T + t, mask=t < T, other=0.0)
    dq = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    count = tl.load(count_ptr + head * NB + row)
    for n in range(count):
        s = tl.load(list_ptr + (head * NB + row) * NB + n) * BLOCK + tl.arange(0, BLOCK)
        there = s[:, None] * st + head * sh + d[None, :]
        exists = (s < T)[:, None] & (d < D)[None, :]
        k = tl.load(k_ptr + there, mask=exists, other=0.0)
        v = tl.load(v_ptr + there, mask=exists, other=0.0)
        p = tl.exp(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None])
        p = tl.where((s[None, :] <= t[:, None]) & (s < T)[None, :], p, 0.0)
        dp = tl.dot(g, tl.trans(v), input_precision="ieee")
        ds = p * (dp - delta[:, None]) * scale
        dq += tl.dot(ds, k, input_precision="ieee")
    tl.store(dq_ptr + t[:, None] * dst + head * D + d[None, :], dq, mask=inside)


@triton.jit
def _dkv_kernel(q_ptr, k_ptr, v_ptr, g_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, count_ptr, list_ptr, st, sh, dst, T, H,
                D, NB, scale, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    column, head = tl.program_id(0), tl.program_id(1)
    s, d = column * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
    exists = (s < T)[:, None] & (d < D)[None, :]
    k = tl.load(k_ptr + s[:, None] * st + head * sh + d[None, :], mask=exists, other=0.0)
    v = tl.load(v_ptr + s[:, None] * st + head * sh + d[None, :], mask=exists, other=0.0)
    dk = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK, BLOCK_D], tl.float32)
    count = tl.load(count_ptr + head * NB + column)
    for n in range(count):
        t = tl.load(list_ptr + (head * NB + column) * NB + n) * BLOCK + tl.arange(0, BLOCK)
        inside = (t < T)[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + t[:, None] * st + head * sh + d[None, :], mask=inside, other=0.0)
        g = tl.load(g_ptr + (t[:, None] * H + head) * D + d[None, :], mask=inside, other=0.0)
        lse = tl.load(lse_ptr + head * T + t, mask=t < T, other=0.0)
        delta = tl.load(delta_ptr + head * T + t, mask=t < T, other=0.0)
        p = tl.exp(tl.dot(q, tl.trans(k), input_precision="ieee") * scale - lse[:, None])
        p = tl.where((s[None, :] <= t[:, None]) & (t < T)[:, None], p, 0.0)
        dv += tl.dot(tl.trans(p), g, input_precision="ieee")
        ds = p * (tl.dot(g, tl.trans(v), input_precision="ieee") - delta[:, None]) * scale
        dk += tl.dot(tl.trans(ds), q, input_precision="ieee")
    tl.store(dk_ptr + s[:, None] * dst + head * D + d[None, :], dk, mask=exists)
    tl.store(dv_ptr + s[:, None] * dst + head * D + d[None, :], dv, mask=exists)


def lists(layout):
    """For each block row of a layout how many blocks it has, and which: [H, NB] and [H, NB, NB]."""
    layout = layout.contiguous()
    return layout.sum(-1, dtype=torch.int32), torch.argsort(layout, dim=-1, descending=True, stable=True).int()


class Attention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, layout):
        qkv = qkv if qkv.stride(3) == 1 else qkv.contiguous()
        T, _, H, D = qkv.shape
        layout = layout.tril()
        NB = layout.shape[1]
        q, k, v = qkv.unbind(1)
        o, lse = qkv.new_empty(T, H, D), qkv.new_empty(H, T)
        count, columns = lists(layout)
        width = triton.next_power_of_2(D)
        _fwd_kernel[(NB, H)](
            q, k, v, o, lse, count, columns, q.stride(0), q.stride(1), T, H, D, NB, D**-0.5, BLOCK, width
        )  # fmt: skip
        ctx.save_for_backward(qkv, layout, o, lse)
        return o

    @staticmethod
    def backward(ctx, g):
        qkv, layout, o, lse = ctx.saved_tensors
        T, _, H, D = qkv.shape
        NB, width, g = layout.shape[1], triton.next_power_of_2(D), g.contiguous()
        delta, dqkv = torch.empty_like(lse), qkv.new_empty(T, 3, H, D)
        q, k, v = qkv.unbind(1)
        dq, dk, dv = dqkv.unbind(1)
        _delta_kernel[(NB, H)](g, o, delta, T, H, D, BLOCK, width)
        sizes = (q.stride(0), q.stride(1), dq.stride(0), T, H, D, NB, D**-0.5, BLOCK, width)
        count, columns = lists(layout)
        _dq_kernel[(NB, H)](q, k, v, g, lse, delta, dq, count, columns, *sizes)
        count, rows = lists(layout.mT)
        _dkv_kernel[(NB, H)](q, k, v, g, lse, delta, dk, dv, count, rows, *sizes)
        return dqkv, None


def kernel(qkv, layout):
    return Attention.apply(qkv, layout)


def target():
    return assay.Target(kernel, golden, cases=[tokens, narrow], name="block_sparse_attention", outputs=("o",))
