"""Rows stored, or read, as if the axes of a buffer lay in another order.

A cache of [pages, heads, page, D] that is written as [pages, page, heads, D] holds every row, but at another row's
place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Changed, Node
from ...graph.tensors import floating, replaced
from ..change import Change

_READS = frozenset("index gather index_select embedding take_along_dim".split())
_STORES = frozenset("index_put index_put_ index_copy index_copy_ scatter scatter_ index_add index_add_".split())
_ALSO = ("transposed", "invalid_index")
_NUMBERS = 1 << 20


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.name not in _READS | _STORES or call.backward or not call.args or not floating(call.args[0]):
        return
    x = call.args[0]
    if x.dim() < 2 or x.numel() > _NUMBERS:
        return
    shape = _lying(x)
    for i, j in combinations(range(x.dim()), 2):
        if shape[i] != shape[j] and min(shape[i], shape[j]) > 1:
            name = call.operand(0) or call.expression
            text = f"axes {i} and {j} of the memory of {name} are taken in the other order by {call.name}"
            make = _stored(i, j) if call.name in _STORES else _read(i, j)
            params = {"operand": name, "axes": [i, j]}
            yield Change("wrong_stride", text, call.index, make, params, 0.55, also=_ALSO)


def _order(x: Tensor) -> list[int]:
    """The axes in memory order, the outermost first."""
    return sorted(range(x.dim()), key=lambda d: (-x.stride()[d], d))


def _lying(x: Tensor) -> list[int]:
    return [x.shape[d] for d in _order(x)]


def _seen(x: Tensor, i: int, j: int) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The same memory with two axes exchanged, and the inverse map."""
    order = _order(x)
    back = [order.index(d) for d in range(x.dim())]
    laid = x.permute(order).contiguous()
    turned = list(laid.shape)
    turned[i], turned[j] = turned[j], turned[i]
    seen = laid.view(turned).transpose(i, j).permute(back)

    def undone(t: Tensor) -> Tensor:
        return t.permute(order).transpose(i, j).contiguous().view(laid.shape).permute(back)

    return seen, undone


def _read(i: int, j: int) -> Changed:
    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        return func(*replaced(args, 0, _seen(args[0], i, j)[0].contiguous()), **kwargs)

    return run


def _stored(i: int, j: int) -> Changed:
    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        seen, undone = _seen(args[0], i, j)
        out = undone(func(*replaced(args, 0, seen.clone()), **kwargs))
        return args[0].copy_(out) if func._schema.is_mutable else torch.empty_like(args[0]).copy_(out)

    return run
