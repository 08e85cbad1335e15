"""The structures of csrc/experts/abi.h, filled from an operator's tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from ctypes import POINTER, byref, c_double, c_int32, c_int64, c_size_t, c_uint64, c_void_p
from typing import Any

import torch
from torch import Tensor

from ..core.native import Structure, TensorView, check, library, view
from ._common import ACTIVATIONS, TARGETS, flat
from ._routes import check_ids
from .layout import Layout

PLAIN = {torch.float32: 1, torch.bfloat16: 2}
PACKED = {"fp32": 3, "bf16": 4, "int8": 5, "fp8_block": 6, "int4": 7, "int4_asym": 8, "mxfp4": 9}
SCALES = {None: 0, torch.float32: 1, torch.bfloat16: 2, torch.float16: 3, torch.uint8: 8}


class Matrix(Structure):
    _c_name_ = "gs_matrix"
    _fields_ = [
        ("data", c_void_p),
        *((name, c_int64) for name in ("rows", "cols", "expert_bytes", "panel_bytes", "scales", "zeros", "group")),
        ("format", c_int32),
        ("scale_dtype", c_int32),
    ]


class Slice(Structure):
    _c_name_ = "gs_slice"
    _fields_ = [*((name, Matrix) for name in TARGETS), ("begin", c_int64), ("end", c_int64)]


class Lora(Structure):
    _c_name_ = "gs_lora"
    _fields_ = [*((name, TensorView) for name in ("a", "b", "da", "db")), ("scale", c_double)]


class MoeArgs(Structure):
    _c_name_ = "gs_moe_args"
    _fields_ = [
        ("size", c_size_t),
        ("threads", c_int32),
        ("activation", c_int32),
        *((name, c_int64) for name in ("tokens", "slots", "experts", "hidden", "intermediate")),
        ("slices", POINTER(Slice)),
        ("slice_count", c_int64),
        *((name, c_double) for name in ("alpha", "limit", "dropout")),
        ("seed", c_uint64),
        ("int8", c_int64),
        *((name, TensorView) for name in ("x", "ids", "weights", "gate_up_bias", "down_bias")),
        *((name, Lora) for name in TARGETS),
        *((name, TensorView) for name in ("y", "g", "u", "rows", "flags", "dy", "dx", "dweights")),
        *((name, TensorView) for name in ("dgate_up", "ddown", "dgate_up_bias", "ddown_bias")),
    ]


@contextmanager
def arguments(
    tensors: Mapping[str, Any], options: Mapping[str, Any]
) -> Iterator[tuple[MoeArgs, Callable[[str, Any], Any]]]:
    """The inputs' part of the call, and `keep(field, tensor)`, which adds a tensor and keeps it alive until the end."""
    alive: list[Any] = []
    args = MoeArgs(threads=torch.get_num_threads())

    def keep(field: str, tensor: Any) -> Any:
        alive.append(tensor)
        where, _, name = field.rpartition(".")
        setattr(getattr(args, where) if where else args, name, view(tensor))
        return tensor

    x, ids = flat(tensors["x"]).contiguous(), flat(tensors["topk_ids"])
    keep("x", x)
    keep("ids", ids)
    if "topk_weights" in tensors:
        keep("weights", flat(tensors["topk_weights"]))
    keep("gate_up_bias", tensors["gate_up_bias"])
    keep("down_bias", tensors["down_bias"])
    for target in TARGETS:
        if tensors[f"{target}_a"] is not None:
            keep(f"{target}.a", tensors[f"{target}_a"])
            keep(f"{target}.b", tensors[f"{target}_b"])
            getattr(args, target).scale = options[f"{target}_scale"]
    slices, sizes, base = _slices(tensors, options["layout"])
    alive.append((slices, base))
    args.slices, args.slice_count = slices, len(slices)
    args.tokens, args.slots = ids.shape
    args.hidden, args.intermediate, args.experts = sizes
    args.activation = ACTIVATIONS.index(options["activation"]) + 1
    args.alpha = options["alpha"]
    args.limit = math.inf if options["limit"] is None else options["limit"]
    seed = tensors.get("seed")
    if seed is not None and options["dropout"] > 0:
        args.dropout, args.seed = options["dropout"], int(seed) & (2**64 - 1)
    yield args, keep
    alive.clear()


def run(which: str, args: MoeArgs, op: str, topk_ids: Tensor) -> None:
    """Calls gs_moe_forward or gs_moe_backward; raises what went wrong, a bad id with its place in topk_ids as given."""
    try:
        check(getattr(library(), f"gs_moe_{which}")(byref(args)))
    except ValueError:
        check_ids(op, topk_ids, args.experts)  # the library has flattened the leading dimensions
        raise


def _slices(tensors: Mapping[str, Any], layout: str) -> tuple[Any, tuple[int, int, int], tuple[Tensor, Tensor]]:
    """The slices of the base, (hidden, intermediate, experts), and what must live as long as they do."""
    gate_up, down = (t if t.stride(-1) == 1 else t.contiguous() for t in (tensors["gate_up"], tensors["down"]))
    if layout:
        packed = Layout.parse(layout)
        gate_ups, downs = (list(packed.matrices(name)) for name in ("gate_up", "down"))
        cut = [
            Slice(
                gate=_packed(packed, gate_up, wide, 0),
                up=_packed(packed, gate_up, wide, 1),
                down=_packed(packed, down, narrow, 0),
                begin=begin,
                end=end,
            )
            for wide, narrow, begin, end in zip(gate_ups, downs, packed.cuts[:-1], packed.cuts[1:], strict=True)
            if end > begin
        ]
        sizes = packed.hidden_size, packed.intermediate_size, packed.num_experts
    else:
        experts, hidden, inner = down.shape
        cut = [Slice(gate=_plain(gate_up[:, :inner]), up=_plain(gate_up[:, inner:]), down=_plain(down), end=inner)]
        sizes = hidden, inner, experts
    return (Slice * len(cut))(*cut), sizes, (gate_up, down)


def _plain(weight: Tensor) -> Matrix:
    size = weight.element_size()
    return Matrix(
        data=weight.data_ptr(), rows=weight.shape[1], cols=weight.shape[2], expert_bytes=weight.stride(0) * size,
        panel_bytes=weight.stride(1) * size, format=PLAIN[weight.dtype],
    )  # fmt: skip


def _packed(layout: Layout, blob: Tensor, place: Any, part: int) -> Matrix:
    return Matrix(
        data=blob.data_ptr() + place.offset + place.parts[part], rows=place.rows, cols=place.inputs,
        expert_bytes=place.expert_stride, panel_bytes=place.panel_bytes, scales=place.scales_at, zeros=place.zeros_at,
        group=(layout.group_size or place.inputs) if place.groups else 0,
        format=PACKED[layout.format], scale_dtype=SCALES[layout.scale_dtype],
    )  # fmt: skip
