"""A slow recomputation of a layer's experts, stage by stage, to find where a number stopped being finite."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from ...experts._activations import factors
from ..store.header import ActivationOptions

STAGES = ("gate_up", "activation", "product", "down")
Hook = Callable[[str, Tensor], Tensor]


def stages(
    x: Tensor, weights: Mapping[str, Tensor], options: ActivationOptions, hook: Hook | None = None,
    deltas: Mapping[str, Tensor] | None = None,
) -> Iterator[tuple[str, Tensor]]:  # fmt: skip
    """Yields (stage, its result) for rows x [n, H] of one expert, in order; the last result is the rows [n, H] float32

    Float32, rounded where the kernels round: g, u and h to x's dtype. hook(stage, result) may replace a result. deltas:
    what an adapter adds to "gate_up" and "down".
    """
    added = deltas or {}
    to = x.dtype if x.dtype == torch.bfloat16 else torch.float32

    def seen(stage: str, value: Tensor) -> Tensor:
        return value if hook is None else hook(stage, value)

    both = x.float() @ weights["gate_up"].T
    if "gate_up_bias" in weights:
        both = both + weights["gate_up_bias"]
    if "gate_up" in added:
        both = both + x.float() @ added["gate_up"].T
    both = seen("gate_up", both.to(to).float())
    yield "gate_up", both
    g, u = both.chunk(2, -1)
    act, factor = factors(options["activation"], g, u, options["alpha"], options["limit"])
    act = seen("activation", act)
    yield "activation", act
    h = seen("product", (act * factor).to(to).float())
    yield "product", h
    y = h @ weights["down"].T
    if "down_bias" in weights:
        y = y + weights["down_bias"]
    if "down" in added:
        y = y + h @ added["down"].T
    yield "down", seen("down", y)
