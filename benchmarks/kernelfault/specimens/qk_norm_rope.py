"""q, k = rope(w x / rms(x)) of a fused qkv projection; v passes.  rope turns the first R of D dims, half by half.

Norm and rotary embedding of queries and keys in one step, as decoders with normalised queries run it. cos and sin are
tables over positions; `positions` has each token's row. Triton, float32: a program has one head of one token. The
weights' gradients come from every program's share.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

EPS = 1e-3


def tables(make, rows, R):
    speed = 100.0 ** (-torch.arange(R // 2, device=make.device) / (R // 2))
    angle = torch.arange(rows, device=make.device).unsqueeze(-1) * speed
    return {"cos": (1.1 * angle.cos()).to(make.dtype), "sin": (1.1 * angle.sin()).to(make.dtype)}


@assay.case(T=[5], HQ=[4], HK=[2], D=[12], R=[8])
def partial(make, T, HQ, HK, D, R):
    return {
        "qkv": make.normal(T, (HQ + 2 * HK) * D), "wq": 1 + make.normal(D, std=0.3), "wk": 1 + make.normal(D, std=0.3),
        **tables(make, 23, R), "positions": make.integers(0, 23, T), "heads": HQ, "kv_heads": HK,
    }  # fmt: skip


@assay.case(T=[3], HQ=[3], HK=[3], D=[16], R=[16])
def full(make, T, HQ, HK, D, R):
    return partial[0].draw(make, T, HQ, HK, D, R)


def golden(qkv, wq, wk, cos, sin, positions, heads, kv_heads):
    x = qkv.unflatten(-1, (heads + 2 * kv_heads, -1))
    q, k, v = x.split([heads, kv_heads, kv_heads], 1)
    c, s = cos[positions].unsqueeze(1), sin[positions].unsqueeze(1)

    def turned(x, w):
        x = w * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS))
        half = c.shape[-1]
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return torch.cat((a * c - b * s, b * c + a * s, rest), -1)

    return turned(q, wq), turned(k, wk), v


@triton.jit
def _fwd_kernel(x_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, pos_ptr, q_ptr, k_ptr, inv_ptr, HQ, HK, D,
                R: tl.constexpr, EPS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    t, h = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    x_ptr += (t * (HQ + 2 * HK) + h) * D
    x = tl.load(x_ptr + d, mask=d < D, other=0.0)
    inv = 1.0 / tl.sqrt(tl.sum(x * x) / D + EPS)
    tl.store(inv_ptr + t * (HQ + HK) + h, inv)
    if h < HQ:
        w_ptr, y_ptr = wq_ptr, q_ptr + (t * HQ + h) * D
    else:
        w_ptr, y_ptr = wk_ptr, k_ptr + (t * HK + h - HQ) * D
    half = tl.arange(0, R // 2)
    table = tl.load(pos_ptr + t) * (R // 2) + half
    c, s = tl.load(cos_ptr + table), tl.load(sin_ptr + table)
    a = tl.load(x_ptr + half) * inv * tl.load(w_ptr + half)
    b = tl.load(x_ptr + R // 2 + half) * inv * tl.load(w_ptr + R // 2 + half)
    w = tl.load(w_ptr + d, mask=d < D, other=0.0)
    tl.store(y_ptr + half, a * c - b * s)
    tl.store(y_ptr + R // 2 + half, b * c + a * s)
    tl.store(y_ptr + d, x * inv * w, mask=(d >= R) & (d < D))


@triton.jit
def _bwd_kernel(x_ptr, wq_ptr, wk_ptr, cos_ptr, sin_ptr, pos_ptr, inv_ptr, gq_ptr, gk_ptr, dx_ptr, part_ptr, HQ, HK, D,
                R: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    t, h = tl.program_id(0), tl.program_id(1)
    d = tl.arange(0, BLOCK)
    m = d < D
    at = (t * (HQ + 2 * HK) + h) * D + d
    x = tl.load(x_ptr + at, mask=m, other=0.0)
    inv = tl.load(inv_ptr + t * (HQ + HK) + h)
    if h < HQ:
        w_ptr, g_ptr = wq_ptr, gq_ptr + (t * HQ + h) * D
    else:
        w_ptr, g_ptr = wk_ptr, gk_ptr + (t * HK + h - HQ) * D
    w = tl.load(w_ptr + d, mask=m, other=0.0)
    low = d < R // 2
    turned = d < R
    column = tl.where(low, d, d - R // 2)
    other = tl.where(low, d + R // 2, d - R // 2)
    table = tl.load(pos_ptr + t) * (R // 2) + column
    c = tl.load(cos_ptr + table, mask=turned, other=1.0)
    s = tl.load(sin_ptr + table, mask=turned, other=0.0)
    g = tl.load(g_ptr + d, mask=m, other=0.0)
    g_other = tl.load(g_ptr + other, mask=turned, other=0.0)
    g = g * c + tl.where(low, g_other, -g_other) * s
    x_hat = x * inv
    tl.store(part_ptr + (t * (HQ + HK) + h) * D + d, g * x_hat, mask=m)
    g_hat = g * w
    dx = inv * (g_hat - x_hat * (tl.sum(g_hat * x_hat) / D))
    tl.store(dx_ptr + at, dx, mask=m)


class QKNormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx, qkv, wq, wk, cos, sin, positions, heads, kv_heads):
        T, D = qkv.shape[0], wq.shape[0]
        saved = [x.contiguous() for x in (qkv, wq, wk, cos, sin, positions)]
        q, k, inv = qkv.new_empty(T, heads, D), qkv.new_empty(T, kv_heads, D), qkv.new_empty(T, heads + kv_heads)
        v = saved[0].view(T, -1, D)[:, heads + kv_heads :].clone()
        _fwd_kernel[(T, heads + kv_heads)](
            *saved, q, k, inv, heads, kv_heads, D, 2 * cos.shape[-1], EPS, triton.next_power_of_2(D)
        )
        ctx.save_for_backward(*saved, inv)
        ctx.heads, ctx.kv_heads = heads, kv_heads
        return q, k, v

    @staticmethod
    def backward(ctx, gq, gk, gv):
        *saved, inv = ctx.saved_tensors
        qkv, wq, cos = saved[0], saved[1], saved[3]
        T, D = qkv.shape[0], wq.shape[0]
        dx, part = torch.empty_like(qkv), qkv.new_empty(T, ctx.heads + ctx.kv_heads, D)
        dx.view(T, -1, D)[:, ctx.heads + ctx.kv_heads :] = gv
        _bwd_kernel[(T, ctx.heads + ctx.kv_heads)](
            *saved, inv, gq.contiguous(), gk.contiguous(), dx, part, ctx.heads, ctx.kv_heads, D, 2 * cos.shape[-1],
            triton.next_power_of_2(D)
        )  # fmt: skip
        dwq, dwk = part[:, : ctx.heads].sum((0, 1)), part[:, ctx.heads :].sum((0, 1))
        return dx, dwq, dwk, None, None, None, None, None


def kernel(qkv, wq, wk, cos, sin, positions, heads, kv_heads):
    return QKNormRope.apply(qkv, wq, wk, cos, sin, positions, heads, kv_heads)


def target():
    return assay.Target(
        kernel, golden, cases=[partial, full], name="qk_norm_rope", outputs=("q", "k", "v"), grads=("qkv", "wq", "wk")
    )
