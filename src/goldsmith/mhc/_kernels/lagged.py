"""One pass over the streams for the lagged boundary: post, collapse, projection and sum of squares.

    y[k] = sum_j h_res[j, k] x[j] + h_post[k] f;  h_in = sum_k h_pre[k] y[k];  part = partial sums of y phi^T and y^2

Elements moved per token at N = 4: x, f, y and h_in, 10D. Coefficients may differ from those of the separate
kernels in the last bits, since the blocks of their sums are narrower; x_next and h_in do not.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.launch import cdiv, power_of_2, run
from .float32_products import dot, int64_stride, settled, split, transposed
from .launch import INTERPRET, PARTS, SLICE_D
from .projection import load_phi
from .stream_gradient import load_columns, load_tiles, mixed


@triton.jit(do_not_specialize=["T", "M"])
def _lagged_fwd_kernel(
    x_ptr, f_ptr, h_pre_ptr, h_post_ptr, h_res_ptr, phi_ptr, gamma_ptr, y_ptr, h_in_ptr, part_ptr,
    stride_xt, stride_xn, stride_ft, T, M, D, N: tl.constexpr, MP: tl.constexpr, SLICE_D: tl.constexpr,
    X_PARTS: tl.constexpr, HAS_GAMMA: tl.constexpr, TRANSPOSED: tl.constexpr, INTERPRET: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    t = (tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)).to(tl.int64)
    s = tl.program_id(1)
    stride_xn = int64_stride(stride_xn)
    h_pre = load_columns(h_pre_ptr, t, T, N)
    h_post = load_columns(h_post_ptr, t, T, N)
    h_res = load_columns(h_res_ptr, t, T, N * N)
    acc = tl.zeros((BLOCK_T, MP), tl.float32)
    squares = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
    for step in range(0, SLICE_D // BLOCK_D):
        d = s * SLICE_D + step * BLOCK_D + tl.arange(0, BLOCK_D)
        live = (t < T)[:, None] & (d < D)[None, :]
        x = load_tiles(x_ptr, t, stride_xt, stride_xn, d, live, N)
        f = load_tiles(f_ptr, t, stride_ft, 0, d, live, 1)[0].to(tl.float32)
        h_in = tl.zeros((BLOCK_T, BLOCK_D), tl.float32)
        for k in tl.static_range(N):
            y = tl.fma(h_post[k], f, mixed(x, h_res, k, N, not TRANSPOSED)).to(x_ptr.dtype.element_ty)
            y = settled(y, INTERPRET)
            tl.store(y_ptr + t[:, None] * (N * D) + k * D + d[None, :], y, mask=live)
            y32 = y.to(tl.float32)
            h_in = tl.fma(h_pre[k], y32, h_in)
            squares += y32 * y32
            phi = load_phi(phi_ptr, gamma_ptr, k, d, M, D, N, MP, HAS_GAMMA)
            acc += dot(split(y, X_PARTS, INTERPRET), transposed(split(phi, 3, INTERPRET)), INFINITE=True)
        tl.store(h_in_ptr + t[:, None] * D + d[None, :], h_in, mask=live)
    m = tl.arange(0, MP)
    base = part_ptr + s.to(tl.int64) * (M + 1) * T
    tl.store(base + M * T + t, tl.sum(squares, axis=1), mask=t < T)
    tl.store(base + m[None, :] * T + t[:, None], acc, mask=(t < T)[:, None] & (m < M)[None, :])


def lagged_forward(
    x: Tensor, f: Tensor, h_pre: Tensor, h_post: Tensor, h_res: Tensor, phi: Tensor, gamma: Tensor | None,
    orientation: str,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """x_next [T, n, D] and h_in [T, D] in x's dtype, and partial sums [slices, M + 1, T] as `project` gives them."""
    T, N, D = x.shape
    M = phi.shape[0]
    # 190 registers and none spilled at 64 x 32 (bfloat16, n = 4, compiled for an H100)
    block_t, block_d = (64 if N <= 4 and M <= 32 else 32), 32
    count, slice_d = cdiv(D, SLICE_D), min(SLICE_D, power_of_2(D, block_d))
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h_in = torch.empty((T, D), dtype=x.dtype, device=x.device)
    part = torch.empty((count, M + 1, T), dtype=torch.float32, device=x.device)
    run(
        _lagged_fwd_kernel, (cdiv(T, block_t), count),
        x, f, h_pre, h_post, h_res, phi, phi if gamma is None else gamma, y, h_in, part,
        x.stride(0), x.stride(1), f.stride(0), T, M, D, N, power_of_2(M, 16), slice_d, PARTS[x.dtype],
        gamma is not None, orientation == "out_in", INTERPRET, block_t, block_d, num_warps=8, num_stages=2,
        rows=D | x.stride(0) | x.stride(1) | f.stride(0),
    )  # fmt: skip
    return y, h_in, part
