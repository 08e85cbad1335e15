"""The panels of one matrix: positions, writing and reading. layout.py describes words, tiles and panels."""

from __future__ import annotations

from ctypes import byref, c_int64, c_size_t, c_void_p
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

from ...core.native import Structure, check, library, reason
from .formats import FP8_BLOCK, Codes, Format

ROWS = 16  # rows of a panel
WORDS = 16  # words of a tile, along the inputs
ALIGNMENT = 64  # alignment of panels in bytes, so that a load never crosses a cache line


class PanelFormat(Protocol):
    """What is needed to write and read a matrix whose positions are known."""

    @property
    def kind(self) -> Format: ...

    @property
    def scale_dtype(self) -> torch.dtype | None: ...


@dataclass(frozen=True)
class LayoutSlice:
    """Byte positions of the matrices of one slice in a blob; the same for all experts.

    offset         start of the slice in the blob
    expert_stride  bytes from one expert to the next
    parts          starts of the matrices inside an expert: (gate, up), or (down,)
    rows, inputs   size N, K of a matrix
    panels, tiles  panels of a matrix, tiles of a panel
    groups         scales of a row (fp8_block: of a panel); 0 without scales
    panel_bytes, scales_at, zeros_at   size of a panel, starts of scales and zeros inside it
    """

    offset: int
    expert_stride: int
    parts: tuple[int, ...]
    rows: int
    inputs: int
    panels: int
    tiles: int
    groups: int
    panel_bytes: int
    scales_at: int
    zeros_at: int


def placed(
    fmt: Format,
    rows: int,
    inputs: int,
    group_size: int | None,
    scale_dtype: torch.dtype | None,
    at: int = 0,
    parts: int = 1,
) -> LayoutSlice:
    """The positions of `parts` matrices [rows, inputs] that lie one after the other, from byte `at` on."""
    empty = rows == 0 or inputs == 0
    tiles = -(-inputs // (WORDS * fmt.per_word))
    groups = 0 if empty or scale_dtype is None else -(-inputs // (group_size or inputs))
    scales_at = tiles * ROWS * WORDS * 4
    each = scale_dtype.itemsize if scale_dtype else 0
    zeros_at = scales_at + groups * each * (1 if fmt.name == "fp8_block" else ROWS)
    panel = up(zeros_at + (groups * ROWS // 2 if fmt.zeros else 0), ALIGNMENT)
    panels = 0 if empty else -(-rows // ROWS)
    matrix = panels * panel
    starts = tuple(matrix * part for part in range(parts))
    return LayoutSlice(at, matrix * parts, starts, rows, inputs, panels, tiles, groups, panel, scales_at, zeros_at)


def up(number: int, multiple: int) -> int:
    """`number` rounded up to a multiple of `multiple`."""
    return -(-number // multiple) * multiple


class PanelArgs(Structure):
    _c_name_ = "gs_panel_args"
    _fields_ = [
        ("size", c_size_t),
        ("codes", c_void_p),
        *((name, c_int64) for name in ("rows", "code_bytes", "code_stride", "nibbles")),
        ("scales", c_void_p),
        *((name, c_int64) for name in ("groups", "scale_bytes", "scale_stride", "rows_of_scale")),
        ("zeros", c_void_p),
        ("zero_stride", c_int64),
        ("out", c_void_p),
        *((name, c_int64) for name in ("panels", "panel_bytes", "tiles", "scales_at", "zeros_at")),
    ]


def write_matrix(layout: PanelFormat, place: LayoutSlice, panels: Tensor, matrix: Codes) -> None:
    """Write the panels [panels, panel_bytes] of a matrix from its codes; on one thread, without the GIL."""
    if panels.is_cpu and matrix.codes.is_cpu and reason() is None:
        _write_natively(layout.kind, place, panels, matrix)
    else:
        _write_in_torch(layout.kind, place, panels, matrix)


def _write_natively(fmt: Format, place: LayoutSlice, panels: Tensor, matrix: Codes) -> None:
    if panels.shape != (place.panels, place.panel_bytes) or not panels.is_contiguous():
        raise ValueError(f"panels are {list(panels.shape)}, expected [{place.panels}, {place.panel_bytes}] in a row")
    codes, scales, zeros = (_adjacent(part) for part in (matrix.codes, matrix.scales, matrix.zeros))
    if codes is None or codes.shape[0] != place.rows:
        raise ValueError(f"codes are {list(matrix.codes.shape)}, expected {place.rows} rows")
    args = PanelArgs(
        codes=codes.data_ptr(), rows=place.rows, code_bytes=codes.shape[1] * codes.dtype.itemsize,
        code_stride=codes.stride(0) * codes.dtype.itemsize, nibbles=int(fmt.bits == 4), rows_of_scale=1,
        out=panels.data_ptr(), panels=place.panels, panel_bytes=place.panel_bytes, tiles=place.tiles,
        scales_at=place.scales_at, zeros_at=place.zeros_at,
    )  # fmt: skip
    if scales is not None:
        args.rows_of_scale = FP8_BLOCK if fmt.name == "fp8_block" else 1
        if scales.shape != (-(-place.rows // args.rows_of_scale), place.groups):
            raise ValueError(f"scales are {list(scales.shape)}, expected {place.groups} groups of {place.rows} rows")
        args.scales, args.groups, args.scale_bytes = scales.data_ptr(), place.groups, scales.dtype.itemsize
        args.scale_stride = scales.stride(0) * scales.dtype.itemsize
    if zeros is not None:
        if zeros.shape != (place.rows, place.groups):
            raise ValueError(f"zeros are {list(zeros.shape)}, expected [{place.rows}, {place.groups}]")
        args.zeros, args.zero_stride = zeros.data_ptr(), zeros.stride(0)
    check(library().gs_write_panels(byref(args)))


def _adjacent(part: Tensor | None) -> Tensor | None:
    """The tensor with the elements of a row next to each other; copied if they are not."""
    return part if part is None or part.shape[1] < 2 or part.stride(1) == 1 else part.contiguous()


def _write_in_torch(fmt: Format, place: LayoutSlice, panels: Tensor, matrix: Codes) -> None:
    """The same bytes where the native library does not run."""
    P, T, G = place.panels, place.tiles, place.groups
    codes = matrix.codes.contiguous()
    if codes.storage_offset() * codes.dtype.itemsize % torch.int32.itemsize:  # a view into another tensor
        codes = codes.clone()
    codes = codes if codes.dtype.itemsize > 1 else codes.view(torch.uint8)
    width = T * WORDS * fmt.per_word // fmt.per_code
    if codes.shape != (P * ROWS, width):
        codes = pad(codes, (0, width - codes.shape[1], 0, P * ROWS - codes.shape[0]))
    words = codes.view(torch.int32)
    if fmt.bits == 4:
        words = _gathered(words)
    tiles = panels[:, : place.scales_at].view(torch.int32).view(P, T, WORDS, ROWS)
    tiles.copy_(words.view(P, ROWS, T, WORDS).permute(0, 2, 3, 1))
    if matrix.scales is None:
        return
    scales = panels[:, place.scales_at : place.zeros_at].view(matrix.scales.dtype)
    if fmt.name == "fp8_block":
        scales.copy_(matrix.scales.repeat_interleave(FP8_BLOCK // ROWS, 0)[:P])
        return
    scales.view(P, G, ROWS).copy_(_by_panel(matrix.scales, P))
    if matrix.zeros is not None:
        zeros = _by_panel(matrix.zeros, P)
        packed = panels[:, place.zeros_at : place.zeros_at + G * ROWS // 2].view(P, G, ROWS // 2)
        packed.copy_(zeros[..., : ROWS // 2] | zeros[..., ROWS // 2 :] << 4)


def read_matrix(layout: PanelFormat, place: LayoutSlice, panels: Tensor) -> Codes:
    """Read the codes of a matrix from its panels: the inverse of `write_matrix`."""
    fmt, P, T, G = layout.kind, place.panels, place.tiles, place.groups
    tiles = panels[:, : place.scales_at].view(torch.int32).view(P, T, WORDS, ROWS)
    words = tiles.permute(0, 3, 1, 2).contiguous().view(P * ROWS, T * WORDS)
    if fmt.bits == 4:
        words = _spread(words) | _spread(words >> 16) << 4
    codes = words.view(fmt.codes)[: place.rows, : place.inputs // fmt.per_code]
    if layout.scale_dtype is None:
        return Codes(codes)
    scales = panels[:, place.scales_at : place.zeros_at].view(layout.scale_dtype)
    if fmt.name == "fp8_block":
        return Codes(codes, scales[:: FP8_BLOCK // ROWS].contiguous())
    scales = scales.view(P, G, ROWS).permute(0, 2, 1).reshape(P * ROWS, G)[: place.rows]
    if not fmt.zeros:
        return Codes(codes, scales)
    packed = panels[:, place.zeros_at : place.zeros_at + G * ROWS // 2].view(P, G, ROWS // 2)
    zeros = torch.cat((packed & 15, packed >> 4), -1).permute(0, 2, 1).reshape(P * ROWS, G)[: place.rows]
    return Codes(codes, scales, zeros)


def _by_panel(values: Tensor, panels: int) -> Tensor:
    """[rows, groups] -> [panels, groups, 16], with zeros for rows beyond the matrix"""
    values = pad(values, (0, 0, 0, panels * ROWS - values.shape[0]))
    return values.view(panels, ROWS, -1).permute(0, 2, 1)


def _gathered(words: Tensor) -> Tensor:
    """The even nibbles of each word in its low half, the odd ones in its high half"""
    halves = []
    for part in (words & 0x0F0F0F0F, words >> 4 & 0x0F0F0F0F):
        part = (part | part >> 4) & 0x00FF00FF
        halves.append((part | part >> 8) & 0x0000FFFF)
    return halves[0] | halves[1] << 16


def _spread(words: Tensor) -> Tensor:
    """The nibbles of each word's low half, moved to even positions"""
    words = words & 0x0000FFFF
    words = (words | words << 8) & 0x00FF00FF
    return (words | words << 4) & 0x0F0F0F0F
