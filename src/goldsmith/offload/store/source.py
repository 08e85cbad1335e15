"""Sources of weights, layer by layer and expert by expert, in canonical form: gate, up [I, H], down [H, I]."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import torch
from torch import Tensor

from ...core.processors import made_ahead, worth
from ...core.shapes import ShapeError, kind
from ...experts import PackedExperts
from ...experts.packed.formats import Codes
from ...experts.packed.inputs import Stack, check_finite, zip_experts
from ...experts.packed.layout import Expert, Layout, read_expert
from ...experts.packed.memory import frozen
from ...experts.packed.quantisation import quantise

KEYS = ("gate_up", "down", "gate_up_bias", "down_bias")
BIASES = KEYS[2:]
_THREADS = 8  # that read experts
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_HINT = "; convert float64 with .float(), and give codes as a PackedExperts from an importer of goldsmith.experts"


@dataclass(frozen=True)
class FloatExpert:
    """One expert of a source in floating point: its matrices in their own dtype, and its biases."""

    gate: Tensor
    up: Tensor
    down: Tensor
    biases: dict[str, Tensor] = field(default_factory=dict)

    @property
    def matrices(self) -> dict[str, Tensor]:
        return {"gate": self.gate, "up": self.up, "down": self.down}


@dataclass(frozen=True)
class CodedExpert:
    """One expert of a source in codes, which are kept as they are.

    sampled   the matrices hold only the rows of the sample (samples.py)
    """

    layout: Layout
    expert: Expert
    biases: dict[str, Tensor] = field(default_factory=dict)
    sampled: bool = False


@dataclass(frozen=True)
class CodedExperts:
    """The experts of a layer in codes, read a few ahead by threads that call `read`; biases [E, size]

    read_samples   reads only the rows of every expert's sample; None if that takes as long as the whole
    stored         (kind, bytes) of the tensors in the files that decide all codes; None if codes must be read instead
    """

    layout: Layout
    read: Callable[[int], Expert]
    biases: dict[str, Tensor] = field(default_factory=dict)
    read_samples: Callable[[], list[Expert]] | None = None
    stored: tuple[tuple[str, memoryview], ...] | None = None

    @property
    def num_experts(self) -> int:
        return self.layout.num_experts

    @property
    def format(self) -> str:
        return self.layout.format

    def whole(self) -> Iterator[CodedExpert]:
        threads = min(_THREADS, max(1, worth() // 2))
        return made_ahead(self._read_apart, range(self.num_experts), threads)

    def samples(self) -> Iterator[CodedExpert]:
        """As `whole`, where possible with the rows of the sample only."""
        if self.read_samples is None:
            return self.whole()
        with frozen():
            return iter([self._expert(e, sample, sampled=True) for e, sample in enumerate(self.read_samples())])

    def expert(self, e: int) -> CodedExpert:
        """Expert e, read in the calling thread, which must be `frozen`."""
        return self._expert(e, self.read(e))

    def _read_apart(self, e: int) -> CodedExpert:
        with frozen():  # the mode is of a thread
            return self.expert(e)

    def _expert(self, e: int, expert: Expert, sampled: bool = False) -> CodedExpert:
        return CodedExpert(self.layout, expert, {name: bias[e] for name, bias in self.biases.items()}, sampled)


Weights: TypeAlias = Mapping[str, Any] | PackedExperts | CodedExperts
Source: TypeAlias = Mapping[int, Weights] | Iterable[tuple[int, Weights]]


def layers_of(source: Source, op: str) -> Iterator[tuple[int, Weights]]:
    """(layer, weights) of a mapping or an iterable; refuses a repeated layer."""
    pairs = source.items() if isinstance(source, Mapping) else source
    if not isinstance(pairs, Iterable) or isinstance(source, (str, bytes, Tensor)):
        raise TypeError(
            f"{op}: source is {kind(source)}, expected the folder of a checkpoint, a mapping of layer to weights, or "
            "an iterable of (layer, weights)"
        )
    seen: set[int] = set()
    for pair in pairs:
        if not (isinstance(pair, tuple) and len(pair) == 2 and type(pair[0]) is int):
            raise TypeError(
                f"{op}: source yields {pair!r:.80}, expected pairs (layer, weights) with a whole number first"
            )
        layer, weights = pair
        del pair
        if layer < 0 or layer in seen:
            again = " twice" if layer in seen else ""
            raise ValueError(f"{op}: source yields layer {layer}{again}, expected numbers from 0 on, each once")
        seen.add(layer)
        yield layer, weights
        del weights  # frees the layer before the source creates the next one


def experts_of(weights: Weights, op: str, *, sampled: bool = False) -> Iterator[FloatExpert | CodedExpert]:
    """Every expert of a layer, one at a time. Raises ShapeError, TypeError or ValueError for invalid weights.

    sampled   only the sample of each is needed
    """
    if isinstance(weights, PackedExperts):
        weights = coded(weights)
    if isinstance(weights, CodedExperts):
        yield from weights.samples() if sampled else weights.whole()
    else:
        yield from float_experts(weights, op)


def float_experts(weights: Weights, op: str) -> Iterator[FloatExpert]:
    """As `experts_of`, for weights that are not in codes."""
    if not isinstance(weights, Mapping):
        raise TypeError(
            f"{op}: weights are {kind(weights)}, expected a dict with {', '.join(KEYS[:2])} or a PackedExperts"
        )
    unknown = [key for key in weights if key not in KEYS]
    missing = [key for key in KEYS[:2] if weights.get(key) is None]
    if unknown or missing:
        what = f"has the key {unknown[0]!r}" if unknown else f"has no {missing[0]!r}"
        raise ValueError(f"{op}: the dict of weights {what}; the keys are {', '.join(KEYS)}, and biases are optional")
    gate_up = weights["gate_up"]
    pair = isinstance(gate_up, (tuple, list)) and len(gate_up) == 2 and not _is_experts(gate_up)
    fronts = [("gate", gate_up[0], "I H"), ("up", gate_up[1], "I H")] if pair else [("gate_up", gate_up, "2I H")]
    biases = [name for name in BIASES if weights.get(name) is not None]
    stacks = [Stack(op, name, value, dims, _FLOATS, _HINT) for name, value, dims in fronts]
    stacks += [Stack(op, "down", weights["down"], "H I", _FLOATS, _HINT)]
    stacks += [Stack(op, name, weights[name], "2I" if name == BIASES[0] else "H", _FLOATS, _HINT) for name in biases]
    _, rows = zip_experts(op, stacks)
    e = 0
    for row in rows:  # `enumerate` would keep the last row alive while the next one is read
        yield _floats(op, e, row, pair, biases)
        del row
        e += 1


def _is_experts(value: Iterable[object]) -> bool:
    """Whether a pair holds the matrices of two experts, not gate and up of all experts."""
    return all(isinstance(one, Tensor) and one.dim() == 2 for one in value)


def _floats(op: str, e: int, row: tuple[Tensor, ...], pair: bool, biases: list[str]) -> FloatExpert:
    if pair:
        gate, up, down, *rest = row
    else:
        both, down, *rest = row
        if both.shape[0] % 2:
            raise ShapeError(f"{op}: gate_up of expert {e} has {both.shape[0]} rows, expected an even number")
        gate, up = both.chunk(2)
    if 0 in gate.shape or gate.shape != up.shape or tuple(down.shape) != (gate.shape[1], gate.shape[0]):
        raise ShapeError(
            f"{op}: expert {e} has gate {list(gate.shape)}, up {list(up.shape)} and down {list(down.shape)}, expected "
            "[I, H], [I, H] and [H, I]"
        )
    bias_of = dict(zip(biases, rest))
    for name, bias in bias_of.items():
        size = 2 * gate.shape[0] if name == BIASES[0] else down.shape[0]
        if tuple(bias.shape) != (size,):
            raise ShapeError(f"{op}: {name} of expert {e} is {list(bias.shape)}, expected [{size}]")
    return FloatExpert(gate, up, down, bias_of)


def coded(base: PackedExperts) -> CodedExperts:
    """The experts of packed weights in codes."""
    base = base.to("cpu")
    biases = {name: bias for name in BIASES if (bias := getattr(base, name)) is not None}
    return CodedExperts(base.layout, partial(read_expert, base.layout, base.gate_up, base.down), biases)


def encode(expert: FloatExpert, layout: Layout, where: str, e: int, *, allow_nonfinite: bool) -> Expert:
    """An expert's floats as codes of a layout. The ValueError names the first non-finite number."""
    for name, tensor in {**expert.matrices, **expert.biases}.items():
        if not allow_nonfinite:
            check_finite(where, f"{name} of expert {e}", tensor)
    codes: list[Codes] = []
    for name, matrix in expert.matrices.items():
        if allow_nonfinite or matrix.dtype == layout.kind.codes:  # the dtype already fits: no copy
            codes.append(Codes(matrix.to(layout.kind.codes)))
        else:
            at = f"{where}: expert {e}, {name}"
            codes.append(quantise(layout.kind, matrix, layout.group_size, layout.scale_dtype, at))
    return Expert(*codes)
