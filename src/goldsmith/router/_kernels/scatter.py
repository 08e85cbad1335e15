"""The backward of product_topk: a row's few gradients to their places, every other place written too.

One program has one row: entries that meet in a place are added in registers, the row is filled (with zero, or with the
share of the logsumexp), and the sums are stored over it. No atomics, no buffer that must be zero.
Bytes a row: the gradients of both axes once, 12 a selected pair; the logits again for the logsumexp.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core._kernels.arithmetic import exp
from .warp_selection import share


@triton.jit
def part(logit, lse, NARROW: tl.constexpr):
    """exp(logit - lse); a gradient of 16 bits shows none of the |logit - lse| units that the quick way costs."""
    x = logit.to(tl.float32) - lse
    return share(x) if NARROW else exp(x)


@triton.jit
def entries(grad_ptr, scores_ptr, indices_ptr, j, dot, K: tl.constexpr, WEIGHTS: tl.constexpr):
    """(ds_j of the raw sums, indices, which are not masked); dot: sum_j grad_j w_j, for softmax."""
    index = tl.load(indices_ptr + j, mask=j < K, other=-1)
    live = index >= 0  # before any division: Triton's truncates, -1 // SY is 0
    ds = tl.load(grad_ptr + j, mask=live, other=0.0).to(tl.float32)
    if WEIGHTS != "none":
        w = tl.load(scores_ptr + j, mask=live, other=0.0)
        ds = w * (ds - dot) if WEIGHTS == "softmax" else ds * w
    return tl.where(live, ds, 0.0), tl.where(live, index, 0), live


@triton.jit
def spread(
    grad_ptr, scores_ptr, indices_ptr, dot, total, logits, lse_ptr, out, size, SY,
    K: tl.constexpr, K_P: tl.constexpr, BLOCK: tl.constexpr, LSE: tl.constexpr, WEIGHTS: tl.constexpr,
    OF_X: tl.constexpr,
):  # fmt: skip
    """One axis: out[at_j] = the sum of all ds at that place, - softmax * total everywhere with LSE."""
    NARROW: tl.constexpr = out.dtype.element_ty.primitive_bitwidth == 16
    STEP: tl.constexpr = min(K_P, 32)  # more at a time are more than the registers hold
    _all, at, live = entries(grad_ptr, scores_ptr, indices_ptr, tl.arange(0, K_P), dot, K, WEIGHTS)
    at = at // SY if OF_X else at % SY
    sums = tl.zeros((K_P,), tl.float32)
    for start in range(0, K, STEP):
        ds, place, _some = entries(grad_ptr, scores_ptr, indices_ptr, start + tl.arange(0, STEP), dot, K, WEIGHTS)
        place = place // SY if OF_X else place % SY
        # what is masked adds 0; lanes lie along axis 1, so that a sum over axis 0 needs no shuffle
        sums += tl.sum(tl.where(place[:, None] == at[None, :], tl.broadcast_to(ds[:, None], (STEP, K_P)), 0.0), axis=0)
    lse = 0.0
    if LSE:
        lse = tl.load(lse_ptr)
        lse = tl.where(lse == float("-inf"), 0.0, lse)
        sums -= part(tl.load(logits + at, mask=live, other=0.0), lse, NARROW) * total
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        d = tl.zeros((BLOCK,), tl.float32)
        if LSE:
            d -= part(tl.load(logits + place, mask=place < size, other=0.0), lse, NARROW) * total
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
    grad_ptr, scores_ptr, indices_ptr = grad_ptr + t * K, scores_ptr + t * K, indices_ptr + t * K
    j = tl.arange(0, K_P)
    dot = 0.0
    if WEIGHTS == "softmax":
        ds, _, _ = entries(grad_ptr, scores_ptr, indices_ptr, j, 0.0, K, "exp")
        dot = tl.sum(ds, axis=0)
    ds, _, _ = entries(grad_ptr, scores_ptr, indices_ptr, j, dot, K, WEIGHTS)
    total = tl.sum(ds, axis=0)
    if NEEDS_X:
        spread(
            grad_ptr, scores_ptr, indices_ptr, dot, total, x_ptr + t * stride_x, lse_ptr + 2 * t, dx_ptr + t * SX, SX,
            SY, K, K_P, BLOCK, LSE, WEIGHTS, True,
        )  # fmt: skip
    if NEEDS_Y:
        spread(
            grad_ptr, scores_ptr, indices_ptr, dot, total, y_ptr + t * stride_y, lse_ptr + 2 * t + 1, dy_ptr + t * SY,
            SY, SY, K, K_P, BLOCK, LSE, WEIGHTS, False,
        )  # fmt: skip
