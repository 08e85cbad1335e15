"""Rows of a smaller operand repeated in the wrong order: p % n for p // m, or the reverse.

A row of [n, ...] that is broadcast over [n, m, ...] belongs to m consecutive places. A kernel with one program for each
of the n m places finds it by a division; the remainder gives another row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Changed, Node
from ...graph.tensors import floating, replaced
from ..change import Change

_TAKES = frozenset("mul mul_ add add_ sub sub_ div div_ rsub".split())
_ALSO = ("wrong_stride", "permuted")
_MOST = 256  # axes and orders, roughly


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    """Changes of one operand alone, and of all operands that are broadcast along the same axes."""
    groups: dict[tuple, list[tuple[int, Changed]]] = {}
    for call in calls[: 1 << 12]:
        if len(groups) > _MOST:
            break
        if call.index not in among or call.backward or call.name not in _TAKES or not floating(call.out):
            continue
        for i, a in enumerate(call.args[:2]):
            for axis, ordered, how in _orders(a, tuple(call.out.shape)):
                name = call.operand(i) or f"an operand of {call.name}"
                change = _read(i, tuple(call.out.shape), axis, ordered)
                text = f"{name} in {call.expression} is read {how}"
                params = {"operand": name, "axis": axis}
                yield Change("invalid_index", text, call.index, change, params, 0.5, also=_ALSO)
                groups.setdefault((axis, tuple(call.out.shape[: axis + 2]), how), []).append((call.index, change))
    for (axis, _, how), members in groups.items():
        places = dict(members)
        if 1 < len(members) == len(places):
            text = f"all that is broadcast along axes {axis} and {axis + 1} is read {how}"
            yield Change("invalid_index", text, members[0][0], None, {"axis": axis}, 0.49, group=tuple(members),
                         also=_ALSO)  # fmt: skip


def _orders(a: Any, out: tuple[int, ...]) -> Iterator[tuple[int, bool, str]]:
    """(first of the two axes, whether the first one is the operand's own, description)"""
    if not floating(a) or a.numel() < 2 or not out:
        return
    own = (1,) * (len(out) - a.dim()) + tuple(_unrepeated(a).shape)
    for axis in range(len(out) - 1):
        n, m = out[axis : axis + 2]
        if min(n, m) < 2:
            continue
        if own[axis] == n and own[axis + 1] == 1:
            yield axis, True, f"by position % {n}, not by position // {m}"
        if own[axis] == 1 and own[axis + 1] == m and axis + 2 < len(out):
            yield axis, False, f"by position // {n}, not by position % {m}"


def _read(i: int, out: tuple[int, ...], axis: int, first: bool) -> Changed:
    n, m = out[axis : axis + 2]

    def run(func: Callable, args: tuple, kwargs: dict) -> Any:
        a = _unrepeated(args[i])
        place = torch.arange(n * m, device=a.device)
        at = place % n if first else place // n
        own = (1,) * (len(out) - a.dim()) + tuple(a.shape)
        rows = a.reshape(own).movedim(axis if first else axis + 1, 0)
        rows = rows.reshape(n if first else m, *own[:axis], *own[axis + 2 :])
        selected = rows.index_select(0, at).unflatten(0, (n, m)).movedim((0, 1), (axis, axis + 1))
        if prod(selected.shape) > prod(out):
            raise RuntimeError("it is no operand of this one")
        return func(*replaced(args, i, selected.contiguous()), **kwargs)

    return run


def _unrepeated(a: Tensor) -> Tensor:
    """The expanded tensor before its expansion."""
    for d, (n, step) in enumerate(zip(a.shape, a.stride(), strict=True)):
        a = a.narrow(d, 0, 1) if step == 0 and n > 1 else a
    return a
