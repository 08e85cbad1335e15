"""Verification before timing: the assay compares the engine, at the timed sizes, with experts.moe in float64."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from goldsmith.assay import Target, case, check
from goldsmith.assay.declare.case import Make
from goldsmith.experts.moe import reference
from goldsmith.offload.engine import Engine

from .shapes import Layers

ROWS = 2  # tokens that are judged; the others only make the engine take the path of so many tokens


def golden(layers: Layers, layer: int, ids: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """y of a few tokens as a function of x and routing weights, in x's dtype but at least float32.

    The weights are the plain model's, or the store's decoded numbers where its format rounds.
    """
    used, index = ids.cpu().unique(return_inverse=True)
    both, index = layers.exact_weights(layer, used.tolist()), index.to(ids.device)
    scales = dict.fromkeys(("gate_scale", "up_scale", "down_scale"), 1.0)

    def y(x: Tensor, weights: Tensor) -> Tensor:
        wide = torch.promote_types(x.dtype, torch.float32)
        arguments = (x, index, weights, *(t.to(wide) for t in both), *(None,) * 9)
        return reference.forward(*arguments, layout="", dropout=0.0, save=False, **scales, **layers.store.options)[0]

    return y


def verify(engine: Engine, layers: Layers, tokens: int) -> tuple[bool, str]:
    """(passed, how it was checked) for calls of this many tokens, or (False, first finding)."""
    layer, k = layers.numbers[-1], layers.shape.k
    E, H = layers.shape.E, layers.shape.H
    rows = min(ROWS, tokens)
    make = torch.Generator().manual_seed(2)
    more_x = torch.randn(tokens - rows, H, generator=make).bfloat16().to(engine.device)
    best = torch.rand(tokens - rows, E, generator=make).topk(k)
    more = (more_x, best.indices.to(engine.device), best.values.to(engine.device))

    def candidate(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        others = (more[0].to(x.dtype), *more[1:])
        arguments = (torch.cat(pair) for pair in zip((x, ids, weights), others, strict=True))
        return engine(layer, *arguments)[:rows]

    chosen = torch.rand(rows, E, generator=make).topk(k).indices.to(engine.device)
    exact = golden(layers, layer, chosen)

    @case(T=[rows], why=f"{tokens} tokens a call")
    def drawn(make: Make, T: int) -> dict[str, Tensor]:
        weights = make.uniform(T, k, dtype=torch.float32)
        return {"x": make.normal(T, H), "ids": chosen.clone(), "weights": weights}

    def wanted(x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        return exact(x, weights)

    target = Target(
        candidate, wanted, cases=drawn, backward=None, stored={"g": "x", "u": "x", "h": "x"}, dtypes=(torch.bfloat16,),
        name="offload.Engine",
    )  # fmt: skip
    report = check(target, dtype=torch.bfloat16, device=engine.device, probes=["values"], raises=False)
    if report.ok:
        return True, f"assay.check, {rows} of {tokens} tokens, bfloat16"
    return False, report.findings[0].text if report.findings else report.verdict
