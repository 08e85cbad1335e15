"""Lookups with several indices: wrong strides in a table of several axes, or one index of a row used for all.

A kernel combines several indices into one offset. With the stride of another axis it reads elsewhere in the same
memory. If one number of a row of indices is used for all, the others are never looked up.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating, replaced, whole
from ..change import Change, instead, with_arguments

_SMALL = 8  # places of a row of indices
_AT = {"gather": 2, "scatter": 2, "scatter_add": 2, "scatter_add_": 2}


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.name in ("index", "index_put", "index_put_"):
        yield from _offsets(call)
    if call.name in _AT:
        yield from _one_of_a_row(call, _AT[call.name])


def _together(call: Node) -> tuple[int, list[Tensor]] | None:
    """(the first indexed axis, the indices of it and the following axes)"""
    indices = list(call.args[1])
    axes = [d for d, i in enumerate(indices) if i is not None]
    if len(axes) < 2 or axes != list(range(axes[0], axes[-1] + 1)) or not all(whole(indices[d]) for d in axes):
        return None
    return axes[0], [indices[d] for d in axes]


def _offsets(call: Node) -> Iterator[Change]:
    indexed = _together(call)
    if indexed is None or not floating(call.args[0]):
        return
    first, indices = indexed
    sizes = list(call.args[0].shape[first : first + len(indices)])
    lengths = list(dict.fromkeys(call.args[0].shape))
    for d in range(1, len(sizes)):
        for other in (n for n in lengths if n != sizes[d] and n > 1):
            steps = [*sizes[:d], other, *sizes[d + 1 :]]
            text = f"the stride of axis {first + d - 1} of {call.expression} is made of {other} instead of {sizes[d]}"
            params = {"axis": first + d - 1, "stride": other}
            change = _at(call, first, len(indices), partial(_horner, sizes=steps))
            yield Change("wrong_stride", text, call.index, change, params, 0.55, also=("invalid_index",))
    for i, j in combinations(range(len(sizes)), 2):

        def exchanged(now: Sequence[Tensor], i: int = i, j: int = j) -> Tensor:
            new = list(now)
            new[i], new[j] = now[j], now[i]
            return _horner(new, sizes)

        text = f"the indices of axes {first + i} and {first + j} of {call.expression} are exchanged"
        change = _at(call, first, len(indices), exchanged)
        params = {"axes": [first + i, first + j]}
        yield Change("wrong_stride", text, call.index, change, params, 0.5, also=("transposed", "invalid_index"))


def _horner(indices: Sequence[Tensor], sizes: Sequence[int]) -> Tensor:
    place = indices[0]
    for index, size in zip(indices[1:], sizes[1:], strict=True):
        place = place * size + index
    return place


def _at(call: Node, first: int, count: int, place: Callable[[Sequence[Tensor]], Tensor]) -> Any:
    """The operator on one flat offset into those axes in memory order; an offset beyond the end wraps around."""

    def run(x: Tensor, indices: Sequence[Tensor | None], *rest: Any, **kwargs: Any) -> Tensor:
        sizes = x.shape[first : first + count]
        flat = place([i for i in indices[first : first + count] if i is not None]) % max(sizes.numel(), 1)
        new = [*indices[:first], flat, *indices[first + count :]]
        lying = x.reshape(*x.shape[:first], sizes.numel(), *x.shape[first + count :])
        operator = torch.ops.aten.index if call.name == "index" else torch.ops.aten.index_put
        out = operator(lying, new, *rest, **kwargs)
        return out if call.name == "index" else out.reshape(x.shape)

    return instead(run)


def _one_of_a_row(call: Node, at: int) -> Iterator[Change]:
    """One index of a row used for all; a scatter that then writes to one place twice stores or adds."""
    index, axis = call.args[at], call.args[1]
    if not whole(index) or not index.dim() or not isinstance(axis, int) or not 1 < index.shape[axis] <= _SMALL:
        return
    axis %= index.dim()
    name = call.operand(at) or "the index"

    def own(i: Tensor) -> Tensor:
        places = torch.arange(i.shape[axis], device=i.device).view([-1 if d == axis else 1 for d in range(i.dim())])
        return places.expand(i.shape).to(i.dtype)

    text = f"{call.expression} reads each row in order: the index {name} is ignored"
    change = with_arguments(lambda args: replaced(args, at, own(args[at])))
    yield Change("invalid_index", text, call.index, change, {"index": name}, 0.5, also=("permuted", "wrong_stride"))
    for place, which in ((0, "first"), (-1, "last")):

        def alone(i: Tensor, place: int = place) -> Tensor:
            return i.select(axis, place).unsqueeze(axis).expand(i.shape).contiguous()

        text = f"the {which} of every row of {name} is used for the whole row in {call.expression}"
        params = {"index": name, "axis": axis}
        change = with_arguments(lambda args, f=alone: replaced(args, at, f(args[at])))
        yield Change("invalid_index", text, call.index, change, params, 0.45, also=("wrong_format", "wrong_stride"))
        if call.name == "scatter" and isinstance(call.args[3], Tensor):

            def added(x: Tensor, dim: int, i: Tensor, source: Tensor, f: Callable = alone) -> Tensor:
                return x.scatter(dim, i, 0.0).scatter_add(dim, f(i), source)

            yield Change("invalid_index", f"{text}, and colliding values are added", call.index, instead(added), params,
                         0.45, also=("wrong_format", "wrong_stride"))  # fmt: skip
