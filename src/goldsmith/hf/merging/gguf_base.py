"""GgufMerge: the merge into a GGUF file, whose numbers are decoded and written under the model's own names."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn

from ..adapter.fitting import FittedAdapter
from ..checkpoint.reader import ModelCheckpoint
from ..checkpoint.source import WeightSource
from ..experts_spec import ExpertsSpec
from .merged_tensors import MergeWork, Source
from .names import natural_key


class GgufMerge(MergeWork):
    """As MergeWork; each parameter of an experts module is one tensor, as in the model, or codes of each expert."""

    def __init__(
        self, source: WeightSource, model: nn.Module, specs: dict[str, ExpertsSpec], adapter: FittedAdapter,
        format: str | None,
    ) -> None:  # fmt: skip
        self._source = source
        self._stacks: tuple[str, dict[str, Tensor]] = ("", {})  # of the experts module that is being written
        super().__init__(cast("ModelCheckpoint", source), model, specs, adapter, format)

    def _items(self) -> list[tuple[str, Source]]:
        experts = [f"{path}.{name}" for path, spec in self.specs.items() for name in spec.names]
        return [(name, name) for name in sorted((*self._source.names, *experts), key=natural_key)]

    def _piece(self, name: str, source: Source) -> dict[str, Tensor]:
        path, _, parameter = name.rpartition(".")
        if path not in self.specs:
            return {name: self._outside(name, self._source.get(name))}
        if self._stacks[0] != path:
            self._stacks = path, self._decoded_experts(path)
        return self._whole_stack(name, name, self._stacks[1][parameter])

    def _decoded_experts(self, path: str) -> dict[str, Tensor]:
        """The module's parameters by name, in float32 or the file's own floats."""
        spec = self.specs[path]
        layer = self._source.experts(path, spec)
        if layer is None:
            raise ValueError(f"{self._source.label}: {path} holds no experts")
        stacks = {
            name: torch.stack([layer.weights(name, e) for e in range(spec.num_experts)])
            for name in ("gate", "up", "down")
        }
        return spec.own_layout(torch.cat((stacks["gate"], stacks["up"]), 1), stacks["down"], *layer.biases())
