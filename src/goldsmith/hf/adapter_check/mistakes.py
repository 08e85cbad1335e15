"""Mistakes that runtimes are known to make with adapters on experts, as variants of the adapter itself.

Each variant is computed by the engine. A runtime whose numbers are nearest to a variant makes that mistake.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from ...experts._factors import LayerLora
from ..adapter.fitting import FittedAdapter
from ..adapter.layout import PeftFactors
from ..adapter.reading import split_factors
from ..experts_spec import ExpertsSpec

Layers = dict[int, LayerLora]

ARRIVES = "arrives"
# name -> (a sentence, whether the part outside the experts is applied)
MISTAKES: dict[str, tuple[str, bool]] = {
    "dropped": ("drops the adapter", False),
    "experts_dropped": ("drops the experts' part of the adapter", True),
    "others_dropped": ("drops everything but the experts' part", False),
    "b_transposed": ("transposes B: reads its columns expert by expert, but peft's rank is the outer index", True),
    "a_transposed": ("transposes A: reads its rows rank by rank, but peft's expert is the outer index", True),
    "gate_up_swapped": ("swaps gate and up", True),
    "interleaving": ("splits gate and up in the wrong way: halves for alternating rows, or the reverse", True),
    "unscaled": ("leaves out the scaling alpha / r", True),
    "scaled_twice": ("applies the scaling alpha / r twice", True),
    "patterns_ignored": ("ignores rank_pattern and alpha_pattern, so the scaling is that of the config's r", True),
}


def variants(adapter: FittedAdapter, layers: Mapping[int, tuple[str, ExpertsSpec]]) -> dict[str, tuple[Layers, bool]]:
    """{mistake: (the experts' LoRA with it, whether peft's layers outside the experts are on)}

    layers: (path, spec) of each experts module by its layer's number. Variants that change nothing are left out.
    """
    config = adapter.config
    uniform = config["lora_alpha"] / (config["r"] ** 0.5 if config.get("use_rslora") else config["r"])

    def changed(change: str) -> Layers:
        loras: Layers = {}
        for index, (path, spec) in layers.items():
            by_parameter = {
                name: _with(change, factors, uniform) for name, factors in adapter.experts.get(path, {}).items()
            }
            if not by_parameter:
                continue
            wrong = ExpertsSpec(**{**spec.__dict__, "interleaved": not spec.interleaved})
            ranks = adapter.ranks.get(path) if change != "interleaving" else None
            factors, scaling, _ = split_factors(wrong if change == "interleaving" else spec, by_parameter, ranks)
            if change == "gate_up_swapped" and {"gate", "up"} <= set(factors):
                factors = {**factors, "gate": factors["up"], "up": factors["gate"]}
            loras[index] = LayerLora(factors, scaling)
        return loras

    result: dict[str, tuple[Layers, bool]] = {}
    both = bool(adapter.experts) and bool(adapter.peft or adapter.whole)
    plain = changed("")
    for name, (_, others) in MISTAKES.items():
        if name == "dropped":
            result[name] = {}, False
        elif name == "experts_dropped" and both:
            result[name] = {}, True
        elif name == "others_dropped" and both:
            result[name] = plain, False
        elif name not in ("experts_dropped", "others_dropped") and adapter.experts:
            variant = changed(name)
            if not _same(variant, plain):
                result[name] = variant, others
    return result


def _with(change: str, factors: PeftFactors, uniform: float) -> PeftFactors:
    a, b, scaling = factors.a, factors.b, factors.scaling
    experts, rank = a.shape[:2]
    if change == "b_transposed":  # [out, r E] with the expert as the outer index
        flat = b.permute(1, 2, 0).reshape(b.shape[1], rank * experts)
        b = flat.reshape(b.shape[1], experts, rank).permute(1, 0, 2).contiguous()
    elif change == "a_transposed":  # [r E, in] with the rank as the outer index
        a = a.reshape(experts * rank, -1).reshape(rank, experts, -1).transpose(0, 1).contiguous()
    elif change == "unscaled":
        scaling = 1.0
    elif change == "scaled_twice":
        scaling = scaling**2
    elif change == "patterns_ignored":
        scaling = uniform
    return PeftFactors(a, b, scaling)


def _same(one: Layers, other: Layers) -> bool:
    def deltas(layers: Layers) -> list[Tensor]:
        return [t for _, lora in sorted(layers.items()) for _, t in sorted(lora.of_expert(0).items())]

    return all(torch.equal(a, b) for a, b in zip(deltas(one), deltas(other), strict=True))
