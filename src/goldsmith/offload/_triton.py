"""The merge on a GPU: one launch, which also says whether a sum is not finite."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _merge_kernel(rows_ptr, place_ptr, w_ptr, out_ptr, dirty_ptr, H, K, BLOCK: tl.constexpr):
    """out[t] = sum over j, in order, of w[t, j] rows[place[t, j]]; place -1 is skipped, its weight is not read"""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = column < H
    total = tl.zeros((BLOCK,), tl.float32)
    for j in range(K):
        place = tl.load(place_ptr + token * K + j).to(tl.int64)
        if place >= 0:
            w = tl.load(w_ptr + token * K + j)
            total += w * tl.load(rows_ptr + place * H + column, inside, 0.0)
    out = total.to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + token * H + column, out, inside)
    wide = out.to(tl.float32)
    wrong = tl.sum(tl.where(inside & (wide - wide != 0), 1, 0))
    if wrong > 0:
        tl.store(dirty_ptr, 1)


def merge(rows: Tensor, place: Tensor, weights: Tensor, dtype: torch.dtype, dirty: Tensor) -> Tensor:
    """out [T, H] in `dtype` of rows [*, H] float32, place int32 and weights float32 [T, k]

    dirty: int32 [1], also in pinned memory of the host; it becomes 1 where a sum is not finite and is never set to 0.
    """
    T, k = weights.shape
    hidden = rows.shape[1]
    out = torch.empty(T, hidden, dtype=dtype, device=rows.device)
    if T:
        block = min(1024, triton.next_power_of_2(hidden))
        _merge_kernel[(T, triton.cdiv(hidden, block))](rows, place, weights, out, dirty, hidden, k, BLOCK=block)
    return out
