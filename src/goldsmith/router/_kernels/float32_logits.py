"""float32 logits for product_topk with one warp per row: read from memory for each comparison, mostly from L1."""

from __future__ import annotations

import triton
import triton.language as tl

from .lane_sorts import LANES
from .packed_logits import bit_reversed
from .sorting_networks import INTERPRET
from .warp_selection import columns, share


@triton.jit
def tile_of(row, at, size, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    place = at + (tl.arange(0, LANES) * WIDTH)[:, None] + tl.arange(0, WIDTH)[None, :]
    if EVEN:
        v = tl.load(row + place)
    else:
        v = tl.load(row + place, mask=place < size, other=float("-inf"))
    return v.to(tl.float32), place


@triton.jit
def greatest(row, size, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    """The largest float32 logit of each lane's share."""
    best = tl.full((LANES,), float("-inf"), tl.float32)
    for at in range(0, size, LANES * WIDTH):
        v, _ = tile_of(row, at, size, WIDTH, EVEN)
        parts = columns(v, WIDTH)
        for i in tl.static_range(WIDTH):
            best = tl.maximum(best, parts[i], propagate_nan=tl.PropagateNan.ALL)
    return best


@triton.jit
def marks_of(v, limit, WIDTH: tl.constexpr, MASK: tl.constexpr):
    """WIDTH marks per lane: the float32 values that are not below `limit`, which is not NaN."""
    if INTERPRET:
        bit = tl.expand_dims(tl.full((WIDTH,), 1, tl.int32) << tl.arange(0, WIDTH), 0)
        marks = tl.sum(tl.where(v < limit[:, None], 0, bit), axis=1)
    else:  # shifts in the sign of v - limit
        below = tl.zeros((LANES,), tl.int32)
        parts = columns(v, WIDTH)
        for i in tl.static_range(WIDTH):
            below = tl.inline_asm_elementwise(
                "{ .reg .f32 d; .reg .b32 e; sub.rn.f32 d, $2, $3; mov.b32 e, d; shf.l.wrap.b32 $0, e, $1, 1; }",
                "=r,r,f,f", [below, parts[bit_reversed(WIDTH - 1 - i, WIDTH)], limit], tl.int32, True, 1,
            )  # fmt: skip
        marks = below ^ ((1 << WIDTH) - 1)
    return marks.to(MASK)


@triton.jit
def marked_wide(row, size, limit, top, WIDTH: tl.constexpr, EVEN: tl.constexpr, MASK: tl.constexpr, LSE: tl.constexpr):
    """(marks of each lane's logits that are not below the limit, with LSE its sum of exp(logit - top))."""
    mask = tl.zeros((LANES,), MASK)
    total = tl.zeros((LANES,), tl.float32)
    for at in range(0, size, LANES * WIDTH):
        v, _ = tile_of(row, at, size, WIDTH, EVEN)
        mask |= marks_of(v, limit, WIDTH, MASK) << (at // LANES)
        if LSE:
            total += tl.sum(share(v - top), axis=1)
    return mask, total
