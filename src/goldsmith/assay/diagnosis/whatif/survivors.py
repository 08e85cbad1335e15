"""Sums of which one addend is left at each place, whichever it is: stores that should have been additions."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from .calls import Call, Change, floating, moved


def changes(calls: Sequence[Call], golden: Tensor, got: Tensor) -> Iterator[Change]:
    """Of the sums that make `golden` itself; which addend is left is read off `got`, that it is one of them is not."""
    for call in calls:
        if call.name != "sum" or not floating(call.out) or call.out.numel() != golden.numel():
            continue
        if not torch.equal(call.out.reshape(golden.shape), golden):
            continue
        axes = call.args[1] if len(call.args) > 1 and isinstance(call.args[1], list | tuple) else ()
        if len(axes) != 1 or call.args[0].dim() < 2:
            continue
        left = _left(call.args[0].movedim(axes[0], -1), got.double().reshape(call.out.shape).squeeze())
        if left is not None:
            text = f"of the addends of {call.said} one is left: a store stands where an addition should"
            yield Change("lost_update", text, call.index, moved(lambda out, v=left: v.reshape(out.shape)), {}, 0.55)


def _left(addends: Tensor, got: Tensor) -> Tensor | None:
    """The addend nearest to what came, zeros left aside; None where nowhere two of them meet."""
    addends = addends.reshape(*got.shape, -1) if addends.numel() == got.numel() * addends.shape[-1] else addends
    if addends.shape[:-1] != got.shape or not bool(((addends != 0).sum(-1) > 1).any()):
        return None
    away = (addends - got.unsqueeze(-1)).abs().masked_fill(addends == 0, torch.inf)
    nearest = addends.gather(-1, away.argmin(-1, keepdim=True)).squeeze(-1)
    return torch.where((addends != 0).any(-1), nearest, 0.0)
