"""The merge on a GPU: one launch, which also says whether a sum is not finite."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from ..experts._kernels.launch import Launch

_POINTERS = ["rows_ptr", "place_ptr", "w_ptr", "out_ptr", "dirty_ptr"]
_WARPS = 4


@triton.jit(do_not_specialize_on_alignment=_POINTERS)
def _merge_kernel(rows_ptr, place_ptr, w_ptr, out_ptr, dirty_ptr, H, K: tl.constexpr, BLOCK: tl.constexpr):
    """out[t] = sum over j, in order, of w[t, j] rows[place[t, j]]; place -1 is skipped, its weight is not read"""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(K):  # all rows are on their way at once: a skipped one is 0, which changes no sum
        place = tl.load(place_ptr + token * K + j).to(tl.int64)
        w = tl.load(w_ptr + token * K + j, place >= 0, 0.0).to(tl.float32)
        total += w * tl.load(rows_ptr + place * H + column, inside & (place >= 0), 0.0)
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * H + column, out, inside)
    wide = out.to(tl.float32)
    wrong = tl.sum(tl.where(inside & (wide - wide != 0), 1, 0))
    if wrong > 0:
        tl.store(dirty_ptr, 1)


def merger(
    rows: Tensor, place: Tensor, weights: Tensor, dtype: torch.dtype, dirty: Tensor
) -> tuple[Tensor, Callable[[], None]]:
    """out [T, H] in `dtype` of rows [*, H] float32, place int32 of T k numbers and weights [T, k]; it is filled when
    what comes with it is called

    dirty: int32 [1], also in pinned memory of the host; it becomes 1 where a sum is not finite and is never set to 0.
    """
    T, k = weights.shape
    hidden = rows.shape[1]
    out = torch.empty(T, hidden, dtype=dtype, device=rows.device)
    launch, blocks = _launch(hidden, k, dtype, weights.dtype, rows.device)

    def merge() -> None:
        if T:
            launch((T, blocks, 1), rows.device, rows, place, weights, out, dirty)

    return out, merge


@lru_cache(maxsize=64)
def _launch(
    hidden: int, k: int, dtype: torch.dtype, of_weights: torch.dtype, device: torch.device
) -> tuple[Launch, int]:
    """The kernel, and its programs of a row; what dtypes and a device compile stays theirs."""
    block = min(512, triton.next_power_of_2(hidden))
    return Launch(_merge_kernel, (hidden, k, block), _WARPS), -(-hidden // block)
