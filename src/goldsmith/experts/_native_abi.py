"""The structures of csrc/experts/abi.h in ctypes, and NativeCall, which fills them from an operator's tensors."""

from __future__ import annotations

import math
import struct
from collections.abc import Mapping
from ctypes import POINTER, Array, addressof, byref, c_double, c_int32, c_int64, c_size_t, c_uint64, c_void_p, sizeof
from functools import lru_cache
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..core.native import Structure, TensorView, check, library, put, threads
from ._conventions import ACTIVATIONS, TARGETS, flat
from ._routes import check_ids
from .dropout import seed_and_numbers
from .packed.layout import Layout
from .packed.matrix import MatrixLayout
from .packed.panels import LayoutSlice

PLAIN = {torch.float32: 1, torch.bfloat16: 2}
PACKED = {"fp32": 3, "bf16": 4, "int8": 5, "fp8_block": 6, "int4": 7, "int4_asym": 8, "mxfp4": 9}
SCALES = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.uint8: 8}

Sizes: TypeAlias = tuple[int, int, int, int]  # hidden, intermediate, experts, bytes of an expert
PlainWeight: TypeAlias = tuple[int, torch.dtype, tuple[int, ...], tuple[int, ...]]  # address, dtype, shape, strides


class Matrix(Structure):
    _c_name_ = "gs_matrix"
    _fields_ = [
        ("data", c_void_p),
        *((name, c_int64) for name in ("rows", "cols", "expert_bytes", "panel_bytes", "scales", "zeros", "group")),
        ("format", c_int32),
        ("scale_dtype", c_int32),
    ]


class SliceStruct(Structure):
    _c_name_ = "gs_slice"
    _fields_ = [*((name, Matrix) for name in TARGETS), ("begin", c_int64), ("end", c_int64)]


class Lora(Structure):
    _c_name_ = "gs_lora"
    _fields_ = [*((name, TensorView) for name in ("a", "b", "da", "db")), ("scale", c_double)]


_SCALARS: list[tuple[str, Any]] = [
    ("size", c_size_t),
    ("threads", c_int32),
    ("activation", c_int32),
    *((name, c_int64) for name in ("tokens", "slots", "experts", "hidden", "intermediate")),
    ("slices", POINTER(SliceStruct)),
    ("slice_count", c_int64),
    *((name, c_double) for name in ("alpha", "limit", "dropout")),
    ("seed", c_uint64),
    ("numbers", c_void_p),
    ("int8", c_int64),
]
_TENSORS: list[tuple[str, Any]] = [
    *((name, TensorView) for name in ("x", "ids", "weights", "gate_up_bias", "down_bias")),
    *((name, Lora) for name in TARGETS),
    *((name, TensorView) for name in ("y", "g", "u", "rows", "flags", "dy", "dx", "dweights")),
    *((name, TensorView) for name in ("dgate_up", "ddown", "dgate_up_bias", "ddown_bias")),
]


class MoeArgs(Structure):
    _c_name_ = "gs_moe_args"
    _fields_ = _SCALARS + _TENSORS


class LinearArgs(Structure):
    _c_name_ = "gs_linear_args"
    _fields_ = [
        ("size", c_size_t),
        ("weight", Matrix),
        ("bias", TensorView),
    ]


# One pack_into writes all scalars, and each tensor view goes to its offset: setting field by field took 60 us more.
_HEAD = struct.Struct("".join("P" if kind is POINTER(SliceStruct) else kind._type_ for _, kind in _SCALARS))
_SCALE = struct.Struct("d")
_PLACES = {name: getattr(MoeArgs, name).offset for name, kind in _TENSORS} | {
    f"{target}.{name}": getattr(MoeArgs, target).offset + getattr(Lora, name).offset
    for target in TARGETS
    for name in ("a", "b", "da", "db", "scale")
}


class NativeCall:
    """One call of the library: its arguments, and references to all tensors that they point to."""

    __slots__ = ("_alive", "args", "hidden", "intermediate", "slots", "tokens")

    def __init__(self, tensors: Mapping[str, Any], options: Mapping[str, Any]) -> None:
        """Fill in the inputs and options; `keep` adds outputs and further inputs."""
        self._alive: list[object] = []
        self.args = args = MoeArgs()
        ids = self.keep("ids", flat(tensors["topk_ids"]))
        self.keep("x", flat(tensors["x"]).contiguous())
        if "topk_weights" in tensors:
            self.keep("weights", flat(tensors["topk_weights"]))
        for name in ("gate_up_bias", "down_bias"):
            if tensors[name] is not None:
                self.keep(name, tensors[name])
        for target in TARGETS:
            if tensors[f"{target}_a"] is not None:
                self.keep(f"{target}.a", tensors[f"{target}_a"])
                self.keep(f"{target}.b", tensors[f"{target}_b"])
                _SCALE.pack_into(args, _PLACES[f"{target}.scale"], options[f"{target}_scale"])
        slices, (self.hidden, self.intermediate, experts, weights) = self._base(tensors, options["layout"])
        self._alive.append(slices)
        self.tokens, self.slots = ids.shape
        routes = self.tokens * self.slots
        team = min(threads(), busy(weights * min(routes, experts), 6 * self.hidden * self.intermediate * routes))
        limit, dropout, seed, numbers = options["limit"], options.get("dropout", 0.0), 0, None
        if dropout > 0:
            seed, numbers = seed_and_numbers(tensors["seed"])
            self._alive.append(numbers)
        _HEAD.pack_into(
            args, 0, sizeof(args), team, ACTIVATIONS.index(options["activation"]) + 1,
            self.tokens, self.slots, experts, self.hidden, self.intermediate, addressof(slices), len(slices),
            options["alpha"], math.inf if limit is None else limit, dropout, seed & (2**64 - 1),
            0 if numbers is None else numbers.data_ptr(), options.get("int8", 0),
        )  # fmt: skip

    def keep(self, field: str, tensor: Tensor) -> Tensor:
        self._alive.append(tensor)
        put(tensor, self.args, _PLACES[field])
        return tensor

    def run(self, which: str, op: str, topk_ids: Tensor) -> None:
        """Run gs_moe_forward or gs_moe_backward; the error for a bad id gives its index in `topk_ids`."""
        try:
            check(getattr(library(), f"gs_moe_{which}")(byref(self.args)))
        except ValueError:
            check_ids(op, topk_ids, self.args.experts)  # the library only knows flattened leading dimensions
            raise

    def _base(self, tensors: Mapping[str, Tensor], layout: str) -> tuple[Array[SliceStruct], Sizes]:
        gate_up, down = (t if t.stride(-1) == 1 else t.contiguous() for t in (tensors["gate_up"], tensors["down"]))
        self._alive += gate_up, down
        if layout:
            return _packed_base(layout, gate_up.data_ptr(), down.data_ptr())
        return _plain_base(*((t.data_ptr(), t.dtype, t.shape, t.stride()) for t in (gate_up, down)))


def busy(weights: int, flop: int) -> int:
    """How many threads have enough work: waking one takes as long as reading 0.5 MB of weights or 8 MFLOP."""
    return 1 + max(weights >> 19, flop >> 23)


# The slices of a base are cached, because its address is the same in every call. They hold addresses, not tensors.
@lru_cache(maxsize=1024)
def _packed_base(text: str, gate_up: int, down: int) -> tuple[Array[SliceStruct], Sizes]:
    """The slices of a packed base with blobs at these addresses, and (hidden, intermediate, experts, expert bytes)."""
    layout = Layout.parse(text)
    cut = [
        SliceStruct(
            gate=packed_matrix(layout, gate_up, wide, 0),
            up=packed_matrix(layout, gate_up, wide, 1),
            down=packed_matrix(layout, down, narrow, 0),
            begin=begin,
            end=end,
        )
        for wide, narrow, begin, end in zip(
            layout.matrices("gate_up"), layout.matrices("down"), layout.cuts[:-1], layout.cuts[1:], strict=True
        )
        if end > begin
    ]
    sizes = layout.hidden_size, layout.intermediate_size, layout.num_experts, layout.expert_nbytes
    return (SliceStruct * len(cut))(*cut), sizes


@lru_cache(maxsize=1024)
def _plain_base(gate_up: PlainWeight, down: PlainWeight) -> tuple[Array[SliceStruct], Sizes]:
    """The same for plain tensors, each described by (address, dtype, shape, strides)."""
    experts, hidden, inner = down[2]
    whole = SliceStruct(gate=_plain(gate_up, 0, inner), up=_plain(gate_up, inner, inner), down=_plain(down, 0, hidden))
    whole.end = inner
    return (SliceStruct * 1)(whole), (hidden, inner, experts, 3 * hidden * inner * down[1].itemsize)


def _plain(weight: PlainWeight, first: int, rows: int) -> Matrix:
    at, dtype, shape, strides = weight
    expert, row = (stride * dtype.itemsize for stride in strides[:2])
    return Matrix(
        data=at + first * row, rows=rows, cols=shape[2], expert_bytes=expert, panel_bytes=row, format=PLAIN[dtype]
    )


def packed_matrix(layout: Layout | MatrixLayout, blob: int, place: LayoutSlice, part: int) -> Matrix:
    return Matrix(
        data=blob + place.offset + place.parts[part], rows=place.rows, cols=place.inputs,
        expert_bytes=place.expert_stride, panel_bytes=place.panel_bytes, scales=place.scales_at, zeros=place.zeros_at,
        group=(layout.group_size or place.inputs) if place.groups else 0,
        format=PACKED[layout.format], scale_dtype=SCALES[layout.scale_dtype],
    )  # fmt: skip
