"""mhc.expand in Triton: y[t, i] = x[t], dx[t] = sum_i g[t, i] (T tokens, N streams, D dim); one pass each."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.launch import cdiv, power_of_2, run
from ...core.tracing import stage
from .._kernels.float32_products import int64_stride
from .._kernels.launch import rows, streams, unsupported_n

LAUNCHES_ONLY = True


def unsupported(tensors: dict, options: dict) -> str | None:
    return unsupported_n(options["n"])


@triton.jit
def _expand_fwd_kernel(x_ptr, y_ptr, stride_xt, D, N: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    x = tl.load(x_ptr + t * stride_xt + d, mask=d < D, other=0.0)
    for i in tl.static_range(N):
        tl.store(y_ptr + (t * N + i) * D + d, x, mask=d < D)


@triton.jit
def _expand_bwd_kernel(g_ptr, dx_ptr, stride_gt, stride_gn, D, N: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    stride_gn = int64_stride(stride_gn)
    total = tl.zeros((BLOCK_D,), tl.float32)
    for i in tl.static_range(N):
        total += tl.load(g_ptr + t * stride_gt + i * stride_gn + d, mask=d < D, other=0.0).to(tl.float32)
    tl.store(dx_ptr + t * D + d, total, mask=d < D)


def forward(x: Tensor, *, n: int) -> tuple[Tensor]:
    flat = rows(x)
    T, D = flat.shape
    y = torch.empty((*x.shape[:-1], n, D), dtype=x.dtype, device=x.device)
    block = min(2048, power_of_2(D, 16))
    run(
        _expand_fwd_kernel, (T, cdiv(D, block)), flat, y, flat.stride(0), D, n, block, num_warps=4,
        rows=D | flat.stride(0),
    )  # fmt: skip
    return (stage("streams", y),)


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    x, g = tensors["x"], streams(grads["streams"])
    T, n, D = g.shape
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    block = min(2048, power_of_2(D, 16))
    run(
        _expand_bwd_kernel, (T, cdiv(D, block)), g, dx, g.stride(0), g.stride(1), D, n, block, num_warps=4,
        rows=D | g.stride(0) | g.stride(1),
    )  # fmt: skip
    return {"x": dx}
