"""WeightSource: the weights of a model on disk, in any format that goldsmith reads."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol

from torch import Tensor

from ..experts_spec import ExpertsSpec
from .conversions import ConversionGroup
from .formats.layer import CodedLayer
from .formats.scheme import CodeFormat, Scheme
from .per_expert import PerExpertTensor

Progress = Callable[[int, int | None, str], None]
GIB = 2**30


class WeightSource(Protocol):
    """The tensors of a checkpoint by the model's own names, each read when it is requested."""

    folder: Path
    mapped: bool  # whether `get` may return pages of the mapped files

    @property
    def method(self) -> str | None:
        """The quantisation, by transformers' name; None for plain weights."""

    @property
    def label(self) -> str:
        """What messages call this checkpoint."""

    @property
    def sources(self) -> list[Path]:
        """The files that determine the weights."""

    @property
    def names(self) -> Mapping[str, str | ConversionGroup]:
        """The model's name of each tensor -> its name in the files, or the tensors that make it."""

    def stored_name(self, name: str) -> str:
        """The name under which the files hold a tensor: its own, or that of one which the model ties to it."""

    def below(self, path: str) -> set[str]:
        """Names of the tensors below a module's path, relative to it."""

    def get(self, name: str) -> Tensor:
        """The tensor with this name in the model."""

    def scheme(self, layer: str) -> Scheme | None:
        """How the linear layer with this name in the model is stored; None if it cannot be quantised."""

    def siblings(self, name: str) -> Mapping[str, str]:
        """The tensors of the same layer: the last part of each name -> the name."""

    def per_expert(self, name: str, experts: int) -> PerExpertTensor | None:
        """The tensor [E, ...], if the files hold each expert by itself, so that they can be read one by one."""

    def experts(self, path: str, spec: ExpertsSpec) -> CodedLayer | None:
        """The experts at this path in codes; None if they are plain weights, or gpt-oss's mxfp4."""


class DecodedExperts(UserWarning):
    """The codes of a checkpoint's experts fit no format of goldsmith, so they are decoded to float32."""


def stored_format(source: WeightSource, specs: Mapping[str, ExpertsSpec], *, alike: bool = False) -> str | None:
    """The format that holds the experts' codes; None for plain weights and for codes that must be decoded.

    alike   all layers must have the same format, so that one store holds them: otherwise all are decoded
    """
    layers = [layer for path, spec in specs.items() if (layer := source.experts(path, spec)) is not None]
    targets = {layer.target for layer in layers}
    if alike and (len(targets) > 1 or len(layers) not in (0, len(specs))):
        for layer in layers:
            layer.target = "its layers are stored in different ways"
        return None
    formats = [target.format for target in targets if isinstance(target, CodeFormat)]
    return formats[0] if formats else "mxfp4" if source.method == "mxfp4" else None


def check_format(source: WeightSource, format: str, specs: Mapping[str, ExpertsSpec]) -> None:
    """Raises ValueError for a format that would requantise codes; warns if the experts are decoded to float32."""
    stored = stored_format(source, specs)
    if stored and format not in ("auto", stored):
        raise ValueError(
            f"goldsmith.hf.convert: format is {format!r}, but {source.label} holds {stored} codes ({source.method}), "
            f'which are never requantised: use format="auto" or {stored!r}'
        )
    warn_decoded(source, format, specs)


def warn_decoded(source: WeightSource, format: str, specs: Mapping[str, ExpertsSpec]) -> None:
    """Warns if the experts are decoded to float32: they take 4 bytes for each weight then."""
    layers = [layer for path, spec in specs.items() if (layer := source.experts(path, spec)) is not None]
    reasons = [layer.target for layer in layers if isinstance(layer.target, str) and layer.floats is None]
    if not reasons or format != "auto":
        return
    size = 12 * sum(s.num_experts * s.hidden_size * s.intermediate_size for s in specs.values())
    memory = f"{size / GIB:.3g} GiB" if size > GIB / 10 else f"{size / 2**20:.3g} MiB"
    warnings.warn(
        f"{source.label}: no format of goldsmith holds the codes of its experts ({layers[0].label}: {reasons[0]}). "
        f"They are decoded to float32 exactly and take {memory}; another format, such as bf16 or int8, takes "
        "less and rounds them",
        DecodedExperts,
        stacklevel=3,
    )
