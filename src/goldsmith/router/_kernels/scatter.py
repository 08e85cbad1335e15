"""The backward of product_topk: scatters a row's k gradients to both axes and writes every other element as well.

One program handles one row. It adds entries of the same position in registers, fills the row (with zero, or with the
logsumexp's share), and stores the sums over it. No atomics, and no buffer that must be zero beforehand.
Bytes per row: the gradients of both axes once, 12 per selected pair; the logits again with log_softmax.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...core._kernels.arithmetic import exp
from .warp_selection import share


@triton.jit
def part(logit, lse, NARROW: tl.constexpr):
    """exp(logit - lse); a 16-bit gradient does not show the |logit - lse| ulp that the fast exp costs."""
    x = logit.to(tl.float32) - lse
    return share(x) if NARROW else exp(x)


@triton.jit
def entries(grad_ptr, scores_ptr, indices_ptr, j, dot, K, WEIGHTS: tl.constexpr):
    """(ds_j of the raw sums, indices, mask of valid ones); dot: sum_j grad_j w_j, for softmax."""
    index = tl.load(indices_ptr + j, mask=j < K, other=-1)
    live = index >= 0  # before any division: Triton's truncates, -1 // SY is 0
    ds = tl.load(grad_ptr + j, mask=live, other=0.0).to(tl.float32)
    if WEIGHTS != "none":
        w = tl.load(scores_ptr + j, mask=live, other=0.0)
        ds = w * (ds - dot) if WEIGHTS == "softmax" else ds * w
    return tl.where(live, ds, 0.0), tl.where(live, index, 0), live


@triton.jit
def spread(
    grad_ptr, scores_ptr, indices_ptr, dot, total, logits, lse_ptr, out, size, SY, K,
    K_P: tl.constexpr, BLOCK: tl.constexpr, LSE: tl.constexpr, WEIGHTS: tl.constexpr,
    OF_X: tl.constexpr,
):  # fmt: skip
    """One axis: out[at_j] = the sum of all ds at that position; with LSE, minus softmax * total everywhere."""
    NARROW: tl.constexpr = out.dtype.element_ty.primitive_bitwidth == 16
    STEP: tl.constexpr = min(K_P, 32)  # larger steps do not fit in registers
    _all, at, live = entries(grad_ptr, scores_ptr, indices_ptr, tl.arange(0, K_P), dot, K, WEIGHTS)
    at = at // SY if OF_X else at % SY
    sums = tl.zeros((K_P,), tl.float32)
    for start in range(0, K_P, STEP):
        ds, place, _some = entries(grad_ptr, scores_ptr, indices_ptr, start + tl.arange(0, STEP), dot, K, WEIGHTS)
        place = place // SY if OF_X else place % SY
        # masked entries add 0; lanes are along axis 1, so that a sum over axis 0 needs no shuffle
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
    tl.debug_barrier()  # the sums must overwrite the fill of other lanes
    tl.store(out + at, sums, mask=live)


@triton.jit(do_not_specialize=["K"])
def gradient_kernel(
    grad_ptr, scores_ptr, indices_ptr, x_ptr, y_ptr, lse_ptr, dx_ptr, dy_ptr, stride_x, stride_y, SX, SY, K,
    K_P: tl.constexpr, BLOCK: tl.constexpr, LSE: tl.constexpr, WEIGHTS: tl.constexpr,
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
