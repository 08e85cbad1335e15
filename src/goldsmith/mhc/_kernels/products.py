"""A plain matrix product in float32 precision, in a fixed order: addend + scale * (A B) for matrices of any strides.

Sums run over the inner axis in blocks of 64, in order, whatever the other sizes are. Rows of A are tokens or columns of
a weight; with tokens inside, the result is a weight's gradient.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.launch import cdiv, power_of_2, run
from .float32_products import dot, split
from .launch import INTERPRET, PARTS


@triton.jit(do_not_specialize=["I", "J", "L"])
def _product_kernel(
    a_ptr, b_ptr, scale_ptr, addend_ptr, c_ptr, stride_ai, stride_al, stride_bl, stride_bj, stride_s, I, J, L,
    A_PARTS: tl.constexpr, B_PARTS: tl.constexpr, HAS_SCALE: tl.constexpr, HAS_ADDEND: tl.constexpr,
    INTERPRET: tl.constexpr, BLOCK_I: tl.constexpr, BLOCK_J: tl.constexpr, BLOCK_L: tl.constexpr,
):  # fmt: skip
    i = (tl.program_id(0) * BLOCK_I + tl.arange(0, BLOCK_I)).to(tl.int64)
    j = (tl.program_id(1) * BLOCK_J + tl.arange(0, BLOCK_J)).to(tl.int64)
    acc = tl.zeros((BLOCK_I, BLOCK_J), tl.float32)
    for start in range(0, L, BLOCK_L):
        k = (start + tl.arange(0, BLOCK_L)).to(tl.int64)
        a_at = i[:, None] * stride_ai + k[None, :] * stride_al
        b_at = k[:, None] * stride_bl + j[None, :] * stride_bj
        a = tl.load(a_ptr + a_at, mask=(i < I)[:, None] & (k < L)[None, :], other=0.0)
        b = tl.load(b_ptr + b_at, mask=(k < L)[:, None] & (j < J)[None, :], other=0.0)
        acc += dot(split(a, A_PARTS, INTERPRET), split(b, B_PARTS, INTERPRET))
    at = i[:, None] * J + j[None, :]
    live = (i < I)[:, None] & (j < J)[None, :]
    if HAS_SCALE:
        acc = acc * tl.load(scale_ptr + i * stride_s, mask=i < I, other=0.0)[:, None]
    if HAS_ADDEND:
        acc = tl.load(addend_ptr + at, mask=live, other=0.0) + acc
    tl.store(c_ptr + at, acc, mask=live)


def product(a: Tensor, b: Tensor, *, scale: Tensor | None = None, addend: Tensor | None = None) -> Tensor:
    """addend + scale[:, None] * (a @ b) as [I, J] in float32, for a [I, L] and b [L, J] in 16 or 32 bits."""
    (I, L), J = a.shape, b.shape[1]
    c = torch.empty((I, J), dtype=torch.float32, device=a.device)
    block_i, block_j = (min(64, power_of_2(size, 16)) for size in (I, J))
    block_l = 64 if L > 32 else 32  # of the inner size alone, so that a row's sum does not depend on the other rows
    run(
        _product_kernel, (cdiv(I, block_i), cdiv(J, block_j)),
        a, b, c if scale is None else scale, c if addend is None else addend, c,
        a.stride(0), a.stride(1), b.stride(0), b.stride(1), 0 if scale is None else scale.stride(0), I, J, L,
        PARTS[a.dtype], PARTS[b.dtype], scale is not None, addend is not None, INTERPRET, block_i, block_j, block_l,
        num_warps=4, num_stages=2,
    )  # fmt: skip
    return c
