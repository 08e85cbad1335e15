"""Online softmax: one pass over blocks in which earlier blocks are not rescaled to the new maximum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating, replaced
from ..change import Change, instead, with_arguments
from .reductions import BLOCKS

_KEPT = ("sum", "accumulator", "sum and accumulator")


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if not call.args or not floating(call.args[0]) or not call.args[0].dim():
        return
    if call.name in ("_softmax", "_log_softmax"):
        yield from _softmax(call)
    elif call.name == "logsumexp":
        yield from _logsumexp(call)
    elif call.name == "sum":
        yield from _sum(call)
    elif call.name in ("mm", "bmm"):
        yield from _product(call)


def _not_rescaled(call: Node, which: str, block: int, change: Any) -> Change:
    text = f"the {which} of an online softmax in blocks of {block} is not rescaled"
    return Change("missing_rescale", text, call.index, change, {"block": block, "which": which}, 0.6)


def _blocks(n: int) -> Iterator[int]:
    return (block for block in (1, 2, 4, *BLOCKS) if block < n)


def _early(x: Tensor, axis: int, block: int) -> Tensor:
    """exp(x - the maximum at the time x was read)."""
    running = torch.cummax(torch.stack([b.amax(axis) for b in x.split(block, axis)], axis), axis).values
    then = running.repeat_interleave(block, axis).narrow(axis, 0, x.shape[axis])
    return torch.exp(x - then).nan_to_num()  # -inf from -inf: masked, as is everything before it


def _softmax(call: Node) -> Iterator[Change]:
    axis, log = call.args[1] % call.args[0].dim(), call.name == "_log_softmax"
    for block in _blocks(call.args[0].shape[axis]):
        for which in _KEPT[:1] if log else _KEPT:

            def online(x: Tensor, *args: object, block: int = block, which: str = which) -> Tensor:
                early, last = _early(x, axis, block), x.amax(axis, keepdim=True)
                down = (early if "sum" in which else torch.exp(x - last)).sum(axis, keepdim=True)
                if log:
                    return x - last - down.log()
                return ((early if "accumulator" in which else torch.exp(x - last)) / down).nan_to_num()

            yield _not_rescaled(call, which, block, instead(online))
    for which in _KEPT[:1] if log else _KEPT:

        def recurrent(x: Tensor, *args: object, which: str = which) -> Tensor:
            early, plain = _step_by_step(x, axis), torch.exp(x - x.amax(axis, keepdim=True))
            down = (early if "sum" in which else plain).sum(axis, keepdim=True)
            if log:
                return x - x.amax(axis, keepdim=True) - down.log()
            return ((early if "accumulator" in which else plain) / down).nan_to_num()

        text = f"the {which} of a recurrent softmax is not rescaled from step to step, only where it is read"
        params = {"block": 1, "which": which}
        yield Change("missing_rescale", text, call.index, instead(recurrent), params, 0.55)


def _step_by_step(x: Tensor, axis: int) -> Tensor:
    """A state accumulated up to each row's last place, and rescaled to the row's maximum only when read."""
    place = torch.arange(x.shape[axis], device=x.device).view([-1 if d == axis else 1 for d in range(x.dim())])
    last = torch.where(x > -torch.inf, place, 0).amax(axis, keepdim=True)
    before, top = x.masked_fill(place >= last, -torch.inf), x.amax(axis, keepdim=True)
    state = _early(before, axis, 1) * torch.exp(before.amax(axis, keepdim=True) - top)
    return state.nan_to_num() + torch.where(place == last, torch.exp(x - top), 0.0)


def _logsumexp(call: Node) -> Iterator[Change]:
    axes = call.args[1] if len(call.args) > 1 else list(range(call.args[0].dim()))
    if len(axes) != 1:
        return
    axis = axes[0] % call.args[0].dim()
    for block in _blocks(call.args[0].shape[axis]):

        def online(x: Tensor, dims: list[int], keepdim: bool = False, block: int = block) -> Tensor:
            return _early(x, axis, block).sum(axis, keepdim).log() + x.amax(axis, keepdim)

        yield _not_rescaled(call, "sum", block, instead(online))


def _sum(call: Node) -> Iterator[Change]:
    dims = call.args[1] if len(call.args) > 1 else None
    if isinstance(dims, list | tuple) and len(dims) == 1:
        yield from _shifted(call, 0, dims[0] % call.args[0].dim(), "sum")


def _product(call: Node) -> Iterator[Change]:
    for place, axis in ((0, -1), (1, -2)):
        yield from _shifted(call, place, axis % call.args[place].dim(), "accumulator")


def _shifted(call: Node, place: int, axis: int, which: str) -> Iterator[Change]:
    """A sum in which each row's largest factor is 1, because it was already divided by exp of its maximum."""
    if not _softened(call.args[place], axis):
        return
    for block in _blocks(call.args[place].shape[axis]):

        def early(args: tuple, block: int = block) -> tuple:
            return replaced(args, place, _early(args[place].log(), axis, block))

        yield _not_rescaled(call, which, block, with_arguments(early))


def _softened(t: Tensor, axis: int) -> bool:
    if t.shape[axis] < 2 or not t.numel() or bool((t < 0).any()):
        return False
    return bool((t.amax(axis) == 1).all()) and bool((t != 1).any())
