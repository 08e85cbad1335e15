"""QuantisedLayer: the experts of one layer of a quantised checkpoint, one matrix at a time."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch
from torch import Tensor

from ....experts import PackedExperts, pack
from ....experts.packed.formats import FORMATS, Codes
from ....experts.packed.importers import imported
from ....experts.packed.layout import Expert
from ...experts_spec import ExpertsSpec
from .scheme import CodeFormat, Scheme

PROJECTIONS = {"gate_proj": "gate", "w1": "gate", "up_proj": "up", "w3": "up", "down_proj": "down", "w2": "down"}
NAMES = ("gate", "up", "down")


class CodedLayer(Protocol):
    """A layer's experts in codes. `target`: the format that holds them, or the reason why none does."""

    where: str  # file or folder and path, for messages
    label: str  # the kind of quantisation, for messages
    spec: ExpertsSpec
    target: CodeFormat | str
    floats: torch.dtype | None  # of weights that the files hold as floats; None for codes

    def codes(self, projection: str, expert: int) -> Codes: ...

    def rows(self, projection: str, rows: Sequence[int]) -> list[Codes] | None:
        """These rows of every expert's matrix; None if they cannot be read without the others."""

    def stored(self) -> tuple[tuple[str, memoryview], ...] | None:
        """(kind, bytes) of the tensors that hold all codes and biases; None if the files do not keep them apart."""

    def weights(self, projection: str, expert: int) -> Tensor: ...

    def biases(self) -> tuple[Tensor | None, Tensor | None]: ...


class TensorsByName(Protocol):
    """What a layer needs of a checkpoint."""

    @property
    def label(self) -> str: ...

    def get(self, name: str) -> Tensor: ...

    def below(self, path: str) -> set[str]: ...

    def scheme(self, layer: str) -> Scheme | None: ...


def code_format(layer: CodedLayer) -> CodeFormat:
    """The format that holds the layer's codes; raises ValueError if none does: its weights can be read instead."""
    if isinstance(layer.target, str):
        raise ValueError(f"{layer.where}: no format holds its codes ({layer.target}); read its weights")
    return layer.target


class QuantisedLayer:
    """The experts at `path`; raises ValueError for a missing or unknown tensor."""

    def __init__(self, source: TensorsByName, path: str, spec: ExpertsSpec) -> None:
        self._source, self.spec, self.where = source, spec, f"{source.label}: {path}"
        self.floats: torch.dtype | None = None
        self.label, self._path = "codes", path
        self._reading = threading.Lock()  # a source keeps what it has converted
        self._names: dict[tuple[str, int], dict[str, str]] = {}
        self._schemes: dict[str, Scheme] = {}
        unknown = []
        for name in sorted(source.below(path)):
            match = re.fullmatch(r"(\d+)\.(\w+)\.(\w+)", name)
            projection = PROJECTIONS.get(match[2]) if match else None
            if match is None or projection is None or int(match[1]) >= spec.num_experts:
                unknown.append(name)
                continue
            scheme = self._scheme(projection, f"{path}.{match[1]}.{match[2]}")
            part = scheme.aliases.get(match[3], match[3])
            if part in scheme.known:
                self._names.setdefault((projection, int(match[1])), {})[part] = f"{path}.{name}"
            else:
                unknown.append(name)
        if unknown:
            raise ValueError(f"{source.label}: {path}.{unknown[0]} is not known among experts of {self.label}")
        for projection in NAMES:
            for expert in range(spec.num_experts):
                self._check_whole(projection, expert)
        targets = {scheme.target(spec.hidden_size, spec.intermediate_size) for scheme in self._schemes.values()}
        reasons = sorted(target for target in targets if isinstance(target, str))
        self.target: CodeFormat | str = (
            targets.pop() if len(targets) == 1 else (reasons or ["its projections differ"])[0]
        )

    def codes(self, projection: str, expert: int) -> Codes:
        target = code_format(self)
        parts = self._parts(projection, expert)
        try:
            return self._checked(projection, self._schemes[projection].codes(parts, target), target)
        except ValueError as error:
            raise self._named(projection, expert, error) from error

    def rows(self, projection: str, rows: Sequence[int]) -> None:
        return None

    def stored(self) -> None:
        return None

    def weights(self, projection: str, expert: int) -> Tensor:
        try:
            values = self._schemes[projection].weights(self._parts(projection, expert))
        except ValueError as error:
            raise self._named(projection, expert, error) from error
        if tuple(values.shape) != self._shape(projection):
            raise self._named(projection, expert, self._other_shape(projection, list(values.shape)))
        return values

    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        return None, None

    def _scheme(self, projection: str, layer: str) -> Scheme:
        if projection not in self._schemes:
            scheme = self._source.scheme(layer)
            if scheme is None:
                raise ValueError(f"{self._source.label}: {layer} has codes, but no group of the config includes it")
            self._schemes[projection] = scheme
            self.label = " and ".join(dict.fromkeys(scheme.label for scheme in self._schemes.values()))
        return self._schemes[projection]

    def _check_whole(self, projection: str, expert: int) -> None:
        names = self._names.get((projection, expert), {})
        scheme = self._schemes.get(projection)
        wanted = scheme.parts if scheme else ("tensors",)
        missing = next((part for part in wanted if part not in names), None)
        if missing:
            raise ValueError(
                f"{self._source.label}: {self._path}: expert {expert} has no {projection} {missing} ({self.label}; "
                f"the config says {self.spec.num_experts} experts)"
            )

    def _parts(self, projection: str, expert: int) -> dict[str, Tensor]:
        scheme = self._schemes[projection]
        names = self._names[projection, expert]
        with self._reading:
            return {part: self._source.get(names[part]) for part in (*scheme.parts, *scheme.optional) if part in names}

    def _checked(self, projection: str, codes: Codes, target: CodeFormat) -> Codes:
        shape = (codes.codes.shape[0], codes.codes.shape[1] * FORMATS[target.format].per_code)
        if shape != self._shape(projection):
            raise self._other_shape(projection, list(shape))
        if (
            codes.scales is not None
            and codes.scales.dtype.is_floating_point
            and not bool(codes.scales.isfinite().all())
        ):
            raise ValueError("a scale is NaN or infinite; scales must be finite numbers")
        return codes

    def _shape(self, projection: str) -> tuple[int, int]:
        hidden, inner = self.spec.hidden_size, self.spec.intermediate_size
        return (hidden, inner) if projection == "down" else (inner, hidden)

    def _other_shape(self, projection: str, shape: list[int]) -> ValueError:
        return ValueError(f"the weight is {shape}, but the model's config says {list(self._shape(projection))}")

    def _named(self, projection: str, expert: int, error: ValueError) -> ValueError:
        return ValueError(f"{self.where}: {projection} of expert {expert}: {error}")


class ExpertMatrices:
    """The weights of one projection in float32, decoded when they are requested: `pack` then holds one at a time."""

    def __init__(self, layer: CodedLayer, projection: str) -> None:
        self._layer, self._projection = layer, projection

    def __len__(self) -> int:
        return self._layer.spec.num_experts

    def __iter__(self) -> Iterator[Tensor]:
        return (self._layer.weights(self._projection, expert) for expert in range(len(self)))


def expert_of(layer: CodedLayer, e: int) -> Expert:
    """The three matrices of one expert in codes."""
    return Expert(*(layer.codes(name, e) for name in NAMES))


def packed_layer(
    layer: CodedLayer, format: str, group_size: int | None, partitions: int, op: str = "goldsmith.hf.convert"
) -> PackedExperts:
    """The layer's experts: in the format that holds its codes, otherwise decoded and packed in `format`.

    format "auto" for decoded experts is fp32, which holds them exactly; for plain floats bf16, as everywhere.
    """
    biases = layer.biases()
    target = layer.target
    if isinstance(target, CodeFormat):
        if group_size not in (None, target.group):
            own = "blocks of 128 x 128" if target.format == "fp8_block" else target.group or "one scale for each row"
            raise ValueError(
                f"{op}: group_size is {group_size}, but the codes of {layer.where} have {own}: leave it out"
            )
        count = layer.spec.num_experts
        experts = (expert_of(layer, e) for e in range(count))
        return imported(op, target.format, target.group, count, experts, partitions, None, (*biases, False))
    gate, up, down = (ExpertMatrices(layer, name) for name in NAMES)
    return pack(
        (gate, up),
        down,
        format=("fp32" if layer.floats is None else "bf16") if format == "auto" else format,
        group_size=group_size,
        gate_up_bias=biases[0],
        down_bias=biases[1],
        partitions=partitions,
    )
