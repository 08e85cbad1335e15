"""Helpers for the family's launches: flat views of tensors, sizes that fix the order of sums, supported inputs."""

from __future__ import annotations

import torch
from torch import Tensor

from ...core._kernels.launch import cdiv
from ...core.device import triton_interpreted

INTERPRET = triton_interpreted()

# bfloat16 parts that represent a dtype exactly (float16 has 11 bits, float32 24)
PARTS = {torch.bfloat16: 1, torch.float16: 2, torch.float32: 3}

# Width in D of one slice of the projection's sum. Slices depend on D alone, so a token's bits do not depend on the
# number of tokens. 512 keeps the partial sums below 3 % of the traffic and gives decoding 8 programs at D = 4096.
SLICE_D = 512
CHUNK_D = 64  # width in D of a part of a slice, summed over the streams before it is added to the slice
LANES = 8  # sums of squares that are added last, one for each thread that holds a part of a chunk's row


def streams(x: Tensor) -> Tensor:
    """[..., n, D] as [T, n, D] with unit stride in D; a view where strides allow it (stride 0 over n does)."""
    flat = x if x.dim() == 3 else x.reshape(-1, *x.shape[-2:])  # a reshape costs 0.8 us
    return flat if flat.stride(-1) == 1 or flat.shape[-1] <= 1 else flat.contiguous()


def rows(v: Tensor) -> Tensor:
    """[..., D] as [T, D] with unit stride in D."""
    flat = v if v.dim() == 2 else v.reshape(-1, v.shape[-1])
    return flat if flat.stride(-1) == 1 or flat.shape[-1] <= 1 else flat.contiguous()


def shaped(v: Tensor, shape: tuple[int, ...]) -> Tensor:
    """v as `shape`; v itself if it has that shape, because the caller checks the storage of a result that is a view."""
    return v if v.shape == shape else v.reshape(shape)


def dense(v: Tensor, *shape: int) -> Tensor:
    """v reshaped and contiguous, for small per-token records."""
    return (v if v.shape == shape else v.reshape(shape)).contiguous()


def token_chunks(T: int) -> tuple[int, int]:
    """(P, tokens per chunk) for sums over tokens, from T alone: at most 8 chunks of a multiple of 64 tokens."""
    chunk = 64 * cdiv(T, 64 * 8)
    return cdiv(T, chunk) if T else 0, max(chunk, 64)


SUPPORTED_N = (1, 2, 3, 4, 8)


def unsupported_n(n: int) -> str | None:
    """Why the kernels do not support n streams, or None."""
    return None if n in SUPPORTED_N else f"n={n} streams; supported are {SUPPORTED_N} (the reference takes any n)"


def unsupported_dtype(*tensors: Tensor | None) -> str | None:
    """Why the kernels do not support the dtypes of these tensors, or None."""
    for t in tensors:
        if t is not None and t.dtype not in PARTS:
            return (
                f"{str(t.dtype).removeprefix('torch.')} runs on the reference only; "
                "this backend takes bfloat16, float16 and float32"
            )
    return None
