"""The backward of product_topk: a row's few gradients to their places, every other place written too.

One program has one row: entries that meet in a place are added in registers, the row is filled (with zero, or with the
share of the logsumexp), and the sums are stored over it. No atomics, no buffer that must be zero.
Bytes a row: the gradients of both axes once, 12 a selected pair; the logits again for the logsumexp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core._kernels.arithmetic import exp


@triton.jit
def spread(
    ds, at, live, total, logits, lse_ptr, out, size, BLOCK: tl.constexpr, LSE: tl.constexpr
):  # fmt: skip
    """One axis: out[at_j] = the sum of all ds at that place, - softmax * total everywhere with LSE."""
    meet = (at[:, None] == at[None, :]) & live[None, :]
    sums = tl.sum(tl.where(meet, tl.broadcast_to(ds[None, :], meet.shape), 0.0), axis=1)
    lse = 0.0
    if LSE:
        lse = tl.load(lse_ptr)
        lse = tl.where(lse == float("-inf"), 0.0, lse)
        sums -= exp(tl.load(logits + at, mask=live, other=0.0).to(tl.float32) - lse) * total
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        d = tl.zeros((BLOCK,), tl.float32)
        if LSE:
            v = tl.load(logits + place, mask=place < size, other=0.0).to(tl.float32)
            d -= exp(v - lse) * total
        tl.store(out + place, d, mask=place < size)
    tl.debug_barrier()  # the sums come after what other lanes fill in
    tl.store(out + at, sums, mask=live)


@triton.jit
def gradient_kernel(
    grad_ptr, scores_ptr, indices_ptr, x_ptr, y_ptr, lse_ptr, dx_ptr, dy_ptr, stride_x, stride_y, SX, SY,
    K: tl.constexpr, K_P: tl.constexpr, BLOCK: tl.constexpr, LSE: tl.constexpr, WEIGHTS: tl.constexpr,
    NEEDS_X: tl.constexpr, NEEDS_Y: tl.constexpr,
):  # fmt: skip
    t = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, K_P)
    index = tl.load(indices_ptr + t * K + j, mask=j < K, other=-1)
    live = index >= 0  # before any division: Triton's truncates, -1 // SY is 0
    index = tl.where(live, index, 0)
    ds = tl.load(grad_ptr + t * K + j, mask=live, other=0.0).to(tl.float32)
    if WEIGHTS != "none":
        w = tl.load(scores_ptr + t * K + j, mask=live, other=0.0)
        ds = w * (ds - tl.sum(ds * w, axis=0)) if WEIGHTS == "softmax" else ds * w
    ds = tl.where(live, ds, 0.0)
    total = tl.sum(ds, axis=0)
    if NEEDS_X:
        spread(ds, index // SY, live, total, x_ptr + t * stride_x, lse_ptr + 2 * t, dx_ptr + t * SX, SX, BLOCK, LSE)
    if NEEDS_Y:
        spread(ds, index % SY, live, total, y_ptr + t * stride_y, lse_ptr + 2 * t + 1, dy_ptr + t * SY, SY, BLOCK, LSE)
