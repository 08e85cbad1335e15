"""The passes over the streams of a gated connection: norms, gated mean, and the gradients of both.

Letters: y[i] = x[i] r[i] gamma[i] the normalised streams, g = sigmoid(a up^T) the gates, u = dL/dh_in. Products with
the weights are in products.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.arithmetic import sigmoid
from ...core._kernels.launch import cdiv, power_of_2, run
from .float32_products import dot, int64_stride, split, transposed
from .launch import INTERPRET, PARTS

BLOCK_T, BLOCK_D, BLOCK_R = 64, 64, 64


@triton.jit(do_not_specialize=["T"])
def _inv_rms_kernel(x_ptr, r_ptr, stride_xt, stride_xn, T, D, eps, N: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    row = x_ptr + t * stride_xt + tl.program_id(1) * int64_stride(stride_xn)
    squares = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x = tl.load(row + d, mask=d < D, other=0.0).to(tl.float32)
        squares += x * x
    tl.store(r_ptr + t * N + tl.program_id(1), tl.rsqrt(tl.sum(squares, axis=0) / D + eps))


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """r [T, n] of x [T, n, D]"""
    T, n, D = x.shape
    r = torch.empty((T, n), dtype=torch.float32, device=x.device)
    block = min(1024, power_of_2(D, 16))
    run(
        _inv_rms_kernel, (T, n), x, r, x.stride(0), x.stride(1), T, D, eps, n, block, num_warps=4,
        rows=D | x.stride(0) | x.stride(1),
    )  # fmt: skip
    return r


@triton.jit
def gate_logits(
    a_ptr, up_ptr, t, d, T, R, D: tl.constexpr, i: tl.constexpr, UP_PARTS: tl.constexpr, INTERPRET: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr,
):  # fmt: skip
    """(a up^T) of stream i: [BLOCK_T, BLOCK_D]"""
    acc = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for start in range(0, R, BLOCK_R):
        k = start + tl.arange(0, BLOCK_R)
        a = tl.load(a_ptr + t[:, None] * R + k[None, :], mask=(t < T)[:, None] & (k < R)[None, :], other=0.0)
        at = (i * D + d)[:, None].to(tl.int64) * R + k[None, :]
        up = tl.load(up_ptr + at, mask=(d < D)[:, None] & (k < R)[None, :], other=0.0)
        acc += dot(split(a, 3, INTERPRET), transposed(split(up, UP_PARTS, INTERPRET)))
    return acc


@triton.jit(do_not_specialize=["T", "R"])
def _gated_mean_kernel(
    x_ptr, r_ptr, gamma_ptr, a_ptr, up_ptr, h_in_ptr, stride_xt, stride_xn, T, R, D, N: tl.constexpr,
    UP_PARTS: tl.constexpr, INTERPRET: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    stride_xn = int64_stride(stride_xn)
    live = (t < T)[:, None] & (d < D)[None, :]
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for i in tl.static_range(N):
        logits = gate_logits(a_ptr, up_ptr, t, d, T, R, D, i, UP_PARTS, INTERPRET, BLOCK_T, BLOCK_D, BLOCK_R)
        x = tl.load(x_ptr + t[:, None] * stride_xt + i * stride_xn + d[None, :], mask=live, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + t * N + i, mask=t < T, other=0.0)
        gamma = tl.load(gamma_ptr + i * D + d, mask=d < D, other=0.0).to(tl.float32)
        total += sigmoid(logits) * (x * r[:, None] * gamma[None, :])
    tl.store(h_in_ptr + t[:, None] * D + d[None, :], total / N, mask=live)


def gated_mean(x: Tensor, r: Tensor, gamma: Tensor, a: Tensor, up: Tensor) -> Tensor:
    """h_in [T, D] in x's dtype from x [T, n, D], r [T, n], gamma [n*D], a [T, R] and up [n*D, R]"""
    T, n, D = x.shape
    h_in = torch.empty((T, D), dtype=x.dtype, device=x.device)
    block_d = min(BLOCK_D, power_of_2(D, 16))
    run(
        _gated_mean_kernel, (cdiv(T, BLOCK_T), cdiv(D, block_d)),
        x, r, gamma, a, up, h_in, x.stride(0), x.stride(1), T, a.shape[1], D, n, PARTS[up.dtype], INTERPRET, BLOCK_T,
        block_d, min(BLOCK_R, power_of_2(a.shape[1], 16)), num_warps=8, num_stages=2,
        rows=D | x.stride(0) | x.stride(1),
    )  # fmt: skip
    return h_in


@triton.jit(do_not_specialize=["T", "R"])
def _gates_bwd_kernel(
    x_ptr, r_ptr, gamma_ptr, a_ptr, up_ptr, u_ptr, dgates_ptr, dy_ptr, stride_xt, stride_xn, stride_ut, T, R, D,
    N: tl.constexpr, UP_PARTS: tl.constexpr, INTERPRET: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    stride_xn = int64_stride(stride_xn)
    live = (t < T)[:, None] & (d < D)[None, :]
    u = tl.load(u_ptr + t[:, None] * stride_ut + d[None, :], mask=live, other=0.0).to(tl.float32) / N
    for i in tl.static_range(N):
        logits = gate_logits(a_ptr, up_ptr, t, d, T, R, D, i, UP_PARTS, INTERPRET, BLOCK_T, BLOCK_D, BLOCK_R)
        gates = sigmoid(logits)
        x = tl.load(x_ptr + t[:, None] * stride_xt + i * stride_xn + d[None, :], mask=live, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + t * N + i, mask=t < T, other=0.0)
        gamma = tl.load(gamma_ptr + i * D + d, mask=d < D, other=0.0).to(tl.float32)
        y = x * r[:, None] * gamma[None, :]
        at = t[:, None] * (N * D) + (i * D + d)[None, :]
        tl.store(dgates_ptr + at, u * y * (gates * (1.0 - gates)), mask=live)
        tl.store(dy_ptr + at, u * gates, mask=live)


def gates_backward(x: Tensor, r: Tensor, gamma: Tensor, a: Tensor, up: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients [T, n*D] in float32 of the gates' logits, and of y through the gated mean alone."""
    T, n, D = x.shape
    dgates, dy = (torch.empty((T, n * D), dtype=torch.float32, device=x.device) for _ in range(2))
    block_d = min(BLOCK_D, power_of_2(D, 16))
    run(
        _gates_bwd_kernel, (cdiv(T, BLOCK_T), cdiv(D, block_d)),
        x, r, gamma, a, up, u, dgates, dy, x.stride(0), x.stride(1), u.stride(0), T, a.shape[1], D, n, PARTS[up.dtype],
        INTERPRET, BLOCK_T, block_d, min(BLOCK_R, power_of_2(a.shape[1], 16)), num_warps=8, num_stages=2,
        rows=D | x.stride(0) | x.stride(1) | u.stride(0),
    )  # fmt: skip
    return dgates, dy


@triton.jit(do_not_specialize=["T"])
def _norm_bwd_kernel(
    x_ptr, r_ptr, gamma_ptr, dy_ptr, dx_ptr, stride_xt, stride_xn, T, D, N: tl.constexpr, BLOCK_D: tl.constexpr
):
    t = tl.program_id(0).to(tl.int64)
    i = tl.program_id(1)
    row = x_ptr + t * stride_xt + i * int64_stride(stride_xn)
    at = t * (N * D) + i * D
    r = tl.load(r_ptr + t * N + i)
    dots = tl.zeros((BLOCK_D,), tl.float32)
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        unit = tl.load(row + d, mask=d < D, other=0.0).to(tl.float32) * r
        gamma = tl.load(gamma_ptr + i * D + d, mask=d < D, other=0.0).to(tl.float32)
        dots += tl.load(dy_ptr + at + d, mask=d < D, other=0.0) * gamma * unit
    mean = tl.sum(dots, axis=0) / D
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        unit = tl.load(row + d, mask=d < D, other=0.0).to(tl.float32) * r
        gamma = tl.load(gamma_ptr + i * D + d, mask=d < D, other=0.0).to(tl.float32)
        dunit = tl.load(dy_ptr + at + d, mask=d < D, other=0.0) * gamma
        tl.store(dx_ptr + at + d, r * (dunit - unit * mean), mask=d < D)


def norm_backward(x: Tensor, r: Tensor, gamma: Tensor, dy: Tensor) -> Tensor:
    """dx [T, n, D] in x's dtype from the gradient dy [T, n*D] of the normalised streams"""
    T, n, D = x.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(1024, power_of_2(D, 16))
    run(
        _norm_bwd_kernel, (T, n), x, r, gamma, dy, dx, x.stride(0), x.stride(1), T, D, n, block, num_warps=4,
        rows=D | x.stride(0) | x.stride(1),
    )  # fmt: skip
    return dx


@triton.jit(do_not_specialize=["T"])
def _gamma_bwd_kernel(
    x_ptr, r_ptr, dy_ptr, dgamma_ptr, stride_xt, stride_xn, T, D, N: tl.constexpr, BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):  # fmt: skip
    i = tl.program_id(1)
    d = tl.program_id(0) * BLOCK_D + tl.arange(0, BLOCK_D)
    stride_xn = int64_stride(stride_xn)
    total = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for start in range(0, T, BLOCK_T):
        t = (start + tl.arange(0, BLOCK_T)).to(tl.int64)
        live = (t < T)[:, None] & (d < D)[None, :]
        x = tl.load(x_ptr + t[:, None] * stride_xt + i * stride_xn + d[None, :], mask=live, other=0.0).to(tl.float32)
        r = tl.load(r_ptr + t * N + i, mask=t < T, other=0.0)
        dy = tl.load(dy_ptr + t[:, None] * (N * D) + (i * D + d)[None, :], mask=live, other=0.0)
        total += dy * (x * r[:, None])
    tl.store(dgamma_ptr + i * D + d, tl.sum(total.to(tl.float64), axis=0).to(tl.float32), mask=d < D)


def gamma_gradient(x: Tensor, r: Tensor, dy: Tensor) -> Tensor:
    """dgamma [n*D] in float32: the sum over tokens of dy x r, each of 64 lanes in order, then in float64"""
    T, n, D = x.shape
    dgamma = torch.empty(n * D, dtype=torch.float32, device=x.device)
    block_d = min(32, power_of_2(D, 16))
    run(
        _gamma_bwd_kernel, (cdiv(D, block_d), n),
        x, r, dy, dgamma, x.stride(0), x.stride(1), T, D, n, BLOCK_T, block_d, num_warps=4,
        rows=D | x.stride(0) | x.stride(1),
    )  # fmt: skip
    return dgamma
