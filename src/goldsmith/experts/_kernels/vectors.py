"""Experts of an arena of blocks on a GPU, for decoding: few rows, at the speed of the GPU's memory.

P rows of a call, sorted by expert; a tile has up to ROWS rows of one expert. I inner, H hidden.
Grids: (panels of outputs, tiles). A program reads its panels in memory order, 16 bytes per thread with AHEAD loads in
flight. Words and inputs are multiplied in registers, and partial sums are added once, at the end. So the order of a
row's sum does not depend on the number of rows, tiles or multiprocessors.
"""

from __future__ import annotations

from functools import lru_cache

import torch
import triton
import triton.language as tl
from torch import Tensor

from .._conventions import ACTIVATIONS
from ..packed.experts import PackedExperts
from ..packed.layout import Layout
from .activation import activated
from .codes import constants, scale_of, weight, zero_of
from .launch import Launch

HIDDEN_WARPS, DOWN_WARPS = 8, 4  # a panel of down is short, so more of its programs run on a multiprocessor


@triton.jit
def _parts(words, inputs, panel_ptr, word, n, inside, ROWS: tl.constexpr, PER: tl.constexpr, FORMAT: tl.constexpr,
           SCALE: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """ROWS blocks [BW, 16]: each word times its inputs, per row. inputs: x of row m and position j at m PER + j"""
    zero = 0.0
    if SCALE != 0:
        group = (word * PER // GROUP)[:, None]
        scale = scale_of(panel_ptr, group, n[None, :], inside, SCALES, FORMAT, SCALE)
        if FORMAT == 4:
            zero = zero_of(panel_ptr, group, n[None, :], inside, ZEROS)
    sums = ()
    for _ in tl.static_range(ROWS):
        sums = sums + (tl.zeros(words.shape, tl.float32),)
    for j in tl.static_range(PER):
        value = weight(words, zero, j, FORMAT)
        more = ()
        for m in tl.static_range(ROWS):
            more = more + (sums[m] + value * inputs[m * PER + j][:, None],)
        sums = more
    if SCALE != 0:
        more = ()
        for m in tl.static_range(ROWS):
            more = more + (sums[m] * scale,)
        sums = more
    return sums


@triton.jit
def _products(rows, K, panel_ptr, OTHER, MATRICES: tl.constexpr, ROWS: tl.constexpr, BW: tl.constexpr,
              AHEAD: tl.constexpr, EVEN: tl.constexpr, PER: tl.constexpr, FORMAT: tl.constexpr, SCALE: tl.constexpr,
              GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """MATRICES * ROWS blocks [16]: the panels at panel_ptr, and OTHER bytes after it, times each row

    rows: a pointer to the K inputs of each row.
    """
    at, n = tl.arange(0, BW), tl.arange(0, 16)
    total = ()
    for _ in tl.static_range(MATRICES * ROWS):
        total = total + (tl.zeros((BW, 16), tl.float32),)
    for step in range(tl.cdiv(K, PER * BW * AHEAD)):
        loaded = ()
        for i in tl.static_range(AHEAD):
            word = (step * AHEAD + i) * BW + at
            for matrix in tl.static_range(MATRICES):
                spot = (panel_ptr + matrix * OTHER).to(tl.pointer_type(tl.int32)) + word[:, None] * 16 + n[None, :]
                if EVEN:
                    loaded = loaded + (tl.load(spot),)
                else:
                    loaded = loaded + (tl.load(spot, word[:, None] * PER < K, 0),)
        for i in tl.static_range(AHEAD):
            word = (step * AHEAD + i) * BW + at
            inputs = ()
            for m in tl.static_range(ROWS):
                for j in tl.static_range(PER):
                    k = word * PER + j
                    if EVEN:
                        inputs = inputs + (tl.load(rows[m] + k).to(tl.float32),)
                    else:
                        inputs = inputs + (tl.load(rows[m] + k, k < K, 0.0).to(tl.float32),)
            more = ()
            for matrix in tl.static_range(MATRICES):
                parts = _parts(loaded[i * MATRICES + matrix], inputs, panel_ptr + matrix * OTHER, word, n,
                               word[:, None] * PER < K, ROWS, PER, FORMAT, SCALE, GROUP, SCALES, ZEROS)  # fmt: skip
                for m in tl.static_range(ROWS):
                    more = more + (total[matrix * ROWS + m] + parts[m],)
            total = more
    sums = ()
    for m in tl.static_range(MATRICES * ROWS):
        sums = sums + (tl.sum(total[m], 0),)
    return sums


_FREE = [
    "x_ptr",
    "tokens_ptr",
    "tiles_ptr",
    "bias_ptr",
    "extra_ptr",
    "h_ptr",
    "y_ptr",
]  # pointers with varying alignment


@triton.jit(do_not_specialize=["stride_x", "TILES"], do_not_specialize_on_alignment=_FREE)
def hidden_kernel(x_ptr, tokens_ptr, tiles_ptr, blob_ptr, bias_ptr, extra_ptr, h_ptr, stride_x, TILES, stride_bias,
                  H, I, STRIDE, UP, PANEL, alpha, limit, ROWS: tl.constexpr, BW: tl.constexpr, AHEAD: tl.constexpr,
                  EVEN: tl.constexpr, PER: tl.constexpr, FORMAT: tl.constexpr, SCALE: tl.constexpr,
                  GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr,
                  EXTRA: tl.constexpr, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr,
                  ROUND: tl.constexpr):  # fmt: skip
    """h[p] = act(Wg x + bg + eg, Wu x + bu + eu) for the rows of a tile; EXTRA: extra [P, 2 I] holds eg and eu"""
    panel, tile = tl.program_id(0), tl.program_id(1)
    block = tl.load(tiles_ptr + tile).to(tl.int64)
    first, count = tl.load(tiles_ptr + TILES + tile).to(tl.int64), tl.load(tiles_ptr + 2 * TILES + tile)
    rows = ()
    for m in tl.static_range(ROWS):
        token = tl.load(tokens_ptr + first + tl.minimum(m, count - 1)).to(tl.int64)
        rows = rows + (x_ptr + token * stride_x,)
    gate = blob_ptr + block * STRIDE + panel.to(tl.int64) * PANEL
    both = _products(rows, H, gate, UP, 2, ROWS, BW, AHEAD, EVEN, PER, FORMAT, SCALE, GROUP, SCALES, ZEROS)
    out = panel * 16 + tl.arange(0, 16)
    inside = out < I
    for m in tl.static_range(ROWS):
        g, u = both[m], both[ROWS + m]
        if BIAS:
            g += tl.load(bias_ptr + block * stride_bias + out, inside, 0.0).to(tl.float32)
            u += tl.load(bias_ptr + block * stride_bias + I + out, inside, 0.0).to(tl.float32)
        if EXTRA:
            more = extra_ptr + (first + tl.minimum(m, count - 1)) * (2 * I) + out
            g += tl.load(more, inside, 0.0)
            u += tl.load(more + I, inside, 0.0)
        if ROUND:
            g, u = g.to(tl.bfloat16).to(tl.float32), u.to(tl.bfloat16).to(tl.float32)
        h = activated(g, u, alpha, limit, ACTIVATION, LIMITED)
        tl.store(h_ptr + (first + m) * I + out, h.to(h_ptr.dtype.element_ty), inside & (m < count))


@triton.jit(do_not_specialize=["TILES"], do_not_specialize_on_alignment=_FREE)
def down_kernel(h_ptr, tiles_ptr, blob_ptr, bias_ptr, y_ptr, TILES, stride_bias, H, I, STRIDE, DOWN, PANEL,
                ROWS: tl.constexpr, BW: tl.constexpr, AHEAD: tl.constexpr, EVEN: tl.constexpr, PER: tl.constexpr,
                FORMAT: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr,
                ZEROS: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """y[p] = Wd h[p] + bd for the rows of a tile, in float32"""
    panel, tile = tl.program_id(0), tl.program_id(1)
    block = tl.load(tiles_ptr + tile).to(tl.int64)
    first, count = tl.load(tiles_ptr + TILES + tile).to(tl.int64), tl.load(tiles_ptr + 2 * TILES + tile)
    rows = ()
    for m in tl.static_range(ROWS):
        rows = rows + (h_ptr + (first + tl.minimum(m, count - 1)) * I,)
    down = blob_ptr + block * STRIDE + DOWN + panel.to(tl.int64) * PANEL
    products = _products(rows, I, down, 0, 1, ROWS, BW, AHEAD, EVEN, PER, FORMAT, SCALE, GROUP, SCALES, ZEROS)
    out = panel * 16 + tl.arange(0, 16)
    inside = out < H
    for m in tl.static_range(ROWS):
        y = products[m]
        if BIAS:
            y += tl.load(bias_ptr + block * stride_bias + out, inside, 0.0).to(tl.float32)
        tl.store(y_ptr + (first + m) * H + out, y, inside & (m < count))


def forward(
    x: Tensor, tokens: Tensor, tiles: Tensor, base: PackedExperts, extra: Tensor | None, h: Tensor, y: Tensor,
    rows: int, *, activation: str, alpha: float, limit: float | None, compile_only: bool = False,
) -> None:  # fmt: skip
    """Like panels.panels_forward, with tiles of at most `rows` rows; `extra` [P, 2 I] is added to g and u

    compile_only: no kernel runs, and no number is read or written.
    """
    layout, device, count = base.layout, x.device, tiles.shape[1]
    blob, first, last = base.gate_up, base.gate_up_bias, base.down_bias
    strides = (0 if first is None else first.stride(0), 0 if last is None else last.stride(0))
    more = extra is not None
    hidden, down = _launches(layout.text, x.dtype, rows, strides, activation, alpha, limit, more, device)
    added = h if extra is None else extra
    arguments = (tokens, tiles, blob, blob if first is None else first, added, h, x.stride(0), count)
    run = Launch.prepare if compile_only else Launch.__call__
    run(hidden, (-(-layout.intermediate_size // 16), count, 1), device, x, *arguments)
    whole = (-(-layout.hidden_size // 16), count, 1)
    run(down, whole, device, h, tiles, blob, blob if last is None else last, y, count)


@lru_cache(maxsize=256)
def _launches(
    text: str, dtype: torch.dtype, rows: int, strides: tuple[int, int], activation: str, alpha: float,
    limit: float | None, more: bool, device: torch.device,
) -> tuple[Launch, Launch]:  # fmt: skip
    """The launches of both kernels for a layout; one pair per device, because compiled kernels belong to a device."""
    layout = Layout.parse(text)
    H, I = layout.hidden_size, layout.intermediate_size
    wide, narrow = constants(layout, "gate_up"), constants(layout, "down")
    up = layout.matrices("gate_up")[0].parts[1]
    sizes = (strides[0], H, I, layout.block_bytes, up, wide.panel, float(alpha), 0.0 if limit is None else float(limit))
    words = -(-H // layout.kind.per_word)
    hidden = (
        *sizes, rows, *_steps(words, H, layout, HIDDEN_WARPS), *wide.of_format, strides[0] > 0, more,
        ACTIVATIONS.index(activation), limit is not None, dtype == torch.bfloat16,
    )  # fmt: skip
    words = -(-I // layout.kind.per_word)
    down = (
        strides[1], H, I, layout.block_bytes, narrow.at, narrow.panel, rows, *_steps(words, I, layout, DOWN_WARPS),
        *narrow.of_format, strides[1] > 0,
    )  # fmt: skip
    return Launch(hidden_kernel, hidden, HIDDEN_WARPS), Launch(down_kernel, down, DOWN_WARPS)


def _steps(words: int, inputs: int, layout: Layout, warps: int) -> tuple[int, int, bool]:
    """(BW, AHEAD, EVEN): words per step (16 bytes per thread), steps loaded together, and whether they fit exactly."""
    width = 8 * warps
    steps = -(-words // width)
    ahead = next((d for d in (4, 3, 2) if steps % d == 0), min(steps, 4))
    return width, ahead, inputs % (layout.kind.per_word * width * ahead) == 0
