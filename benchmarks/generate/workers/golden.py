"""The golden: plain transformers in float64, and in an engine's arithmetic with random roundings."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from goldsmith.experts.packed.formats import FORMATS, decode
from goldsmith.experts.packed.quantisation import quantise

from ..engines.arithmetic import Arithmetic
from ..model.gguf_files import read_experts
from .plain import DTYPES, TransformersEngine, plain_model
from .rounding import InFloat64, RandomRounding


class SharedExperts:
    """[E, out, in] as transformers indexes it; equal experts are one tensor."""

    def __init__(self, tensors: list[Tensor]) -> None:
        self.tensors = tensors

    def __getitem__(self, expert: Tensor) -> Tensor:
        return self.tensors[int(expert)]


class GoldenEngine(TransformersEngine):
    """The golden: plain transformers in float64, and in an engine's arithmetic with random roundings.

    The file's numbers are held in float32, which has all of them exactly. Sequences of the same length are one batch,
    so that weights are read once.
    """

    def load(self) -> str:
        self.held = ("", "")
        self.experts = read_experts(Path(self.options["path"]))
        return ""

    def golden_logits(self, ids: list[int], sequences: int, packs: str) -> Tensor:
        """In float64, returned as float64; packs: the dense part has the weights of this format."""
        self._hold("float64", packs)
        with InFloat64():
            x = self.model.get_input_embeddings()(_rows(ids, sequences)).double()
            return self.model(inputs_embeds=x).logits.double()

    def rounded_logits(self, ids: list[int], sequences: int, seed: int, text: str) -> Tensor:
        arithmetic = Arithmetic.parse(text)
        self._hold(arithmetic.dtype, arithmetic.packs)
        torch.manual_seed(seed)
        experts, routers = {id(t) for each in self._shared() for t in each.tensors}, set[int]()
        for module in self.model.modules():
            if type(module).__name__.endswith(("Router", "Gate")):
                routers |= {id(p) for p in module.parameters()}
        with RandomRounding(arithmetic, experts, routers, seed):
            return self.model(_rows(ids, sequences)).logits.float()

    def _hold(self, dtype: str, packs: str) -> None:
        """A model for this dtype; in float64 it has float32 weights, which `InFloat64` widens."""
        kept = "float32" if dtype == "float64" else dtype
        held = (dtype if packs else kept, packs)
        if self.held == held:
            return
        self.model = None
        self.model, self.held = plain_model(self.options, DTYPES[kept], "eager", experts=False), held
        self._put_experts(DTYPES[kept])
        if packs:
            _round_dense(self.model, packs, DTYPES[dtype])

    def _put_experts(self, dtype: torch.dtype) -> None:
        converted: dict[int, Tensor] = {}
        for name, tensors in self.experts.items():
            path, _, parameter = name.rpartition(".")
            for tensor in tensors:
                if id(tensor) not in converted:
                    converted[id(tensor)] = tensor.to(dtype)
            module = self.model.get_submodule(path)
            del module._parameters[parameter]
            setattr(module, parameter, SharedExperts([converted[id(tensor)] for tensor in tensors]))

    def _shared(self) -> Iterator[SharedExperts]:
        for module in self.model.modules():
            yield from (each for each in vars(module).values() if isinstance(each, SharedExperts))


def _rows(ids: list[int], sequences: int) -> Tensor:
    return torch.tensor(ids).view(sequences, -1)


def _round_dense(model: Any, format: str, dtype: torch.dtype) -> None:
    """Round the weights of linear layers to a packed format, as goldsmith does, and keep them in `dtype`."""
    for module in model.modules():
        if type(module) is nn.Linear:
            fmt, weight = FORMATS[format], module.weight
            codes = quantise(fmt, weight.float(), fmt.group, fmt.scales[0], "bench generate")
            module.weight = nn.Parameter(decode(fmt, codes, dtype), requires_grad=False)
