"""Axes split or joined in the wrong order: h % n for h // r."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from ...graph.node import Changed, Node
from ...graph.tensors import floating, replaced, whole
from ..change import Change, instead, with_arguments

_VIEWS = frozenset("view _unsafe_view reshape clone _reshape_alias".split())
_INDEXED = {"index_select": 2, "embedding": 1, "index_add": 2, "index_add_": 2, "gather": 2, "scatter_add": 2}
_OTHERS = ("wrong_stride",)


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.name in _VIEWS and floating(call.out) and call.args[0].is_contiguous():
        yield from _split(call)
        yield from _joined(call)
    if call.name in _INDEXED and len(call.args) > _INDEXED[call.name]:
        at = _INDEXED[call.name]
        if whole(call.args[at]):
            yield from _indices(call, call.args[at], lambda args, f: replaced(args, at, f(args[at])), _places(call))
    if call.name in ("index", "index_put", "index_put_"):
        for place, index in enumerate(call.args[1]):
            if whole(index):
                yield from _indices(call, index, _listed(place), call.args[0].shape[place])


def _places(call: Node) -> int:
    axis = call.args[1] if isinstance(call.args[1], int) else 0
    return call.args[0].shape[axis] if call.args[0].dim() else 0


def _listed(place: int) -> Callable[[tuple, Callable], tuple]:
    def put(args: tuple, f: Callable[[Tensor], Tensor]) -> tuple:
        return replaced(args, 1, [f(i) if p == place else i for p, i in enumerate(args[1])])

    return put


def _split(call: Node) -> Iterator[Change]:
    """(n) seen as (a, b), with the elements in the order of (b, a)."""
    old, new = tuple(call.args[0].shape), tuple(call.out.shape)
    for axis in range(len(new) - 1):
        a, b = new[axis], new[axis + 1]
        rest = (*new[:axis], a * b, *new[axis + 2 :])
        if min(a, b) < 2 or rest != old:
            continue

        def turned(x: Tensor, *args: object, axis: int = axis, **kwargs: object) -> Tensor:
            other = (*new[:axis], new[axis + 1], new[axis], *new[axis + 2 :])
            return x.reshape(other).transpose(axis, axis + 1).contiguous()

        text = f"axis {axis} of {call.operand(0) or call.expression} is split as {b} times {a}, not as {a} times {b}"
        yield Change("permuted", text, call.index, instead(turned), {"axis": axis}, 0.55, also=_OTHERS)


def _joined(call: Node) -> Iterator[Change]:
    """(a, b) seen as (n), with the elements in the order of (b, a)."""
    old, new = tuple(call.args[0].shape), tuple(call.out.shape)
    for axis in range(len(old) - 1):
        a, b = old[axis], old[axis + 1]
        if min(a, b) < 2 or (*old[:axis], a * b, *old[axis + 2 :]) != new:
            continue

        def turned(x: Tensor, *args: object, axis: int = axis, **kwargs: object) -> Tensor:
            return x.transpose(axis, axis + 1).reshape(new).contiguous()

        text = f"axes {axis} and {axis + 1} of {call.operand(0) or call.expression} are joined in the other order"
        # equally long axes form a square, which is then transposed
        cause, also = ("transposed", ("permuted", *_OTHERS)) if a == b else ("permuted", _OTHERS)
        yield Change(cause, text, call.index, instead(turned), {"axis": axis}, 0.55, also=also)


def _indices(
    call: Node, index: Tensor, put: Callable[[tuple, Callable[[Tensor], Tensor]], tuple], n: int
) -> Iterator[Change]:
    """An integer per place: the place's own remainder, or the number of the previous or next place."""

    def read(f: Callable[[Tensor], Tensor]) -> Changed:
        return with_arguments(lambda args: put(args, f))

    if not n or index.dim() == 0 or len(index) < 2:
        return
    own = torch.arange(index.numel(), device=index.device).reshape(index.shape).to(index.dtype)
    if index.numel() > n and not torch.equal(own % n, index):
        text = f"an index of {call.expression} is its position modulo {n}"
        yield Change("permuted", text, call.index, read(lambda i: own % n), {"modulo": n}, 0.55, also=_OTHERS)
    repeats = index.numel() // n if index.numel() % n == 0 else 0
    if repeats > 1 and n % repeats == 0 and not torch.equal(own % repeats, index):
        text = f"an index of {call.expression} is its position modulo {repeats}"
        yield Change("permuted", text, call.index, read(lambda i: own % repeats), {"modulo": repeats}, 0.5,
                     also=_OTHERS)  # fmt: skip
    for step, which in ((1, "before"), (-1, "after")):
        text = f"an index of {call.expression} is that of the position {which}"
        at = (torch.arange(len(index), device=index.device) - step).clamp(0, len(index) - 1)
        cause, also = ("off_by_one", "shifted") if bool((index.diff(dim=0) >= 0).all()) else ("shifted", "off_by_one")

        def moved(i: Tensor, at: Tensor = at) -> Tensor:
            return i[at]

        yield Change(cause, text, call.index, read(moved), {"step": step}, 0.45, also=(also,))

        def around(i: Tensor, step: int = step) -> Tensor:
            return i.roll(step, 0)

        yield Change(cause, f"{text}, wrapping around", call.index, read(around), {"step": step}, 0.44, also=(also,))
