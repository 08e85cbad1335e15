"""A reduction over each part of an axis where one over the whole axis is right, or one reduction over two axes.

An axis may hold several levels, heads or tiles one after another. Then one of these runs over the inner axis of a view
instead of over both: the inner sum of a softmax's backward, a mean that is subtracted, or a total that is a divisor.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import floating
from ..change import Change, instead

_SUMS = frozenset("sum mean amax logsumexp".split())
_NORMS = frozenset("_softmax _log_softmax".split())
_SLOPES = frozenset("_softmax_backward_data _log_softmax_backward_data".split())
_PARTS = 6  # part sizes to try
_ALSO = ("truncated_reduction", "wrong_factor")


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    axis = _axis(call)
    if axis is None:
        return
    if call.name in _NORMS | _SLOPES:  # other axes are tried together with those of sums
        yield from _together(call, axis)
    n = call.args[0].shape[axis]
    sizes = [size for size in range(2, n // 2 + 1) if n % size == 0]
    for size in sizes[:_PARTS]:
        for which, inner in (("of their own", True), ("of the entries at the same position in all parts", False)):
            make = _slope if call.name in _SLOPES else _norm if call.name in _NORMS else _sum
            change = instead(_in_parts(call.name, make, axis, size, inner))
            text = f"in {call.expression} the {n // size} parts of {size} have sums {which}"
            params = {"axis": axis, "part": size}
            yield Change("wrong_axis", text, call.index, change, params, 0.55 if inner else 0.5, also=_ALSO)


def _together(call: Node, axis: int) -> Iterator[Change]:
    """The reverse mistake: the sum also runs over a neighbouring axis, as in a view that merges both."""
    x = call.args[0]
    for other in (axis - 1, axis + 1):
        if not 0 <= other < x.dim() or x.shape[other] < 2:
            continue
        first, shape = min(axis, other), (x.shape[min(axis, other)], x.shape[max(axis, other)])
        make = _slope if call.name in _SLOPES else _norm if call.name in _NORMS else _sum

        def run(*args: Any, first: int = first, shape: tuple[int, int] = shape, make: Make = make, **kw: Any) -> Tensor:
            tensors = tuple(t.flatten(first, first + 1) for t in args if isinstance(t, Tensor) and t.dim())
            return make(call.name, tensors, first).expand(tensors[0].shape).unflatten(first, shape).contiguous()

        text = f"in {call.expression} the sum runs over axes {first} and {first + 1} together"
        params = {"axis": other, "golden_axis": axis}
        yield Change("wrong_axis", text, call.index, instead(run), params, 0.55)


def _axis(call: Node) -> int | None:
    """The one axis that is summed along and whose places all read the sum; None otherwise."""
    if not call.args or not floating(call.args[0]) or not call.args[0].dim():
        return None
    if call.name in _NORMS:
        dims: object = call.args[1]
    elif call.name in _SLOPES:
        dims = call.args[2]
    elif call.name in _SUMS and len(call.args) > 2 and call.args[2] is True:  # keepdim: the sum is read along its axis
        dims = call.args[1]
    else:
        return None
    dims = dims[0] if isinstance(dims, list | tuple) and len(dims) == 1 else dims
    return dims % call.args[0].dim() if isinstance(dims, int) and not isinstance(dims, bool) else None


Make = Callable[[str, tuple[Tensor, ...], int], Tensor]  # of operands with an axis of parts before the axis of places


def _in_parts(name: str, make: Make, axis: int, size: int, inner: bool) -> Callable[..., Tensor]:
    def run(*args: Any, **kwargs: Any) -> Tensor:
        tensors = tuple(t.unflatten(axis, (-1, size)) for t in args if isinstance(t, Tensor) and t.dim())
        along = axis + 1 if inner else axis
        return make(name, tensors, along).expand(tensors[0].shape).flatten(axis, axis + 1).contiguous()

    return run


def _sum(name: str, tensors: tuple[Tensor, ...], axis: int) -> Tensor:
    kinds: dict[str, Callable[..., Tensor]] = {"sum": torch.sum, "mean": torch.mean, "amax": torch.amax}
    return kinds.get(name, torch.logsumexp)(tensors[0], axis, keepdim=True)


def _norm(name: str, tensors: tuple[Tensor, ...], axis: int) -> Tensor:
    return tensors[0].log_softmax(axis) if name == "_log_softmax" else tensors[0].softmax(axis)


def _slope(name: str, tensors: tuple[Tensor, ...], axis: int) -> Tensor:
    g, y = tensors[:2]
    if name.startswith("_log"):
        return g - torch.exp(y) * g.sum(axis, keepdim=True)
    return y * (g - (g * y).sum(axis, keepdim=True))
