"""Schemes: the scheme of every linear layer of a quantised checkpoint, from its quantization_config."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import awq, compressed_tensors, fp8, gptq, modelopt
from .scheme import Scheme

ONE_FOR_ALL: dict[str, Callable[[Mapping[str, object]], Scheme]] = {
    "gptq": gptq.scheme_of,
    "awq": awq.scheme_of,
    "fp8": fp8.scheme_of,
    "modelopt": modelopt.scheme_of,
}
SUPPORTED = ("compressed-tensors", *ONE_FOR_ALL, "mxfp4")


class Schemes:
    """The schemes of a checkpoint: one for all its linear layers, or one for each group of layers.

    A layer's tensors show whether it is stored in codes. Raises ValueError for an unsupported quantisation.
    """

    def __init__(self, folder: Path, settings: Mapping[str, Any]) -> None:
        self.method = settings.get("quant_method")
        self._rules: list[tuple[list[str], Scheme]] = []
        if self.method not in SUPPORTED:
            raise ValueError(
                f"{folder}: quantised with {self.method!r}; supported are {', '.join(SUPPORTED)}, GGUF files and plain "
                "weights"
            )
        try:
            if self.method == "compressed-tensors":
                self._rules = compressed_tensors.schemes_of(settings)
            elif self.method != "mxfp4":  # gpt-oss's experts have no linear layers
                self._rules = [(["Linear"], ONE_FOR_ALL[str(self.method)](settings))]
        except ValueError as error:
            raise ValueError(f"{folder}: {error}") from None
        except (AttributeError, TypeError, KeyError) as error:
            raise ValueError(f"{folder}: its quantization_config cannot be read: {error!r}") from error

    @property
    def all(self) -> list[Scheme]:
        return [scheme for _, scheme in self._rules]

    def of(self, layer: str) -> Scheme | None:
        """The scheme of the linear layer with this name in the files; None if no group of layers includes it."""
        for targets, scheme in self._rules:
            if any(_names(target, layer) for target in targets):
                return scheme
        return next((scheme for targets, scheme in self._rules if "Linear" in targets), None)


def _names(target: str, layer: str) -> bool:
    if not target.startswith("re:"):
        return target == layer
    try:
        return re.match(target[3:], layer) is not None
    except re.error as error:
        raise ValueError(f"quantization_config has the target {target!r}: {error}") from error
