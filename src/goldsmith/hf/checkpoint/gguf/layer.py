"""GgufLayer: the experts of one layer of a GGUF file, one matrix at a time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from gguf import GGMLQuantizationType as Type
from gguf.gguf_reader import ReaderTensor
from torch import Tensor

from ....experts.packed.formats import Codes
from ...experts_spec import ExpertsSpec
from ..formats.scheme import CodeFormat
from . import blocks
from .blocks import SharedFormat


class GgufLayer:
    """The experts of block `number`; raises ValueError for a missing tensor or another shape than the config's."""

    def __init__(
        self,
        where: str,
        tensors: Mapping[str, ReaderTensor],
        number: int,
        spec: ExpertsSpec,
        shared: SharedFormat | str,
    ) -> None:
        self.spec, self.where = spec, f"{where}: layer {number}"
        self._kinds: dict[str, Type] = {}
        self._data: dict[str, blocks.Bytes] = {}
        for projection in ("gate", "up", "down"):
            name = f"blk.{number}.ffn_{projection}_exps.weight"
            if name not in tensors:
                raise ValueError(f"{where}: {name} is missing")
            out, inputs = self._sizes(projection)
            shape = [int(size) for size in tensors[name].shape[::-1]]
            if shape != [spec.num_experts, out, inputs]:
                raise ValueError(f"{where}: {name} is {shape}, but the config says {[spec.num_experts, out, inputs]}")
            self._kinds[projection] = Type(tensors[name].tensor_type)
            self._data[projection] = np.asarray(tensors[name].data)  # a slice of a memmap takes five times as long
        self._stored_biases: list[ReaderTensor] = []
        self._biases = self._read_biases(where, tensors, number)
        self._shared = shared
        self.label = "GGUF"
        self.target: CodeFormat | str = shared if isinstance(shared, str) else shared.target
        kinds = set(self._kinds.values())
        dtypes = {blocks.FLOATS[kind] for kind in kinds if kind in blocks.FLOATS}
        # bfloat16 only if everything is: float32 holds all three exactly
        self.floats = None if len(dtypes) != len(kinds) else dtypes.pop() if len(dtypes) == 1 else torch.float32

    def codes(self, projection: str, expert: int) -> Codes:
        return self._codes(projection, expert, slice(None))

    def rows(self, projection: str, rows: Sequence[int]) -> list[Codes]:
        whole, experts = self._data[projection], range(self.spec.num_experts)
        shared = self._format()
        data = whole[:, rows].reshape(-1, whole.shape[-1])
        try:
            of_all = blocks.codes(self._kinds[projection], data, shared)
        except ValueError:  # the expert with the fault gets the blame
            return [self._codes(projection, expert, rows) for expert in experts]
        parts = (of_all.codes, of_all.scales, of_all.zeros)
        columns = [[None] * len(experts) if part is None else part.split(len(rows)) for part in parts]
        return [Codes(*of_one) for of_one in zip(*columns)]

    def stored(self) -> tuple[tuple[str, memoryview], ...]:
        tensors = [(kind, self._data[projection]) for projection, kind in self._kinds.items()]
        tensors += [(Type(bias.tensor_type), bias.data) for bias in self._stored_biases]
        return tuple((kind.name, data.reshape(-1).view(np.uint8).data) for kind, data in tensors)

    def _codes(self, projection: str, expert: int, rows: Sequence[int] | slice) -> Codes:
        kind, data = self._kinds[projection], self._data[projection]
        try:
            return blocks.codes(kind, data[expert][rows], self._format())
        except ValueError as error:
            raise ValueError(f"{self.where}: {projection} of expert {expert}: {error}") from error

    def _format(self) -> SharedFormat:
        if isinstance(self._shared, str):
            raise ValueError(f"{self.where}: no format holds its codes ({self._shared}); read its weights")
        return self._shared

    def weights(self, projection: str, expert: int) -> Tensor:
        try:
            values = blocks.weights(self._kinds[projection], self._data[projection][expert])
        except ValueError as error:
            raise ValueError(f"{self.where}: {projection} of expert {expert}: {error}") from error
        return values.view(self._sizes(projection)).to(self.floats or torch.float32)

    def biases(self) -> tuple[Tensor | None, Tensor | None]:
        """gate_up_bias [E, 2I], all gates first, and down_bias [E, H]."""
        if not self._biases:
            return None, None
        return torch.cat((self._biases["gate"], self._biases["up"]), 1), self._biases["down"]

    def _read_biases(self, where: str, tensors: Mapping[str, ReaderTensor], number: int) -> dict[str, Tensor]:
        """[E, out] of each projection; empty for experts without biases."""
        biases: dict[str, Tensor] = {}
        for projection in ("gate", "up", "down"):
            name = f"blk.{number}.ffn_{projection}_exps.bias"
            if (name in tensors) != self.spec.biased:
                raise ValueError(f"{where}: {name} is {'missing' if self.spec.biased else 'not known to the model'}")
            if not self.spec.biased:
                continue
            wanted = [self.spec.num_experts, self._sizes(projection)[0]]
            shape = [int(size) for size in tensors[name].shape[::-1]]
            if shape != wanted:
                raise ValueError(f"{where}: {name} is {shape}, but the config says {wanted}")
            self._stored_biases.append(tensors[name])
            biases[projection] = blocks.weights(Type(tensors[name].tensor_type), tensors[name].data).view(shape)
        return biases

    def _sizes(self, projection: str) -> tuple[int, int]:
        hidden, inner = self.spec.hidden_size, self.spec.intermediate_size
        return (hidden, inner) if projection == "down" else (inner, hidden)
