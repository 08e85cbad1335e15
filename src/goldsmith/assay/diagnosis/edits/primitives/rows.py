"""The primitives that repeat the rows of a smaller operand."""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor


def unrepeated(a: Tensor) -> Tensor:
    """The expanded tensor before its expansion."""
    for d, (n, step) in enumerate(zip(a.shape, a.stride(), strict=True)):
        a = a.narrow(d, 0, 1) if step == 0 and n > 1 else a
    return a


def repeat_rows(a: Tensor, *, shape: tuple[int, ...], axis: int, first: bool) -> Tensor:
    """Rows of axis `axis`, or of the next one, for the n m places of both, found by % n or by // n."""
    n, m = shape[axis : axis + 2]
    a = unrepeated(a)
    place = torch.arange(n * m, device=a.device)
    own = (1,) * (len(shape) - a.dim()) + tuple(a.shape)
    rows = a.reshape(own).movedim(axis if first else axis + 1, 0)
    rows = rows.reshape(n if first else m, *own[:axis], *own[axis + 2 :])
    selected = rows.index_select(0, place % n if first else place // n).unflatten(0, (n, m))
    selected = selected.movedim((0, 1), (axis, axis + 1))
    if prod(selected.shape) > prod(shape):
        raise RuntimeError("it is no operand of this one")
    return selected.contiguous()
