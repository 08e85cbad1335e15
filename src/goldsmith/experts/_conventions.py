"""Names, dtypes and number checks that all operators of the family share."""

from __future__ import annotations

import math
from typing import TypedDict

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")
TARGETS = ("gate", "up", "down")  # the three projections; dropout masks use the index
# the stages of a projection: W v, A, B, m * v, A (m * v), B A (m * v); W^T d, B^T d, A^T B^T d
PARTS = ("product", "a_read", "b_read", "masked", "low", "lora", "back", "high", "lora_back")
COMPUTE = ("float", "int8")
# the tensor inputs of experts.moe, in order
BASE = ("gate_up", "down", "gate_up_bias", "down_bias")
FACTORS = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")
NAMES = ("x", "topk_ids", "topk_weights", *BASE, *FACTORS, "seed")
AXES = {
    "x": "*batch hidden",
    "topk_ids": "*batch k",
    "topk_weights": "*batch k",
    "gate_up": "experts 2*intermediate hidden | bytes",
    "down": "experts hidden intermediate | bytes",
    "gate_up_bias": "experts 2*intermediate",
    "down_bias": "experts hidden",
    "gate_a": "experts rank hidden",
    "gate_b": "experts intermediate rank",
    "up_a": "experts rank hidden",
    "up_b": "experts intermediate rank",
    "down_a": "experts rank intermediate",
    "down_b": "experts hidden rank",
    "seed": "...",
    "y": "*batch hidden",
    "o": "*batch k hidden: sum",
    "flags": "*batch k: uint8",
}
SLOT_NAMES = ("x", "topk_ids", *BASE, *FACTORS)  # the tensor inputs of experts.slots, in order


class MoeOptions(TypedDict, total=False):
    """The options of the family's operators; experts.slots and experts.moe_int8 have a part of them."""

    layout: str
    gate_scale: float
    up_scale: float
    down_scale: float
    dropout: float
    activation: str
    alpha: float
    limit: float | None
    save: bool
    int8: int


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float64 if x is float64, otherwise float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def flat(t: Tensor) -> Tensor:
    """[..., size] -> [rows, size]."""
    return t if t.dim() == 2 else t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def number(op: str, name: str, value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name}={value!r} is of type {type(value).__name__}, expected a number")
    return float(value)


def finite(op: str, name: str, value: object) -> float:
    """`value` as a float; raises ValueError for NaN and infinity.

    Uses comparisons instead of math.isfinite, so that torch.compile can keep the value symbolic.
    """
    result = number(op, name, value)
    if not -math.inf < result < math.inf:
        raise ValueError(f"{op}: {name}={value!r}, expected a finite number")
    return result


def check_count(op: str, name: str, value: object) -> int:
    """`value` as an int of at least 1; raises TypeError for other types, bool among them."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name}={value!r} is of type {type(value).__name__}, expected a whole number")
    if value < 1:
        raise ValueError(f"{op}: {name}={value}, expected at least 1")
    return value
