"""Conversion of the public arguments `base` and `lora` to the tensors and options of the operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeAlias

import torch
from torch import Tensor

from ._conventions import FACTORS, TARGETS, finite, number
from .dropout import new_seed
from .lora import LoRA
from .packed.experts import PackedExperts

Base: TypeAlias = PackedExperts | Sequence[Tensor | None]
Lora: TypeAlias = LoRA | Mapping[str, tuple[Tensor, Tensor]]


def base_of(op: str, base: object) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None, str]:
    """(gate_up, down, gate_up_bias, down_bias, layout) of a base."""
    if isinstance(base, PackedExperts):
        return base.gate_up, base.down, base.gate_up_bias, base.down_bias, base.layout.text
    if isinstance(base, (tuple, list)) and len(base) in (2, 4):
        gate_up, down, *biases = base
        return gate_up, down, *(biases or (None, None)), ""
    value_text = f"a {type(base).__name__}" + (f" of {len(base)}" if isinstance(base, (tuple, list)) else "")
    raise TypeError(
        f"{op}: base is {value_text}, expected a PackedExperts, or a tuple of tensors: (gate_up [E, 2I, H], "
        "down [E, H, I]) or (gate_up, down, gate_up_bias [E, 2I], down_bias [E, H])"
    )


def lora_of(
    op: str, lora: object, scaling: object, *, training: bool = True
) -> tuple[tuple[Tensor | None, ...], tuple[float, ...], float, Tensor | None]:
    """(the six factors in order, the three scales, dropout probability, seed of the masks or None)"""
    if lora is None:
        if not isinstance(scaling, Mapping):
            finite(op, "lora_scaling", scaling)
        return (None,) * len(FACTORS), (1.0,) * len(TARGETS), 0.0, None
    if isinstance(lora, LoRA):
        if scaling != 1.0:
            raise ValueError(
                f"{op}: lora_scaling={scaling!r}, but an experts.LoRA has its own scales; omit lora_scaling"
            )
        factors, scales, _, _ = lora_of(op, lora.factors(), lora.scaling)
        p = lora.dropout if training and lora.training else 0.0
        return factors, scales, p, new_seed() if p else None
    if not isinstance(lora, Mapping):
        raise TypeError(
            f"{op}: lora is a {type(lora).__name__}, expected an experts.LoRA, or a dict of (A, B) with keys from "
            f"{', '.join(TARGETS)}"
        )
    unknown = [key for key in lora if key not in TARGETS]
    if unknown:
        raise ValueError(f"{op}: lora has the unknown key {unknown[0]!r}; known: {', '.join(TARGETS)}")
    pairs: list[Tensor | None] = []
    for target in TARGETS:
        pair = lora.get(target)
        if pair is not None and not (isinstance(pair, (tuple, list)) and len(pair) == 2):
            value_text = (
                f"{type(pair).__name__} of {len(pair)}" if isinstance(pair, (tuple, list)) else type(pair).__name__
            )
            raise TypeError(f"{op}: lora[{target!r}] is a {value_text}, expected (A [E, r, in], B [E, out, r])")
        pairs += (None, None) if pair is None else pair
    return tuple(pairs), _scales(op, scaling, lora), 0.0, None


def _scales(op: str, scaling: object, lora: Mapping[str, object]) -> tuple[float, ...]:
    if not isinstance(scaling, Mapping):
        return (finite(op, "lora_scaling", scaling),) * len(TARGETS)
    wrong = sorted(set(scaling) ^ {key for key in lora if lora[key] is not None})
    if wrong:
        raise ValueError(
            f"{op}: lora_scaling and lora differ in the key {wrong[0]!r}; give one scale for each projection of lora: "
            f"{', '.join(k for k in TARGETS if lora.get(k) is not None)}"
        )
    return tuple(finite(op, f"lora_scaling[{t!r}]", scaling[t]) if t in scaling else 1.0 for t in TARGETS)


def limit_of(op: str, limit: object, activation: object) -> float | None:
    """The limit to apply: `limit`, by default 7 for "swiglu_oai" and None for the others."""
    if limit is None:
        return 7.0 if activation == "swiglu_oai" else None
    return number(op, "limit", limit)


def needs_gradient(tensors: Sequence[object]) -> bool:
    """Whether autograd will need a gradient, so that the forward must save tensors."""
    return torch.is_grad_enabled() and any(isinstance(t, Tensor) and t.requires_grad for t in tensors)
