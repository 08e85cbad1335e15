"""The structures of csrc/step/abi.h in ctypes."""

from __future__ import annotations

from ctypes import POINTER, c_double, c_int32, c_int64, c_size_t, c_void_p

import torch
from torch import Tensor

from ...core.native import Structure, TensorView, put
from ...experts import PackedMatrix
from ...experts._native_abi import PLAIN, LinearArgs, Matrix, MoeArgs, packed_matrix
from .model import LinearLayer


class StepLinear(Structure):
    _c_name_ = "gs_step_linear"
    _fields_ = [(name, LinearArgs) for name in ("base", "down", "up")]


class StepRow(Structure):
    _c_name_ = "gs_step_row"
    _fields_ = [(name, c_int64) for name in ("token", "length", "room", "head_stride")]


class StepLayer(Structure):
    _c_name_ = "gs_step_layer"
    _fields_ = [
        *((name, TensorView) for name in ("input_norm", "experts_norm", "query_norm", "key_norm")),
        *((name, StepLinear) for name in ("query", "key", "value", "output")),
        ("router", LinearArgs),
        ("experts", POINTER(MoeArgs)),
        ("uses", c_void_p),
        ("distinct", c_int64),
        ("seconds", c_double),
        ("finite", c_int32),
        ("unused", c_int32),
    ]


class StepArgs(Structure):
    _c_name_ = "gs_step_args"
    _fields_ = [
        ("size", c_size_t),
        ("threads", c_int32),
        ("dtype", c_int32),
        *((name, c_int64) for name in ("rows", "hidden", "heads", "kv_heads", "head_dim", "vocabulary")),
        *((name, c_int64) for name in ("first", "last", "outside")),
        ("normalised", c_int64),
        ("float_weights", c_int64),
        ("epsilon", c_double),
        ("scaling", c_double),
        ("layers", POINTER(StepLayer)),
        ("layer_count", c_int64),
        ("sequences", c_void_p),
        ("caches", c_void_p),
        *((name, TensorView) for name in ("embedding", "final_norm", "cosines", "sines")),
        ("head", StepLinear),
        ("stream", TensorView),
        ("logits", TensorView),
        ("seconds", c_double * 4),
    ]


class ServedLayer(Structure):
    _c_name_ = "gs_served_layer"
    _fields_ = [
        ("experts", POINTER(MoeArgs)),
        ("slots", c_void_p),
        ("uses", c_void_p),
        ("computed", c_int64),
        ("seconds", c_double),
    ]


class ServeArgs(Structure):
    _c_name_ = "gs_serve_args"
    _fields_ = [
        ("size", c_size_t),
        ("layers", POINTER(ServedLayer)),
        ("layer_count", c_int64),
        ("routes", c_int64),
        *((name, c_void_p) for name in ("routed", "ids", "threads", "asked", "answered")),
        ("patience", c_double),
        ("polite", c_int64),
        ("served", c_int64),
    ]


def put_tensor(structure: Structure, name: str, tensor: Tensor | None) -> None:
    """Writes a tensor's view into a field; without a tensor the field stays absent."""
    if tensor is not None:
        put(tensor, structure, getattr(type(structure), name).offset)


def put_linear(structure: Structure, name: str, layer: LinearLayer) -> None:
    """Writes a linear layer with its LoRA into a field."""
    field = getattr(structure, name)
    field.base = linear_args(layer.weight, layer.bias)
    if layer.lora is not None:
        field.down, field.up = (linear_args(factor) for factor in layer.lora)


def linear_args(weight: Tensor | PackedMatrix, bias: Tensor | None = None) -> LinearArgs:
    """y = weight x + bias for a weight [out, in], packed or with contiguous rows."""
    if isinstance(weight, PackedMatrix):
        matrix = packed_matrix(weight.layout, weight.data.data_ptr(), weight.layout.place, 0)
    else:
        matrix = Matrix(
            data=weight.data_ptr(), rows=weight.shape[0], cols=weight.shape[1],
            panel_bytes=weight.stride(0) * weight.element_size(), format=PLAIN[weight.dtype],
        )  # fmt: skip
    linear = LinearArgs(weight=matrix)
    put_tensor(linear, "bias", bias)
    return linear


DTYPES = {torch.float32: 1, torch.bfloat16: 2}
