"""Outer products with exchanged axes, and divisions by varying counts that use one number for all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import replaced
from ..change import Change, with_arguments, with_result

_LENGTHS = 12


def changes(call: Node, calls: Sequence[Node] = ()) -> Iterator[Change]:
    if call.name in ("mul", "mm", "bmm") and len(call.tensors) == 2 and isinstance(call.out, Tensor):
        yield from _outer(call)
    if call.name in ("div", "div_") and len(call.args) > 1 and _counts(call.args[1]):
        yield from _divided(call, calls)


def _outer(call: Node) -> Iterator[Change]:
    """a_i b_j in place of b_i a_j, if both axes are equally long."""
    out = call.out
    axes = [(-2, -1)] if call.name != "mul" else combinations(range(-out.dim(), 0), 2)
    for i, j in axes:
        if out.dim() < 2 or out.shape[i] != out.shape[j] or out.shape[i] < 2:
            continue
        if call.name == "mul" and not _crossed(call.args[0].shape, call.args[1].shape, i, j):
            continue
        text = f"the axes of {call.expression} are exchanged: {call.operand(1)} comes first"
        params = {"operand": call.expression, "axes": [i, j]}
        change = with_result(lambda t, i=i, j=j: t.transpose(i, j))
        prior = 0.55 if call.name == "mul" else 0.4
        yield Change("transposed", text, call.index, change, params, prior, also=("swapped_results",))


def _crossed(a: torch.Size, b: torch.Size, i: int, j: int) -> bool:
    """Whether each operand varies along one axis only, and not the same one."""
    (ai, aj), (bi, bj) = (tuple(s[d] if -d <= len(s) else 1 for d in (i, j)) for s in (a, b))
    return (ai > 1 and aj == 1 and bi == 1 and bj > 1) or (ai == 1 and aj > 1 and bi > 1 and bj == 1)


def _counts(value: Any) -> bool:
    """Whether it holds integers from 1 up that are not all equal: the size of each group."""
    if not isinstance(value, Tensor) or value.numel() < 2 or value.dtype == torch.bool:
        return False
    return bool(((value == value.round()) & (value >= 1)).all()) and bool((value != value.flatten()[0]).any())


def _divided(call: Node, calls: Sequence[Node]) -> Iterator[Change]:
    """Divided by the length of some axis in the golden, or by the largest count."""
    name = call.operand(1) or "a count"
    lengths = Counter(n for c in calls for t in c.tensors for n in t.shape if n > 1)
    for n, _ in lengths.most_common(_LENGTHS):
        text = f"{call.expression} is divided by {n}, not by each group's {name}"
        change = with_arguments(lambda args, n=n: replaced(args, 1, n))
        yield Change("wrong_factor", text, call.index, change, {"factor": name, "by": n}, 0.6)
    most = with_arguments(lambda args: replaced(args, 1, args[1].amax()))
    text = f"{call.expression} is divided by the largest of {name}"
    yield Change("wrong_factor", text, call.index, most, {"factor": name}, 0.5)
