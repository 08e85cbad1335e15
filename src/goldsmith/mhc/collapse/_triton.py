"""mhc.collapse on a GPU; the forward and the dots of the backward are in _kernels/collapse.py.

Elements moved per token at N = 4: forward 5D; backward 5D (dots) + 5D (dx).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.launch import cdiv, power_of_2, run
from ...core.tracing import stage
from .._kernels.collapse import collapse, collapse_dots
from .._kernels.launch import dense, rows, shaped, streams, unsupported_dtype

LAUNCHES_ONLY = True


def unsupported(tensors: dict, options: dict) -> str | None:
    return unsupported_dtype(tensors["x"])


def forward(x: Tensor, h_pre: Tensor) -> tuple[Tensor]:
    h_in = collapse(streams(x), dense(h_pre, -1, x.shape[-2]))
    return (stage("h_in", shaped(h_in, (*x.shape[:-2], x.shape[-1]))),)


@triton.jit(do_not_specialize=["T"])
def _collapse_bwd_kernel(u_ptr, h_pre_ptr, dx_ptr, stride_ut, T, D, N: tl.constexpr, BLOCK_D: tl.constexpr):
    t = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    u = tl.load(u_ptr + t * stride_ut + d, mask=d < D, other=0.0).to(tl.float32)
    for i in tl.static_range(N):
        tl.store(dx_ptr + t * (N * D) + i * D + d, tl.load(h_pre_ptr + t * N + i) * u, mask=d < D)


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    x, h_pre, u = tensors["x"], tensors["h_pre"], rows(grads["h_in"])
    (T, D), n = u.shape, x.shape[-2]
    gradients = {}
    if "h_pre" in needs:
        gradients["h_pre"] = stage("dh_pre", shaped(collapse_dots(streams(x), u), h_pre.shape))
    if "x" in needs:
        dx = torch.empty((T, n, D), dtype=x.dtype, device=x.device)
        block = min(1024, power_of_2(D, 16))
        grid = (T, cdiv(D, block))
        run(_collapse_bwd_kernel, grid, u, dense(h_pre, -1, n), dx, u.stride(0), T, D, n, block, num_warps=4)
        gradients["x"] = stage("dx", shaped(dx, x.shape))
    return gradients
