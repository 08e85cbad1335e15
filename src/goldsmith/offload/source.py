"""A source of weights, layer by layer and expert by expert, in canonical form: gate, up [I, H], down [H, I]."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ..core.shapes import ShapeError, kind
from ..experts import PackedExperts
from ..experts.packed.formats import Codes
from ..experts.packed.inputs import Stack, check_finite, together
from ..experts.packed.layout import Expert, Layout, read_expert
from ..experts.packed.quantisation import quantise

Weights: TypeAlias = Mapping[str, Any] | PackedExperts
Source: TypeAlias = Mapping[int, Weights] | Iterable[tuple[int, Weights]]

KEYS = ("gate_up", "down", "gate_up_bias", "down_bias")
BIASES = KEYS[2:]
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_HINT = "; float64 goes in as .float(), codes as a PackedExperts of goldsmith.experts' importers"


@dataclass(frozen=True)
class Floats:
    """One expert of a source: its matrices as they came, its biases where there are any."""

    gate: Tensor
    up: Tensor
    down: Tensor
    biases: dict[str, Tensor] = field(default_factory=dict)

    @property
    def matrices(self) -> dict[str, Tensor]:
        return {"gate": self.gate, "up": self.up, "down": self.down}


@dataclass(frozen=True)
class Coded:
    """One expert whose codes are kept as they are."""

    layout: Layout
    expert: Expert
    biases: dict[str, Tensor] = field(default_factory=dict)


def layers_of(source: Any, op: str) -> Iterator[tuple[int, Weights]]:
    """(layer, weights) of a mapping or an iterable; every layer once."""
    pairs = source.items() if isinstance(source, Mapping) else source
    if not isinstance(pairs, Iterable) or isinstance(source, (str, bytes, Tensor)):
        raise TypeError(
            f"{op}: source is {kind(source)}, wanted the folder of a checkpoint, a mapping of layer to weights, or an "
            "iterable of (layer, weights)"
        )
    seen: set[int] = set()
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and type(pair[0]) is int):
            raise TypeError(f"{op}: source gives {pair!r:.80}, wanted pairs (layer, weights) with a whole number first")
        layer, weights = pair
        del pair
        if layer < 0 or layer in seen:
            again = " twice" if layer in seen else ""
            raise ValueError(f"{op}: source gives layer {layer}{again}, wanted numbers from 0 on, each once")
        seen.add(layer)
        yield layer, weights
        del weights  # before the next layer is made


def experts_of(weights: Weights, op: str) -> Iterator[Floats | Coded]:
    """Every expert of a layer, one at a time; ShapeError, TypeError or ValueError for what is none."""
    if isinstance(weights, PackedExperts):
        yield from _coded(weights)
        return
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"{op}: weights are {kind(weights)}, wanted a dict with {', '.join(KEYS[:2])} or a PackedExperts"
        )
    unknown = [key for key in weights if key not in KEYS]
    missing = [key for key in KEYS[:2] if weights.get(key) is None]
    if unknown or missing:
        what = f"has the key {unknown[0]!r}" if unknown else f"has no {missing[0]!r}"
        raise ValueError(
            f"{op}: the dict of weights {what}; the keys are {', '.join(KEYS)}, biases where there are any"
        )
    gate_up = weights["gate_up"]
    pair = isinstance(gate_up, (tuple, list)) and len(gate_up) == 2 and not _is_experts(gate_up)
    fronts = [("gate", gate_up[0], "I H"), ("up", gate_up[1], "I H")] if pair else [("gate_up", gate_up, "2I H")]
    biases = [name for name in BIASES if weights.get(name) is not None]
    stacks = [Stack(op, name, value, dims, _FLOATS, _HINT) for name, value, dims in fronts]
    stacks += [Stack(op, "down", weights["down"], "H I", _FLOATS, _HINT)]
    stacks += [Stack(op, name, weights[name], "2I" if name == BIASES[0] else "H", _FLOATS, _HINT) for name in biases]
    _, rows = together(op, stacks)
    e = 0
    for row in rows:  # `enumerate` would keep the last row while the next one is made
        yield _floats(op, e, row, pair, biases)
        del row
        e += 1


def _is_experts(value: Any) -> bool:
    """Whether two things are two experts' matrices, and not gate and up of all."""
    return all(isinstance(one, Tensor) and one.dim() == 2 for one in value)


def _floats(op: str, e: int, row: tuple[Tensor, ...], pair: bool, biases: list[str]) -> Floats:
    if pair:
        gate, up, down, *rest = row
    else:
        both, down, *rest = row
        if both.shape[0] % 2:
            raise ShapeError(f"{op}: gate_up of expert {e} has {both.shape[0]} rows, not an even number")
        gate, up = both.chunk(2)
    if 0 in gate.shape or gate.shape != up.shape or tuple(down.shape) != (gate.shape[1], gate.shape[0]):
        raise ShapeError(
            f"{op}: expert {e} has gate {list(gate.shape)}, up {list(up.shape)} and down {list(down.shape)}, wanted "
            "[I, H], [I, H] and [H, I]"
        )
    found = dict(zip(biases, rest))
    for name, bias in found.items():
        size = 2 * gate.shape[0] if name == BIASES[0] else down.shape[0]
        if tuple(bias.shape) != (size,):
            raise ShapeError(f"{op}: {name} of expert {e} is {list(bias.shape)}, wanted [{size}]")
    return Floats(gate, up, down, found)


def _coded(base: PackedExperts) -> Iterator[Coded]:
    base = base.to("cpu")
    for e in range(base.num_experts):
        biases = {name: bias[e] for name in BIASES if (bias := getattr(base, name)) is not None}
        yield Coded(base.layout, read_expert(base.layout, base.gate_up, base.down, e), biases)


def encode(expert: Floats, layout: Layout, where: str, e: int, *, allow_nonfinite: bool) -> Expert:
    """An expert's floats as the codes of a layout; ValueError names the first number that is not finite."""
    for name, tensor in {**expert.matrices, **expert.biases}.items():
        if not allow_nonfinite:
            check_finite(where, f"{name} of expert {e}", tensor)
    found: list[Codes] = []
    for name, matrix in expert.matrices.items():
        if allow_nonfinite or matrix.dtype == layout.kind.codes:  # as it is: no copy
            found.append(Codes(matrix.to(layout.kind.codes)))
        else:
            at = f"{where}: expert {e}, {name}"
            found.append(quantise(layout.kind, matrix, layout.group_size, layout.scale_dtype, at))
    return Expert(*found)
