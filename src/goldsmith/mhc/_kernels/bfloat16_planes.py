"""A float32 matrix as a sum of bfloat16 planes, split once for kernels that read it often.

Rows are padded with zeros to the size that tensor cores need. In the interpreter, whose bfloat16 dot returns garbage,
the planes hold the same values in float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core._kernels.launch import cdiv, run
from .float32_products import split
from .launch import INTERPRET

BLOCK = 1024
ROWS = 16 if INTERPRET else 1  # rows per program, which divide 16: the interpreter takes as long for 1 row as for 16


@triton.jit
def load_planes(ptr, at, stride, mask, PLANES: tl.constexpr):
    """The tile at `at` of each plane, as a tuple."""
    tiles = ()
    for i in tl.static_range(PLANES):
        tiles = tiles + (tl.load(ptr + i * stride + at, mask=mask, other=0.0),)
    return tiles


@triton.jit
def store_planes(ptr, at, stride, v, mask, PLANES: tl.constexpr, INTERPRET: tl.constexpr):
    parts = split(v, PLANES, INTERPRET)
    for i in tl.static_range(PLANES):
        tl.store(ptr + i * stride + at, parts[i], mask=mask)


@triton.jit(do_not_specialize=["M"])
def _phi_planes_kernel(phi_ptr, gamma_ptr, planes_ptr, M, K, HAS_GAMMA: tl.constexpr, PLANES: tl.constexpr,
                       INTERPRET: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip
    m = tl.program_id(1) * ROWS + tl.arange(0, ROWS)[:, None]
    k = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)[None, :]
    phi = tl.load(phi_ptr + m * K + k, mask=(k < K) & (m < M), other=0.0).to(tl.float32)
    if HAS_GAMMA:
        phi *= tl.load(gamma_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    phi = tl.where(m < M, phi, 0.0)
    store_planes(planes_ptr, m * K + k, tl.num_programs(1) * ROWS * K, phi, k < K, PLANES, INTERPRET)


def new_planes(count: int, *shape: int, device: torch.device) -> Tensor:
    return torch.empty((count, *shape), dtype=torch.float32 if INTERPRET else torch.bfloat16, device=device)


def phi_planes(phi: Tensor, gamma: Tensor | None, rows: int, count: int) -> Tensor:
    """phi * gamma as planes [count, rows, K], with zeros below phi's own rows."""
    M, K = phi.shape
    planes = new_planes(count, rows, K, device=phi.device)
    run(
        _phi_planes_kernel, (cdiv(K, BLOCK), rows // ROWS),
        phi, phi if gamma is None else gamma, planes, M, K, gamma is not None, planes.shape[0], INTERPRET, ROWS, BLOCK,
        num_warps=4, rows=K,
    )  # fmt: skip
    return planes


def from_planes(planes: Tensor, columns: int) -> Tensor:
    """The sum of the planes, [T, columns] in float32; exact, since three bfloat16 parts hold 24 bits."""
    total = planes[-1].float()
    for plane in reversed(planes[:-1].unbind()):
        total = total + plane.float()
    return total[:, :columns].contiguous()


def to_planes(v: Tensor, like: Tensor) -> Tensor:
    """v [T, columns] as planes of the shape of `like`, [count, T, padded]."""
    planes, rest = torch.zeros_like(like), v.float()
    for plane in planes:
        plane[:, : v.shape[1]] = rest.bfloat16()
        rest = rest - plane[:, : v.shape[1]].float()
    return planes
