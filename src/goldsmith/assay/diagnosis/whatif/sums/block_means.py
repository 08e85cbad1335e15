"""Means and variances merged from blocks: wrong block weights, or the distance between the blocks' means left out."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating
from ..change import Change, instead
from .reductions import BLOCKS

_VIEWS = frozenset("view unsqueeze expand _unsafe_view alias detach".split())


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.backward or not call.args or not floating(call.args[0]):
        return
    if call.name == "mean":
        yield from _alike(call)
    elif call.name == "sub" and len(call.makers) == 2:
        yield from _apart(call, calls)


def _alike(call: Node) -> Iterator[Change]:
    """The plain mean of the blocks' means: the last, shorter block weighs too much."""
    axis = _axis(call)
    if axis is None:
        return
    n = call.args[0].shape[axis]
    for block in BLOCKS:
        if n > block and n % block:

            def merged(
                x: Tensor, dims: list[int], keepdim: bool = False, *, block: int = block, **kw: object
            ) -> Tensor:
                parts = [part.mean(axis, keepdim=True) for part in x.split(block, axis)]
                return torch.cat(parts, axis).mean(axis, keepdim=keepdim)

            text = f"blocks of {block} have equal weight in {call.expression}, even the last one, which has {n % block}"
            yield Change("wrong_factor", text, call.index, instead(merged), {"block": block}, 0.5, also=("wrong_mask",))


def _apart(call: Node, calls: Sequence[Node]) -> Iterator[Change]:
    """x - mean(x) with the mean of x's own block: the distance between the blocks' means is left out."""
    maker = _maker(calls, call.makers[1])
    if maker is None or maker.name != "mean" or maker.makers[:1] != call.makers[:1]:
        return
    axis = _axis(maker)
    if axis is None or call.args[0].shape != maker.args[0].shape:
        return
    for block in BLOCKS:
        if call.args[0].shape[axis] > block:

            def inside(x: Tensor, mean: Tensor, *args: object, block: int = block, **kwargs: object) -> Tensor:
                return torch.cat([part - part.mean(axis, keepdim=True) for part in x.split(block, axis)], axis)

            text = f"in {call.expression} blocks of {block} have their own means: their differences are left out"
            yield Change("missing_term", text, call.index, instead(inside), {"block": block}, 0.5)


def _maker(calls: Sequence[Node], key: object) -> Node | None:
    call = calls[key] if isinstance(key, int) and 0 <= key < len(calls) else None
    while call is not None and call.name in _VIEWS and call.makers:
        before = call.makers[0]
        call = calls[before] if isinstance(before, int) and 0 <= before < len(calls) else None
    return call


def _axis(call: Node) -> int | None:
    """The one axis that is reduced; None for none or several."""
    dims = call.args[1] if len(call.args) > 1 else None
    return dims[0] % call.args[0].dim() if isinstance(dims, list | tuple) and len(dims) == 1 else None
