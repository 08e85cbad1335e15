"""o[i] = sum_{j <= i} silu(alpha q_i . k_j + table[h, min(i - j, R - 1)]) v_j / N within a sequence, no softmax.

Attention of sequential recommenders over ragged rows [T, H, D], with a learnt bias for each distance. Triton, float32:
the forward and dq have a program for a block of queries, dk and dv one for a block of keys, and the table's gradient
is summed for each sequence and head in a workspace, then over sequences.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

BLOCK = 8


@assay.case(B=[4], T=[31], H=[2], D=[6], R=[5])
def users(make, B, T, H, D, R):
    offsets = make.offsets(B, T, empty=1)
    lengths = offsets.diff().sort(descending=True).values.roll(1)
    return {
        "q": make.normal(T, H, D), "k": make.normal(T, H, D), "v": make.normal(T, H, D),
        "table": make.normal(H, R), "offsets": torch.cat([offsets[:1], lengths.cumsum(0)]), "alpha": 0.5, "N": 8,
    }  # fmt: skip


@assay.case(B=[2], T=[19], H=[3], D=[4], R=[9])
def long(make, B, T, H, D, R):
    return {**users[0].draw(make, B, T, H, D, R), "offsets": torch.tensor([0, 2, T]), "N": 3}


def golden(q, k, v, table, offsets, alpha, N):
    out = []
    for first, last in zip(offsets[:-1].tolist(), offsets[1:].tolist(), strict=True):
        a, b, c = (x[first:last].transpose(0, 1) for x in (q, k, v))
        place = torch.arange(last - first, device=q.device)
        distance = place.unsqueeze(1) - place
        bias = table[:, distance.clamp(0, table.shape[1] - 1)]
        weights = torch.nn.functional.silu(alpha * (a @ b.mT) + bias) / N
        out.append((weights.masked_fill(distance < 0, 0.0) @ c).transpose(0, 1))
    return torch.cat(out)


@triton.jit
def _fwd_kernel(q_ptr, k_ptr, v_ptr, table_ptr, at_ptr, o_ptr, sqt, sqh, skt, skh, svt, svh, H, D, R, alpha, N,
                BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    first, last = tl.load(at_ptr + b), tl.load(at_ptr + b + 1)
    length = (last - first).to(tl.int32)
    low = tl.program_id(0) * BLOCK
    if low < length:
        i, d = low + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
        inside = (i < length)[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + (first + i)[:, None] * sqt + h * sqh + d[None, :], mask=inside, other=0.0)
        acc = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        for start in range(0, low + BLOCK, BLOCK):
            j = start + tl.arange(0, BLOCK)
            exists = (j < length)[:, None] & (d < D)[None, :]
            k = tl.load(k_ptr + (first + j)[:, None] * skt + h * skh + d[None, :], mask=exists, other=0.0)
            v = tl.load(v_ptr + (first + j)[:, None] * svt + h * svh + d[None, :], mask=exists, other=0.0)
            distance = i[:, None] - j[None, :]
            sees = (distance >= 0) & (i < length)[:, None] & (j < length)[None, :]
            bias = tl.load(table_ptr + h * R + tl.minimum(distance, R - 1), mask=sees, other=0.0)
            s = alpha * tl.dot(q, tl.trans(k), input_precision="ieee") + bias
            p = tl.where(sees, s * tl.sigmoid(s), 0.0) / N
            acc += tl.dot(p, v, input_precision="ieee")
        tl.store(o_ptr + ((first + i)[:, None] * H + h) * D + d[None, :], acc, mask=inside)


@triton.jit
def _dq_kernel(q_ptr, k_ptr, v_ptr, table_ptr, at_ptr, g_ptr, dq_ptr, part_ptr, sqt, sqh, skt, skh, svt, svh, H, D, R,
               alpha, N, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr):  # fmt: skip
    b, h = tl.program_id(0) // H, tl.program_id(0) % H
    first, last = tl.load(at_ptr + b), tl.load(at_ptr + b + 1)
    length = (last - first).to(tl.int32)
    d, r = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_R)
    dtable = tl.zeros([BLOCK_R], tl.float32)
    for low in range(0, length, BLOCK):
        i = low + tl.arange(0, BLOCK)
        inside = (i < length)[:, None] & (d < D)[None, :]
        q = tl.load(q_ptr + (first + i)[:, None] * sqt + h * sqh + d[None, :], mask=inside, other=0.0)
        g = tl.load(g_ptr + ((first + i)[:, None] * H + h) * D + d[None, :], mask=inside, other=0.0)
        dq = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        for start in range(0, low + BLOCK, BLOCK):
            j = start + tl.arange(0, BLOCK)
            exists = (j < length)[:, None] & (d < D)[None, :]
            k = tl.load(k_ptr + (first + j)[:, None] * skt + h * skh + d[None, :], mask=exists, other=0.0)
            v = tl.load(v_ptr + (first + j)[:, None] * svt + h * svh + d[None, :], mask=exists, other=0.0)
            distance = i[:, None] - j[None, :]
            sees = (distance >= 0) & (i < length)[:, None] & (j < length)[None, :]
            bucket = tl.minimum(distance, R - 1)
            bias = tl.load(table_ptr + h * R + bucket, mask=sees, other=0.0)
            s = alpha * tl.dot(q, tl.trans(k), input_precision="ieee") + bias
            sig = tl.sigmoid(s)
            dp = tl.dot(g, tl.trans(v), input_precision="ieee") / N
            ds = tl.where(sees, dp * sig * (1 + s * (1 - sig)), 0.0)
            dq += tl.dot(ds, k, input_precision="ieee") * alpha
            hits = bucket[:, :, None] == r[None, None, :]
            dtable += tl.sum(tl.sum(tl.where(hits, ds[:, :, None], 0.0), 0), 0)
        tl.store(dq_ptr + ((first + i)[:, None] * H + h) * D + d[None, :], dq, mask=inside)
    tl.store(part_ptr + (b * H + h) * R + r, dtable, mask=r < R)


@triton.jit
def _dkv_kernel(q_ptr, k_ptr, v_ptr, table_ptr, at_ptr, g_ptr, dk_ptr, dv_ptr, sqt, sqh, skt, skh, svt, svh, H, D, R,
                alpha, N, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):  # fmt: skip
    b, h = tl.program_id(1) // H, tl.program_id(1) % H
    first, last = tl.load(at_ptr + b), tl.load(at_ptr + b + 1)
    length = (last - first).to(tl.int32)
    low = tl.program_id(0) * BLOCK
    if low < length:
        j, d = low + tl.arange(0, BLOCK), tl.arange(0, BLOCK_D)
        exists = (j < length)[:, None] & (d < D)[None, :]
        k = tl.load(k_ptr + (first + j)[:, None] * skt + h * skh + d[None, :], mask=exists, other=0.0)
        v = tl.load(v_ptr + (first + j)[:, None] * svt + h * svh + d[None, :], mask=exists, other=0.0)
        dk = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK, BLOCK_D], tl.float32)
        for start in range(low, length, BLOCK):
            i = start + tl.arange(0, BLOCK)
            inside = (i < length)[:, None] & (d < D)[None, :]
            q = tl.load(q_ptr + (first + i)[:, None] * sqt + h * sqh + d[None, :], mask=inside, other=0.0)
            g = tl.load(g_ptr + ((first + i)[:, None] * H + h) * D + d[None, :], mask=inside, other=0.0)
            distance = i[:, None] - j[None, :]
            sees = (distance >= 0) & (i < length)[:, None] & (j < length)[None, :]
            bias = tl.load(table_ptr + h * R + tl.minimum(distance, R - 1), mask=sees, other=0.0)
            s = alpha * tl.dot(q, tl.trans(k), input_precision="ieee") + bias
            sig = tl.sigmoid(s)
            p = tl.where(sees, s * sig, 0.0) / N
            dv += tl.dot(tl.trans(p), g, input_precision="ieee")
            dp = tl.dot(g, tl.trans(v), input_precision="ieee") / N
            ds = tl.where(sees, dp * sig * (1 + s * (1 - sig)), 0.0)
            dk += tl.dot(tl.trans(ds), q, input_precision="ieee") * alpha
        at = ((first + j)[:, None] * H + h) * D + d[None, :]
        tl.store(dk_ptr + at, dk, mask=exists)
        tl.store(dv_ptr + at, dv, mask=exists)


def dense_rows(x):
    return x if x.stride(2) == 1 else x.contiguous()


class HSTU(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q, k, v, table, offsets, alpha, N):
        q, k, v, table, offsets = dense_rows(q), dense_rows(k), dense_rows(v), table.contiguous(), offsets.contiguous()
        T, H, D = q.shape
        B, R = len(offsets) - 1, table.shape[1]
        o = q.new_empty(T, H, D)
        strides = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2])
        longest = int(offsets.diff().max())
        width = triton.next_power_of_2(D)
        _fwd_kernel[(triton.cdiv(longest, BLOCK), B * H)](
            q, k, v, table, offsets, o, *strides, H, D, R, alpha, N, BLOCK, width
        )  # fmt: skip
        ctx.save_for_backward(q, k, v, table, offsets)
        ctx.alpha, ctx.N, ctx.longest = alpha, N, longest
        return o

    @staticmethod
    def backward(ctx, g):
        q, k, v, table, offsets = ctx.saved_tensors
        T, H, D = q.shape
        B, R = len(offsets) - 1, table.shape[1]
        g = g.contiguous()
        dq, dk, dv = q.new_empty(T, H, D), q.new_empty(T, H, D), q.new_empty(T, H, D)
        part = q.new_empty(B, H, R)
        sizes = (*q.stride()[:2], *k.stride()[:2], *v.stride()[:2], H, D, R, ctx.alpha, ctx.N)
        width = triton.next_power_of_2(D)
        _dq_kernel[(B * H,)](
            q, k, v, table, offsets, g, dq, part, *sizes, BLOCK, width, triton.next_power_of_2(R)
        )  # fmt: skip
        _dkv_kernel[(triton.cdiv(ctx.longest, BLOCK), B * H)](
            q, k, v, table, offsets, g, dk, dv, *sizes, BLOCK, width
        )  # fmt: skip
        return dq, dk, dv, part.sum(0), None, None, None


def kernel(q, k, v, table, offsets, alpha, N):
    return HSTU.apply(q, k, v, table, offsets, alpha, N)


def target():
    return assay.Target(kernel, golden, cases=[users, long], name="hstu_attention", outputs=("o",))
