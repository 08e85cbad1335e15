"""PackedMatrix: one weight [out, in] in a format of the experts, for the dense layers of a model."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NoReturn

import torch
from torch import Tensor

from ...core.shapes import ShapeError, check_choice, check_dtype, check_tensor
from .formats import FORMATS, SCALE_NAMES, Format, decode
from .inputs import check_finite
from .memory import empty_pages, frozen
from .panels import ROWS, LayoutSlice, placed, read_matrix, write_matrix
from .quantisation import check_scale_dtype, checked_group, quantised_rows

_OP = "experts.pack_matrix"
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_TEXT = re.compile(r"(\w+):(\d+)x(\d+):(row|g\d+):(\w+|-)")


@dataclass(frozen=True)
class MatrixLayout:
    """Format and sizes of one packed matrix; its bytes are the panels of a layer's matrices (layout.py).

    text, parse   its form as an operator's option, for example "int4:1024x512:g32:bf16": format, rows x inputs, group,
                  scale
    """

    format: str
    rows: int
    inputs: int
    group_size: int | None
    scale_dtype: torch.dtype | None

    @property
    def kind(self) -> Format:
        return FORMATS[self.format]

    @cached_property
    def place(self) -> LayoutSlice:
        return placed(self.kind, self.rows, self.inputs, self.group_size, self.scale_dtype)

    @property
    def nbytes(self) -> int:
        return self.place.expert_stride

    @property
    def text(self) -> str:
        group = "row" if self.group_size is None else f"g{self.group_size}"
        scale = SCALE_NAMES[self.scale_dtype] if self.scale_dtype else "-"
        return f"{self.format}:{self.rows}x{self.inputs}:{group}:{scale}"

    @classmethod
    def of(
        cls, format: str, rows: int, inputs: int, group_size: int | None = None, scale_dtype: torch.dtype | None = None
    ) -> MatrixLayout:
        """The layout that `pack_matrix` gives such a weight; raises ValueError for a group that does not divide."""
        kind = FORMATS[format]
        group = checked_group(_OP, kind, group_size, {"in": inputs})
        return cls(format, rows, inputs, group, check_scale_dtype(_OP, kind, scale_dtype))

    @classmethod
    @lru_cache(maxsize=1024)
    def parse(cls, text: str) -> MatrixLayout:
        """The layout with this `text`; raises ValueError for any other text."""
        match = _TEXT.fullmatch(text)
        scales = {name: dtype for dtype, name in SCALE_NAMES.items()} | {"-": None}
        if match is None or match[1] not in FORMATS or match[5] not in scales or "0" in match.group(2, 3):
            raise ValueError(f"MatrixLayout: {text!r} is not a layout; an example is 'int4:1024x512:g32:bf16'")
        group = None if match[4] == "row" else int(match[4][1:])
        layout = cls(match[1], int(match[2]), int(match[3]), group, scales[match[5]])
        fmt = layout.kind
        if fmt.name != "fp8_block" and checked_group("MatrixLayout", fmt, group, {"inputs": layout.inputs}) != group:
            raise ValueError(f"MatrixLayout: {text!r} has no group size, which {fmt.name} needs")
        if layout.scale_dtype not in (fmt.scales or (None,)):
            raise ValueError(f"MatrixLayout: {text!r} has scales that {fmt.name} does not support")
        return layout

    def panels(self, data: Tensor) -> Tensor:
        return data.view(self.place.panels, self.place.panel_bytes)


class PackedMatrix:
    """w = value(code) * scale: one weight [out, in] in one packed copy; the weight of `experts.linear`

    Create it with `experts.pack_matrix`. It is immutable: `copy.deepcopy` returns the same object, and pickle keeps
    every bit.

    shape                 (out, in)
    format, group_size    for example "int4", 32
    nbytes                bytes of the weight
    layout, data          for kernels: the position of every bit, and the bytes (1-D uint8)
    """

    __slots__ = ("__weakref__", "data", "layout")

    layout: MatrixLayout
    data: Tensor

    def __init__(self, *_: object, **__: object) -> None:
        raise TypeError("PackedMatrix: use experts.pack_matrix to create one")

    @classmethod
    def _of(cls, text: str, data: Tensor) -> PackedMatrix:
        packed = object.__new__(cls)
        object.__setattr__(packed, "layout", MatrixLayout.parse(text))
        object.__setattr__(packed, "data", data)
        return packed

    @property
    def shape(self) -> tuple[int, int]:
        return self.layout.rows, self.layout.inputs

    @property
    def format(self) -> str:
        return self.layout.format

    @property
    def group_size(self) -> int | None:
        return self.layout.group_size

    @property
    def nbytes(self) -> int:
        return self.layout.nbytes

    def unpack(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """[out, in] as numbers: code * scale, rounded once to `dtype`; exact in float64"""
        return decode(
            self.layout.kind, read_matrix(self.layout, self.layout.place, self.layout.panels(self.data)), dtype
        )

    def __repr__(self) -> str:
        group = f", group_size={self.group_size}" if self.group_size else ""
        return f"PackedMatrix({self.format}, {list(self.shape)}{group}, {self.nbytes} bytes)"

    def __copy__(self) -> PackedMatrix:
        return self

    def __deepcopy__(self, memo: dict[int, object]) -> PackedMatrix:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return _restored, (self.layout.text, self.data)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"PackedMatrix is immutable: {name} cannot be set; pack the weight again to change it")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"PackedMatrix is immutable: {name} cannot be deleted")


def _restored(text: str, data: Tensor) -> PackedMatrix:
    return PackedMatrix._of(text, data)


def pack_matrix(
    weight: Tensor, *, format: str = "bf16", group_size: int | None = None, scale_dtype: torch.dtype | None = None
) -> PackedMatrix:
    """Pack a weight [out, in] in float32, bfloat16 or float16, w = value(code) * scale, for `experts.linear`

    format, group_size and scale_dtype are those of `experts.pack`; a group size divides `in`. Raises ShapeError,
    TypeError, and ValueError for a group size that does not divide and for a number that is not finite. The result is
    on the CPU.
    """
    check_choice(_OP, "format", format, list(FORMATS))
    check_tensor(_OP, "weight", weight)
    check_dtype(_OP, "weight", weight, _FLOATS)
    if weight.dim() != 2 or 0 in weight.shape:
        raise ShapeError(f"{_OP}: weight is {list(weight.shape)}, expected [out, in] with at least 1 of each")
    fmt = FORMATS[format]
    layout = MatrixLayout.of(format, weight.shape[0], weight.shape[1], group_size, scale_dtype)
    with frozen():
        source = weight.detach().cpu()
        check_finite(_OP, "weight", source)
        data = empty_pages(layout.nbytes)
        panels, like = layout.panels(data), (layout.inputs, layout.group_size, layout.scale_dtype)
        # some rows at a time: as a whole, the codes on their way would take up to 6 bytes a weight
        for at, codes in quantised_rows(fmt, source, *like[1:], f"{_OP}: weight"):
            place = placed(fmt, len(codes.codes), *like)
            write_matrix(layout, place, panels[at // ROWS : at // ROWS + place.panels], codes)
    return PackedMatrix._of(layout.text, data)
