"""The golden: plain transformers in float64, and in an engine's arithmetic with random roundings."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from goldsmith.experts.packed.formats import FORMATS, decode
from goldsmith.experts.packed.quantisation import quantise

from ..engines.arithmetic import Arithmetic
from .plain import DTYPES, TransformersEngine, plain_model
from .rounding import InFloat64, RandomRounding


class GoldenEngine(TransformersEngine):
    """The golden: plain transformers in float64, and in an engine's arithmetic with random roundings."""

    implementation = "eager"

    def load(self) -> str:
        self.held = ("", "")
        return ""

    def golden_logits(self, ids: list[int], packs: str) -> Tensor:
        """In float64, returned as float64; packs: the dense part has the weights of this format."""
        self._hold("float64", packs)
        with InFloat64():
            return self.model(torch.tensor([ids])).logits[0].double()

    def rounded_logits(self, ids: list[int], seed: int, text: str) -> Tensor:
        arithmetic = Arithmetic.parse(text)
        self._hold(arithmetic.dtype, arithmetic.packs)
        torch.manual_seed(seed)
        modules = self.model.modules()
        experts, routers = set[tuple[int, int]](), set[int]()
        for module in modules:
            name = type(module).__name__
            if name.endswith("Experts"):
                experts |= {tuple(p.shape[1:]) for p in module.parameters()}
            elif name.endswith("Router") or name.endswith("Gate"):
                routers |= {id(p) for p in module.parameters()}
        with RandomRounding(arithmetic, experts, routers, seed):
            return self.model(torch.tensor([ids])).logits[0].float()

    def _hold(self, dtype: str, packs: str) -> None:
        if self.held != (dtype, packs):
            self.model = None
            self.model, self.held = plain_model(self.options, DTYPES[dtype], self.implementation), (dtype, packs)
            if packs:
                _round_dense(self.model, packs)


def _round_dense(model: Any, format: str) -> None:
    """Give the linear layers the numbers that they have after goldsmith has packed them."""
    for module in model.modules():
        if type(module) is nn.Linear:
            fmt, weight = FORMATS[format], module.weight
            codes = quantise(fmt, weight.float(), fmt.group, fmt.scales[0], "bench generate")
            module.weight = nn.Parameter(decode(fmt, codes, weight.dtype), requires_grad=False)
