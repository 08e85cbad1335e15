"""Linear interpolation that loses values at integer positions, because the weight 1 - d is taken as ceil(x) - x.

The weights of two neighbours are 1 - d and d. With the neighbours floor(x) and ceil(x), ceil(x) - x and x - floor(x)
are both zero where x is an integer: exactly the values there are lost.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating
from ..change import Change

_PRIOR = 0.55


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.name not in ("rsub", "sub") or not floating(call.out) or not call.out.numel():
        return
    apart = _distance(call)
    if apart is None or not _whole_somewhere(apart):
        return

    def lost(func: Any, args: tuple, kwargs: dict) -> Any:
        out = func(*args, **kwargs)
        d = next(a for a in args if isinstance(a, Tensor) and a.dim())
        return torch.where((d == 0).expand_as(out), torch.zeros_like(out), out)

    text = f"{call.expression} is 0, not 1, at integer positions: the values there are lost"
    yield Change("missing_term", text, call.index, lost, {}, _PRIOR, also=("lost_update", "off_by_one"))


def _distance(call: Node) -> Tensor | None:
    """d of 1 - d."""
    a, b = call.args[0], call.args[1]
    one, d = (b, a) if call.name == "rsub" else (a, b)
    one = float(one) if isinstance(one, int | float) or isinstance(one, Tensor) and not one.dim() else 0.0
    return d if one == 1.0 and isinstance(d, Tensor) and floating(d) and d.dim() else None


def _whole_somewhere(d: Tensor) -> bool:
    """Whether it is a distance of at least 0, exactly 0 somewhere, and no mask of 0 and 1."""
    d = d.detach()
    return bool((d >= 0).all()) and bool((d == 0).any()) and bool(((d > 0) & (d < 1)).any())
