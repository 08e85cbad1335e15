"""In every iteration of a loop one operator reads an operand from before its update, or reads the update too early.

Recurrences change a state in steps: it decays, is corrected, is written to. Suppose that the golden
reads the state after a step and a kernel reads it before. Then every iteration is wrong, and later iterations build on
earlier errors. So the golden runs with all these reads changed at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Changed, Key, Node
from ...graph.tensors import floating, replaced, seen_through
from ..change import Change

_LEAST, _MOST = 2, 1024  # iterations
_CHANGES = 200
_STEPS = frozenset("mul div add sub addcmul lerp neg tanh sigmoid exp".split())
_ALIASES = frozenset("detach alias clone".split())
_Pair = tuple[Node, int, Node, int]  # maker, its operand; reader, its argument


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    """Changes that let one operator of a loop read a value before its update, or the update too early.

    among: the operators that the wrong tensor depends on.
    """
    by_kind: dict[tuple, list[_Pair]] = {}
    readers = _readers(calls, among)
    for maker in calls:
        if maker.backward or not maker.line or maker.name not in _STEPS or not maker.owns or not floating(maker.out):
            continue
        for j, key in _operands(maker):
            for read, i in readers.get(maker.index, []):
                by_kind.setdefault((False, *_kind(maker, j, read, i)), []).append((maker, j, read, i))
            for read, i in readers.get(key, []):
                if read.index > maker.index:
                    by_kind.setdefault((True, *_kind(maker, j, read, i)), []).append((maker, j, read, i))
    count = 0
    for (updated, *_), pairs in by_kind.items():
        if _LEAST <= len(pairs) <= _MOST and len({read.index for _, _, read, _ in pairs}) == len(pairs):
            count += 1
            if count > _CHANGES:
                return
            yield _changed(calls, updated, pairs)


def _kind(maker: Node, j: int, read: Node, i: int) -> tuple:
    """What is equal in every iteration: lines, operands, and the distance between the two operators."""
    return maker.name, maker.line, j, read.name, read.line, i, read.index - maker.index


def _readers(calls: Sequence[Node], among: set[int]) -> dict[Key, list[tuple[Node, int]]]:
    readers: dict[Key, list[tuple[Node, int]]] = {}
    for call in calls:
        if call.index not in among or call.backward or not call.line or not call.owns or call.name in _ALIASES:
            continue
        keys = iter(call.makers)
        for i, a in enumerate(call.args):
            key = next(keys) if isinstance(a, Tensor) else -1
            if floating(a) and a.numel() > 1 and key != -1:
                readers.setdefault(key, []).append((call, i))
    return readers


def _operands(maker: Node) -> Iterator[tuple[int, Key]]:
    """Operands of the result's shape, which can stand in its place."""
    keys = iter(maker.makers)
    for j, a in enumerate(maker.args):
        key = next(keys) if isinstance(a, Tensor) else -1
        if floating(a) and a.shape == maker.out.shape and a.numel() > 1 and key != -1:
            yield j, key


def _changed(calls: Sequence[Node], updated: bool, pairs: list[_Pair]) -> Change:
    current: dict[int, Tensor] = {}  # values of the current run, by operator
    group: dict[int, Changed] = {}
    for maker, j, _, _ in pairs:
        group[maker.index] = _kept(maker.index, j, current, updated)
    for maker, _, read, i in pairs:
        group[read.index] = _read(maker.index, i, current, group.get(read.index))
    maker, j, read, i = pairs[-1]
    name, other = maker.operand(j) or "an operand", maker.operand(1 - j) if len(maker.operands) > 1 else ""
    text = f"in each of {len(pairs)} steps {read.expression} reads "
    text += f"{maker.expression} in place of {name}" if updated else f"{name} from before {maker.expression}"
    product = maker.name not in ("add", "sub")
    also: tuple[str, ...]
    cause, also = "wrong_saved_tensor", ("wrong_factor" if product else "missing_term", "stale_state")
    if not updated and not product:  # a running sum loses an addend; if the sum runs over a loop, the last one
        key = next((k for n, k in _operands(maker) if n == j), -1)
        before = calls[key] if isinstance(key, int) and 0 <= key < len(calls) else None
        running = before is not None and (before.name, before.line) == (maker.name, maker.line)
        cause, also = "missing_term", ("wrong_saved_tensor", "stale_state")
        cause, also = ("off_by_one", ("truncated_reduction", *also)) if running else (cause, also)
    params = {"operand": name, "factor": other} if product else {"operand": name, "term": other}
    at = next(iter(group))
    return Change(cause, text, at, group[at], params, 0.5, group=tuple(group.items()), also=also)


def _kept(index: int, j: int, current: dict[int, Tensor], updated: bool) -> Changed:
    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        out = func(*args, **kwargs)
        current[index] = out if updated else torch.empty_like(out).copy_(args[j])
        return out

    return run


def _read(index: int, i: int, current: dict[int, Tensor], inner: Changed | None) -> Changed:
    """Runs an operator with its argument i replaced by the current value of operator `index`.

    inner: another change of the same operator, whose result another iteration may read.
    """

    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        seen = seen_through(current[index], args[i])
        if seen is None:
            raise RuntimeError("read through a view of another size")
        args = replaced(args, i, seen)
        return func(*args, **kwargs) if inner is None else inner(func, args, kwargs)

    return run
