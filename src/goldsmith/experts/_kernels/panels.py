"""Experts of an arena of blocks on a GPU, for prompts: each tile of rows reads the packed weights in place.

P rows of a call, sorted by expert; a tile has up to BM rows of one expert. I inner, H hidden.
Grids: (tiles, blocks of outputs). Sums are in float32; products of bfloat16 numbers are exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from ...core.device import triton_interpreted
from .._conventions import ACTIVATIONS
from ..packed.experts import PackedExperts
from ..packed.layout import Layout
from . import vectors
from .activation import activated
from .codes import constants, scale_of, spread, zero_of
from .low_rank import PanelFactors

_NAMES = ("PER", "FORMAT", "SCALE", "GROUP", "SCALES", "ZEROS")


@triton.jit
def _times(x_ptr, x_rows, x_good, K, panel_ptr, PANEL, out, N, BM: tl.constexpr, BN: tl.constexpr, KC: tl.constexpr,
           PARTS: tl.constexpr, OPERAND: tl.constexpr, PER: tl.constexpr, FORMAT: tl.constexpr, SCALE: tl.constexpr,
           GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr):  # fmt: skip
    """[BM, BN]: rows of x times rows `out` of the panels at panel_ptr, which have PANEL bytes each

    Takes KC inputs per step. PARTS: these share a scale, so codes are multiplied in the dtype OPERAND and the sum is
    scaled. The padding of the last panel beyond row N is read as well.
    """
    WORDS: tl.constexpr = KC // PER
    n, there = out % 16, out // 16 < tl.cdiv(N, 16)
    panel_ptr += (out // 16).to(tl.int64) * PANEL
    first = panel_ptr.to(tl.pointer_type(tl.int32))
    total = tl.zeros((BM, BN), tl.float32)
    for step in range(tl.cdiv(K, KC)):
        word, k = step * WORDS + tl.arange(0, WORDS), step * KC + tl.arange(0, KC)
        inside = (word[:, None] * PER < K) & there[None, :]
        words = tl.load(first[None, :] + (word[:, None] * 16 + n[None, :]), inside, 0)
        x = tl.load(x_ptr + x_rows[:, None] + k[None, :], x_good[:, None] & (k[None, :] < K), 0.0)
        zero = 0.0
        if PARTS:
            group = step * KC // GROUP
            if FORMAT == 4:
                zero = zero_of(panel_ptr, group, n, there, ZEROS)[None, None, :]
            w = tl.reshape(spread(words, zero, WORDS, BN, PER, FORMAT), (KC, BN)).to(OPERAND)
            if SCALE == 0:
                total = tl.dot(x.to(OPERAND), w, total, input_precision="tf32")
            else:
                scale = scale_of(panel_ptr, group, n, there, SCALES, FORMAT, SCALE)
                total += tl.dot(x.to(OPERAND), w, input_precision="tf32") * scale[None, :]
        else:
            if FORMAT == 4:
                group = (word * PER // GROUP)[:, None]
                zero = zero_of(panel_ptr[None, :], group, n[None, :], inside, ZEROS)[:, None, :]
            codes = spread(words, zero, WORDS, BN, PER, FORMAT)
            if SCALE != 0:
                group = (word * PER // GROUP)[:, None]
                scale = scale_of(panel_ptr[None, :], group, n[None, :], inside, SCALES, FORMAT, SCALE)
                codes *= scale[:, None, :]
            w = tl.where(k[:, None] < K, tl.reshape(codes, (KC, BN)), 0.0)
            total = tl.dot(x.to(tl.float32), w, total, input_precision="ieee")
    return total


# A prompt's number of tiles and the place of its lists differ from layer to layer: each would compile anew, for a
# second, in the middle of a text.
_FREE = ["tokens_ptr", "tiles_ptr"]


@triton.jit(do_not_specialize=["TILES"], do_not_specialize_on_alignment=_FREE)
def _hidden_kernel(x_ptr, tokens_ptr, tiles_ptr, blob_ptr, bias_ptr, extra_ptr, h_ptr, stride_x, stride_bias, TILES,
                   H, I, STRIDE, UP, PANEL, alpha, limit, BM: tl.constexpr, BN: tl.constexpr, KC: tl.constexpr,
                   PARTS: tl.constexpr, OPERAND: tl.constexpr, PER: tl.constexpr, FORMAT: tl.constexpr,
                   SCALE: tl.constexpr, GROUP: tl.constexpr, SCALES: tl.constexpr, ZEROS: tl.constexpr,
                   BIAS: tl.constexpr, EXTRA: tl.constexpr, ACTIVATION: tl.constexpr, LIMITED: tl.constexpr,
                   ROUND: tl.constexpr):  # fmt: skip
    """h[p] = act(Wg x + bg + eg, Wu x + bu + eu) for the rows of a tile; EXTRA: extra [P, 2 I] holds eg and eu"""
    tile = tl.program_id(0)
    block = tl.load(tiles_ptr + tile).to(tl.int64)
    first, count = tl.load(tiles_ptr + TILES + tile), tl.load(tiles_ptr + 2 * TILES + tile)
    row = tl.arange(0, BM)
    good = row < count
    rows = tl.load(tokens_ptr + first + row, good, 0).to(tl.int64) * stride_x
    out = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = out < I
    gate = blob_ptr + block * STRIDE
    g = _times(x_ptr, rows, good, H, gate, PANEL, out, I, BM, BN, KC, PARTS, OPERAND, PER, FORMAT, SCALE, GROUP, SCALES,
               ZEROS)  # fmt: skip
    u = _times(x_ptr, rows, good, H, gate + UP, PANEL, out, I, BM, BN, KC, PARTS, OPERAND, PER, FORMAT, SCALE, GROUP,
               SCALES, ZEROS)  # fmt: skip
    if BIAS:
        g += tl.load(bias_ptr + block * stride_bias + out, inside, 0.0)[None, :].to(tl.float32)
        u += tl.load(bias_ptr + block * stride_bias + I + out, inside, 0.0)[None, :].to(tl.float32)
    if EXTRA:
        more = extra_ptr + (first + row).to(tl.int64)[:, None] * (2 * I) + out[None, :]
        g += tl.load(more, good[:, None] & inside[None, :], 0.0)
        u += tl.load(more + I, good[:, None] & inside[None, :], 0.0)
    if ROUND:
        g, u = g.to(tl.bfloat16).to(tl.float32), u.to(tl.bfloat16).to(tl.float32)
    h = activated(g, u, alpha, limit, ACTIVATION, LIMITED)
    spot = h_ptr + (first + row).to(tl.int64)[:, None] * I + out[None, :]
    tl.store(spot, h.to(h_ptr.dtype.element_ty), good[:, None] & inside[None, :])


@triton.jit(do_not_specialize=["TILES"], do_not_specialize_on_alignment=_FREE)
def _down_kernel(h_ptr, tiles_ptr, blob_ptr, bias_ptr, y_ptr, stride_bias, TILES, H, I, STRIDE, DOWN, PANEL,
                 BM: tl.constexpr, BN: tl.constexpr, KC: tl.constexpr, PARTS: tl.constexpr, OPERAND: tl.constexpr,
                 PER: tl.constexpr, FORMAT: tl.constexpr, SCALE: tl.constexpr, GROUP: tl.constexpr,
                 SCALES: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr):  # fmt: skip
    """y[p] = Wd h[p] + bd for the rows of a tile, in float32"""
    tile = tl.program_id(0)
    block = tl.load(tiles_ptr + tile).to(tl.int64)
    first, count = tl.load(tiles_ptr + TILES + tile), tl.load(tiles_ptr + 2 * TILES + tile)
    row = tl.arange(0, BM)
    good = row < count
    out = tl.program_id(1) * BN + tl.arange(0, BN)
    inside = out < H
    down = blob_ptr + block * STRIDE + DOWN
    rows = (first + row).to(tl.int64)
    y = _times(h_ptr, rows * I, good, I, down, PANEL, out, H, BM, BN, KC, PARTS, OPERAND, PER, FORMAT, SCALE, GROUP,
               SCALES, ZEROS)  # fmt: skip
    if BIAS:
        y += tl.load(bias_ptr + block * stride_bias + out, inside, 0.0)[None, :].to(tl.float32)
    tl.store(y_ptr + rows[:, None] * H + out[None, :], y, good[:, None] & inside[None, :])


@dataclass(frozen=True)
class Config:
    """A launch configuration. rows: most rows of a tile; outputs: outputs of a program; why: the reason for it."""

    rows: int
    outputs: int
    why: str


FEW = 16  # up to this many rows of an expert are multiplied as vectors, in tiles of at most 4 rows
_SHORT, _LONG = (Config(rows, 64, f"prompt: each decoded word serves {rows} rows") for rows in (64, 128))
_WARPS = 4
_DECODE = {rows: Config(rows, 16, "decode: memory-bound, words are multiplied as they arrive") for rows in (1, 2, 4)}


def pick(most: int) -> Config:
    """The configuration for a call; `most` is the largest number of tokens of any expert."""
    if most > FEW:
        return _LONG if most > _SHORT.rows else _SHORT
    return _DECODE[1 if most <= 1 else 2 if most == 2 else 4]


def panels_forward(
    x: Tensor, tokens: Tensor, tiles: Tensor, base: PackedExperts, h: Tensor, y: Tensor, config: Config, *,
    activation: str, alpha: float, limit: float | None, lora: PanelFactors | None = None,
) -> None:  # fmt: skip
    """y[p] = the output of sorted row p's expert for x[tokens[p]]

    x [T, H] with contiguous rows, float32, bfloat16 or float16; tokens int32 [P]; tiles int32 [3, n]: expert of the
    base, first row, rows (at most config.rows) of each tile. base: in blocks. Writes the rows of the tiles in h [P, I],
    which is bfloat16 if x is, else float32, and in y [P, H] float32. lora: is added; tiles then has a fourth row, the
    number of the expert among the factors.
    """
    options = {"activation": activation, "alpha": alpha, "limit": limit}
    if not tiles.shape[1]:
        return
    extra = None if lora is None else lora.extra_of(x, tokens, tiles, config.rows)
    if config in (_SHORT, _LONG):
        _prompt(x, tokens, tiles, base, extra, h, y, config, **options)
    else:
        vectors.forward(x, tokens, tiles, base, extra, h, y, config.rows, **options)
    if lora is not None:
        lora.add_to(h, tiles, y, base.layout.intermediate_size, config.rows)


def _prompt(
    x: Tensor, tokens: Tensor, tiles: Tensor, base: PackedExperts, extra: Tensor | None, h: Tensor, y: Tensor,
    config: Config, *, activation: str, alpha: float, limit: float | None,
) -> None:  # fmt: skip
    layout = base.layout
    H, I, count = layout.hidden_size, layout.intermediate_size, tiles.shape[1]
    wide, narrow = constants(layout, "gate_up"), constants(layout, "down")
    up = layout.matrices("gate_up")[0].parts[1]
    blob, first, last = base.gate_up, base.gate_up_bias, base.down_bias
    outputs = config.outputs
    shared = {"BM": config.rows, "BN": outputs, "num_warps": _WARPS}
    _hidden_kernel[(count, triton.cdiv(I, outputs))](
        x, tokens, tiles, blob, blob if first is None else first, h if extra is None else extra, h, x.stride(0),
        0 if first is None else first.stride(0), count, H, I, layout.block_bytes, up, wide.panel, float(alpha),
        0.0 if limit is None else float(limit), BIAS=first is not None, ACTIVATION=ACTIVATIONS.index(activation),
        LIMITED=limit is not None, EXTRA=extra is not None, ROUND=x.dtype == torch.bfloat16,
        **dict(zip(_NAMES, wide.of_format)), **_product(layout, x.dtype), **shared,
    )  # fmt: skip
    _down_kernel[(count, triton.cdiv(H, outputs))](
        h, tiles, blob, blob if last is None else last, y, 0 if last is None else last.stride(0), count, H, I,
        layout.block_bytes, narrow.at, narrow.panel, BIAS=last is not None, **dict(zip(_NAMES, narrow.of_format)),
        **_product(layout, h.dtype), **shared,
    )  # fmt: skip


def _product(layout: Layout, dtype: torch.dtype) -> dict[str, int | bool | tl.dtype]:
    """Constants for products with this dtype: on tensor cores if each product is exact there, else in float32.

    bfloat16 and float16 represent every code of the formats with scales; TF32 represents both dtypes.
    """
    step, group = 64, layout.group_size
    while group is not None and group % step:
        step //= 2
    if dtype == torch.float32 or layout.format == "fp32" or step < 16:
        return {"KC": 16, "PARTS": False, "OPERAND": tl.float32}
    operand = tl.bfloat16 if dtype == torch.bfloat16 else tl.float16
    if triton_interpreted() or (layout.format == "bf16" and dtype == torch.float16):
        operand = tl.float32
    return {"KC": step, "PARTS": True, "OPERAND": operand}


def tiles_of(experts: list[int], counts: list[int], starts: list[int], rows: int) -> list[list[int]]:
    """[experts, first rows, numbers of rows] of the tiles of these experts, with at most `rows` rows each."""
    if max(counts, default=0) <= rows and min(counts, default=1):
        return [experts, starts, counts]
    tiles: list[list[int]] = [[], [], []]
    for expert, count, start in zip(experts, counts, starts, strict=True):
        for at in range(0, count, rows):
            for values, value in zip(tiles, (expert, start + at, min(rows, count - at))):
                values.append(value)
    return tiles
