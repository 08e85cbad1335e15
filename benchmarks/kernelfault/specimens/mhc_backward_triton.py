"""Part of the packed backward of hyper-connections, one token a program: dh_pre, the bias' gradient, and dx.

h_pre = sigmoid(z[:, :n]) + eps,  h_in = sum_n h_pre[n] x[n],  z is given as an input; float32, also interpreted.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from goldsmith import assay

EPS = 1e-6


@assay.case(T=[4], n=[4], D=[48])
def tokens(make, T, n, D):
    return {"x": make.normal(T, n, D), "z": make.normal(T, n), "bias": make.normal(n), "n": n}


@assay.case(T=[3], n=[2], D=[70])
def two_streams(make, T, n, D):
    return tokens[0].draw(make, T, n, D)


@assay.case(T=[2], n=[4], D=[65])
def odd(make, T, n, D):
    return tokens[0].draw(make, T, n, D)


def golden(x, z, bias, n):
    h_pre = assay.stage("h_pre", torch.sigmoid(z + bias) + EPS)
    return (h_pre.unsqueeze(-1) * x).sum(-2)


def forward(x, z, bias, n):
    h_pre = assay.stage("h_pre", torch.sigmoid(z + bias) + EPS)
    return torch.einsum("tn,tnd->td", h_pre, x)


@triton.jit
def _backward_kernel(
    x_ptr, s_ptr, g_ptr, dpre_ptr, dz_ptr, dbias_ptr, dx_ptr, stride_xt, stride_xn, stride_xd, stride_gt, stride_gd,
    D, N: tl.constexpr, BLOCK: tl.constexpr, EPSILON: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0)
    n = tl.arange(0, N)
    s = tl.load(s_ptr + t * N + n)
    dpre = tl.zeros((N,), tl.float32)
    for start in range(0, D, BLOCK):
        d = start + tl.arange(0, BLOCK)
        g = tl.load(g_ptr + t * stride_gt + d * stride_gd, mask=d < D, other=0.0)
        at = n[:, None] * stride_xn + d[None, :] * stride_xd
        x = tl.load(x_ptr + t * stride_xt + at, mask=(d < D)[None, :], other=0.0)
        dpre += tl.sum(x * g[None, :], axis=1)
        dx = (s + EPSILON)[:, None] * g[None, :]
        tl.store(dx_ptr + t * (N * D) + n[:, None] * D + d[None, :], dx, mask=(d < D)[None, :])
    tl.store(dpre_ptr + t * N + n, dpre)
    dz = dpre * s * (1 - s)
    tl.store(dz_ptr + t * N + n, dz)
    tl.atomic_add(dbias_ptr + n, dz)


def backward(x, z, bias, n, grad_h_in):
    T, _, D = x.shape
    s = torch.sigmoid(z + bias).contiguous()
    dpre, dz = x.new_empty(T, n), x.new_empty(T, n)
    dx, dbias = x.new_empty(T, n, D), x.new_zeros(n)
    grid = (T,)
    _backward_kernel[grid](
        x, s, grad_h_in, dpre, dz, dbias, dx, *x.stride(), *grad_h_in.stride(), D, n, 32, EPS
    )  # fmt: skip
    assay.stage("h_pre.grad", dpre)
    return {"x": dx, "z": dz, "bias": dbias}


def target():
    return assay.Target(
        forward, golden, cases=[tokens, two_streams, odd], name="mhc_backward", outputs=("h_in",), backward=backward
    )
