"""y = x * inv_rms * w and the largest |y| of each row, one row a program; float32, also through the interpreter."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay


@assay.case(T=[5], D=[100])
def tokens(make, T, D):
    return {"x": make.normal(T, D), "w": make.normal(D), "eps": 1e-6}


@assay.case(T=[3], D=[33])
def odd(make, T, D):
    return tokens[0].draw(make, T, D)


@assay.case(T=[4], D=[50])
def half(make, T, D):
    return tokens[0].draw(make, T, D)


def golden(x, w, eps):
    inv_rms = assay.stage("inv_rms", torch.rsqrt(x.square().mean(-1, keepdim=True) + eps))
    top = assay.stage("top", x.amax(-1, keepdim=True))
    return x * inv_rms * w, top


@triton.jit
def _norm_kernel(x_ptr, w_ptr, y_ptr, inv_ptr, top_ptr, stride_xt, stride_xd, stride_w, D, eps, BLOCK: tl.constexpr):
    t = tl.program_id(0)
    d = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + t * stride_xt + d * stride_xd, mask=d < D, other=0.0)
    inv_rms = 1.0 / tl.sqrt(tl.sum(x * x, axis=0) / D + eps)
    for_max = tl.load(x_ptr + t * stride_xt + d * stride_xd, mask=d < D, other=-float("inf"))
    unordered = tl.sum((x != x).to(tl.int32), axis=0)  # tl.max passes over NaN
    tl.store(top_ptr + t, tl.where(unordered > 0, float("nan"), tl.max(for_max, axis=0)))
    tl.store(inv_ptr + t, inv_rms)
    w = tl.load(w_ptr + d * stride_w, mask=d < D, other=0.0)
    tl.store(y_ptr + t * D + d, x * inv_rms * w, mask=d < D)


def forward(x, w, eps):
    T, D = x.shape
    y = torch.empty(T, D, device=x.device)
    inv_rms, top = (torch.empty(T, 1, device=x.device) for _ in range(2))
    block = triton.next_power_of_2(D)
    _norm_kernel[(T,)](x, w, y, inv_rms, top, *x.stride(), w.stride(0), D, eps, block)
    assay.stage("inv_rms", inv_rms)
    return y, assay.stage("top", top)


def target():
    return assay.Target(forward, golden, cases=[tokens, odd, half], name="rmsnorm", outputs=("y", "top"), backward=None)
