"""What every launch of the family needs: flat views of the streams, padded sizes, sizes that fix the order of sums."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core._kernels.launch import cdiv
from ...core.device import triton_interpreted

INTERPRET = triton_interpreted()

# bfloat16 parts that represent a dtype exactly (float16 has 11 bits, float32 24)
PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}

# Width in D of one slice of the projection's sum: slices depend on D alone, so a token's bits do not depend on how many
# other tokens there are; 512 keeps partial sums below 3 % of the traffic and gives decoding 8 programs at D = 4096.
SLICE_D = 512


def streams(x: Tensor) -> Tensor:
    """[..., n, D] as [T, n, D] with unit stride in D; a view where strides allow (stride 0 over n is one of those)."""
    flat = x.reshape(-1, *x.shape[-2:])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] <= 1 else flat.contiguous()


def rows(v: Tensor) -> Tensor:
    """[..., D] as [T, D] with unit stride in D."""
    flat = v.reshape(-1, v.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] <= 1 else flat.contiguous()


def shaped(v: Tensor, shape: tuple[int, ...]) -> Tensor:
    """v as `shape`; itself where that is its shape, for a view of a result costs the caller a look at its storage."""
    return v if v.shape == shape else v.reshape(shape)


def dense(v: Tensor, *shape: int) -> Tensor:
    """Small per-token records, reshaped and contiguous."""
    return v.reshape(shape).contiguous()


def token_chunks(T: int) -> tuple[int, int]:
    """(P, tokens in a chunk) for sums over tokens: a function of T alone; at most 8 chunks, multiples of 64 tokens."""
    chunk = 64 * cdiv(T, 64 * 8)
    return cdiv(T, chunk) if T else 0, max(chunk, 64)


SUPPORTED_N = (1, 2, 3, 4, 8)


def narrow_n(n: int) -> str | None:
    return None if n in SUPPORTED_N else f"n={n} streams; supported are {SUPPORTED_N} (the reference takes any n)"


def narrow(*tensors: Tensor | None) -> str | None:
    """Why these dtypes cannot be taken, or None."""
    for t in tensors:
        if t is not None and t.dtype not in PARTS:
            return f"{str(t.dtype).removeprefix('torch.')} has a reference only; bfloat16, float16 and float32 run here"
    return None
