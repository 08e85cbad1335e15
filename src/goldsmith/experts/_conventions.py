"""What the family's operators check and name alike."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")
TARGETS = ("gate", "up", "down")  # the three projections; a dropout mask is drawn by this number
# the stages of a projection: W v, A, B, m * v, A (m * v), B of that; W^T d, B^T d, A^T of that
PARTS = ("product", "a_read", "b_read", "masked", "low", "lora", "back", "high", "lora_back")
COMPUTE = ("float", "int8")
# the inputs of experts.moe, in order
BASE = ("gate_up", "down", "gate_up_bias", "down_bias")
FACTORS = ("gate_a", "gate_b", "up_a", "up_b", "down_a", "down_b")
NAMES = ("x", "topk_ids", "topk_weights", *BASE, *FACTORS, "seed")
SLOT_NAMES = ("x", "topk_ids", *BASE, *FACTORS)  # those of experts.slots


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums: float32, or float64 when x is float64."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def named(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def flat(t: Tensor) -> Tensor:
    """[rows, size] of [..., size]."""
    return t if t.dim() == 2 else t.reshape(math.prod(t.shape[:-1]), t.shape[-1])


def number(op: str, name: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{op}: {name}={value!r} is of type {type(value).__name__}, wanted a number")
    return float(value)


def finite(op: str, name: str, value: Any) -> float:
    """A number that is neither NaN nor infinite; compared, not asked, so that torch.compile may have it as a symbol."""
    found = number(op, name, value)
    if not -math.inf < found < math.inf:
        raise ValueError(f"{op}: {name}={value!r}, wanted a finite number")
    return found


def check_count(op: str, name: str, value: Any) -> int:
    """A whole number of at least 1; True is none."""
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{op}: {name}={value!r} is of type {type(value).__name__}, wanted a whole number")
    if value < 1:
        raise ValueError(f"{op}: {name}={value}, wanted at least 1")
    return value
