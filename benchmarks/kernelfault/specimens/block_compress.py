"""y_m = sum_l p_ml k_{s_m + l},  p_m = softmax_l(z_{s_m + l} + bias_l),  s_m = the m-th block's first token.

Compression of keys for sparse attention: overlapping blocks of L tokens, one every `stride`, become one key each, with
weights per channel from a learned score of the token and a bias of its place in the block. Sequences are packed one
after another, `cu` has their bounds, and no block crosses one; a sequence's last blocks may be short. Triton, float32:
a program per block with a running maximum; the backward has a kernel by token, over the blocks that hold it, and one by
place for the bias.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay


@assay.case(T=[17], D=[6], S=[4], L=[4])
def packed(make, T, D, S, L):
    return {
        "k": make.normal(T, D), "z": make.normal(T, D), "bias": make.normal(L, D), "cu": make.offsets(S, T),
        "stride": 2,
    }  # fmt: skip


@assay.case(T=[11], D=[4], S=[2], L=[5])
def uneven_stride(make, T, D, S, L):
    return {**packed[0].draw(make, T, D, S, L), "k": make.normal(D, T).T, "cu": make.offsets(S, T, 0), "stride": 3}


def counts(cu, stride):
    """How many blocks each sequence has."""
    return (cu[1:] - cu[:-1] + stride - 1) // stride


def golden(k, z, bias, cu, stride):
    scores, values = [], []
    for start, end in zip(cu[:-1].tolist(), cu[1:].tolist(), strict=True):
        for first in range(start, end, stride):
            now = slice(first, min(first + bias.shape[0], end))
            scores.append(z[now] + bias[: now.stop - first])
            values.append(k[now])
    lse = assay.stage("lse", torch.stack([torch.logsumexp(score, 0) for score in scores]))
    return torch.stack([(torch.exp(s - row) * v).sum(0) for s, v, row in zip(scores, values, lse, strict=True)])


# m block, t token, l place in the block, d channel
@triton.jit
def _fwd_kernel(k_ptr, z_ptr, bias_ptr, start_ptr, stop_ptr, y_ptr, lse_ptr, D, L, BLOCK_D: tl.constexpr):
    m, d = tl.program_id(0), tl.arange(0, BLOCK_D)
    start, stop = tl.load(start_ptr + m), tl.load(stop_ptr + m)
    top = tl.full([BLOCK_D], -float("inf"), tl.float32)
    total = tl.zeros([BLOCK_D], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for place in range(0, tl.minimum(L, stop - start)):
        at = (start + place) * D + d
        score = tl.load(z_ptr + at, mask=d < D, other=0.0) + tl.load(bias_ptr + place * D + d, mask=d < D, other=0.0)
        new = tl.maximum(top, score)
        fade = tl.exp(top - new)
        e = tl.exp(score - new)
        total = total * fade + e
        acc = acc * fade + e * tl.load(k_ptr + at, mask=d < D, other=0.0)
        top = new
    tl.store(y_ptr + m * D + d, acc / total, mask=d < D)
    tl.store(lse_ptr + m * D + d, top + tl.log(total), mask=d < D)


@triton.jit
def _bwd_tokens_kernel(g_ptr, k_ptr, z_ptr, bias_ptr, y_ptr, lse_ptr, cu_ptr, block_cu_ptr, dk_ptr, dz_ptr, S, D, L,
                       stride, BLOCK_D: tl.constexpr):  # fmt: skip
    t, d = tl.program_id(0), tl.arange(0, BLOCK_D)
    sequence = 0
    for other in range(1, S):
        if tl.load(cu_ptr + other) <= t:
            sequence = other
    offset = t - tl.load(cu_ptr + sequence)
    before = tl.load(block_cu_ptr + sequence)
    k = tl.load(k_ptr + t * D + d, mask=d < D, other=0.0)
    z = tl.load(z_ptr + t * D + d, mask=d < D, other=0.0)
    dk = tl.zeros([BLOCK_D], tl.float32)
    dz = tl.zeros([BLOCK_D], tl.float32)
    first = tl.maximum(offset - L + stride, 0) // stride
    for n in range(first, offset // stride + 1):
        at = (before + n) * D + d
        bias = tl.load(bias_ptr + (offset - n * stride) * D + d, mask=d < D, other=0.0)
        g = tl.load(g_ptr + at, mask=d < D, other=0.0)
        y = tl.load(y_ptr + at, mask=d < D, other=0.0)
        p = tl.exp(z + bias - tl.load(lse_ptr + at, mask=d < D, other=0.0))
        dk += p * g
        dz += p * g * (k - y)
    tl.store(dk_ptr + t * D + d, dk, mask=d < D)
    tl.store(dz_ptr + t * D + d, dz, mask=d < D)


@triton.jit
def _bwd_bias_kernel(g_ptr, k_ptr, z_ptr, bias_ptr, y_ptr, lse_ptr, start_ptr, stop_ptr, dbias_ptr, blocks, D,
                     BLOCK_D: tl.constexpr):  # fmt: skip
    place, d = tl.program_id(0), tl.arange(0, BLOCK_D)
    bias = tl.load(bias_ptr + place * D + d, mask=d < D, other=0.0)
    acc = tl.zeros([BLOCK_D], tl.float32)
    for m in range(0, blocks):
        t = tl.load(start_ptr + m) + place
        some = (d < D) & (t < tl.load(stop_ptr + m))
        k = tl.load(k_ptr + t * D + d, mask=some, other=0.0)
        z = tl.load(z_ptr + t * D + d, mask=some, other=0.0)
        g = tl.load(g_ptr + m * D + d, mask=d < D, other=0.0)
        y = tl.load(y_ptr + m * D + d, mask=d < D, other=0.0)
        lse = tl.load(lse_ptr + m * D + d, mask=d < D, other=0.0)
        acc += tl.where(some, tl.exp(z + bias - lse) * g * (k - y), 0.0)
    tl.store(dbias_ptr + place * D + d, acc, mask=d < D)


class BlockCompress(torch.autograd.Function):
    @staticmethod
    def forward(ctx, k, z, bias, cu, stride):
        k, z, bias, cu = k.contiguous(), z.contiguous(), bias.contiguous(), cu.contiguous()
        D, L = k.shape[1], bias.shape[0]
        blocks_of = counts(cu, stride)
        block_cu = torch.nn.functional.pad(blocks_of.cumsum(0), (1, 0))
        blocks = int(block_cu[-1])
        within = torch.arange(blocks, device=k.device) - block_cu[:-1].repeat_interleave(blocks_of)
        start = cu[:-1].repeat_interleave(blocks_of) + within * stride
        stop = torch.minimum(start + L, cu[1:].repeat_interleave(blocks_of))
        y, lse = k.new_empty(blocks, D), k.new_empty(blocks, D)
        _fwd_kernel[(blocks,)](k, z, bias, start, stop, y, lse, D, L, triton.next_power_of_2(D))
        lse = assay.stage("lse", lse)
        ctx.save_for_backward(k, z, bias, cu, block_cu, start, stop, y, lse)
        ctx.stride = stride
        return y

    @staticmethod
    def backward(ctx, g):
        k, z, bias, cu, block_cu, start, stop, y, lse = ctx.saved_tensors
        (T, D), L, g = k.shape, bias.shape[0], g.contiguous()
        dk, dz, dbias = torch.empty_like(k), torch.empty_like(z), torch.empty_like(bias)
        tensors, block_d = (g, k, z, bias, y, lse), triton.next_power_of_2(D)
        _bwd_tokens_kernel[(T,)](*tensors, cu, block_cu, dk, dz, len(cu) - 1, D, L, ctx.stride, block_d)
        _bwd_bias_kernel[(L,)](*tensors, start, stop, dbias, len(start), D, block_d)
        return dk, dz, dbias, None, None


def kernel(k, z, bias, cu, stride):
    return BlockCompress.apply(k, z, bias, cu, stride)


def target():
    return assay.Target(kernel, golden, cases=[packed, uneven_stride], name="block_compress", outputs=("y",))
