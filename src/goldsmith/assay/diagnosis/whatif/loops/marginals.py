"""Log-space recursions whose backward recomputes each pair's share with the state of another iteration.

s(t)[j] = log sum_i exp(s(t-1)[i] + a[i, j]) + ...: a kernel adds exp(s(t-1)[i] + a[i, j] + rest - total) to the
gradient of a, using the stored states. With the state of its own iteration, or of two iterations before, every share
has a wrong factor, while the gradient that is passed to the previous iteration stays right.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ...graph.node import Changed, Key, Node
from ...graph.tensors import floating, replaced
from ..change import Change

_LEAST, _MOST = 2, 1024  # iterations
_SUMS = frozenset("add add_ sum".split())
_ADDED = frozenset(("add", "sub"))


@dataclass(frozen=True)
class _Turn:
    """One iteration: the addition of the state (its operand `at`), the state it makes, and the share in the backward.

    before: number of the iteration that made the state which is read; -1 if the state comes from elsewhere
    """

    number: int
    adds: Node
    at: int
    makes: int
    share: Node
    before: int


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    turns = _turns(calls, among)
    if not _LEAST <= len(turns) <= _MOST or all(turn.before < 0 for turn in turns):
        return
    readers = _readers(calls, among)
    carried = _carrying(calls, turns, readers)
    for step, which in ((1, "after the step"), (-1, "of two steps before")):
        for alone in (True, False):
            group = _group(turns, readers, carried if alone else set(), step)
            if group:
                text = f"in each of {len(turns)} steps the backward computes the shares of {turns[0].adds.expression} "
                text += f"from the state {which}" + ("" if alone else ", and also the gradient for earlier steps")
                yield Change("wrong_saved_tensor", text, group[0][0], group[0][1], {"step": step}, 0.6 - 0.05 * (
                    not alone), group=group, also=("shifted", "off_by_one"))  # fmt: skip


def _turns(calls: Sequence[Node], among: set[int]) -> list[_Turn]:
    shares = {s: call for call in calls for s in _total(calls, call, among)}
    totals = [calls[i] for i in sorted(shares) if calls[i].makers]
    makes = [next((c.index for c in calls[t.index + 1 :] if _goes_on(c, t)), t.index) for t in totals]
    made_in: dict[Key, int] = {key: number for number, key in enumerate(makes)}  # state -> the iteration that makes it
    ways = [_way(calls, t.makers[0], made_in) for t in totals]
    usual = max((w for w in ways if w), key=ways.count, default=())
    turns = []
    for number, (total, way) in enumerate(zip(totals, ways, strict=True)):
        adds = _follow(calls, total.makers[0], way or usual)
        if adds is None:
            continue
        at = (way or usual)[-1]
        if floating(adds.args[at]) and adds.args[at].numel() == total.out.numel():
            before = made_in[adds.makers[at]] if way else -1
            turns.append(_Turn(number, adds, at, makes[number], shares[total.index], before))
    return turns


def _way(calls: Sequence[Node], key: Key, states: dict[Key, int], most: int = 4) -> tuple[int, ...]:
    """Path from the summed tensor to an earlier state, as (addition, operand) pairs; () if there is none."""
    call = _maker(calls, key)
    if call is None or call.name not in _ADDED or len(call.makers) != 2 or not most:
        return ()
    for i in range(1 if call.name == "sub" else 2):  # a subtracted operand is not a state
        rest = (i,) if call.makers[i] in states else tuple(_way(calls, call.makers[i], states, most - 1))
        if rest:
            return rest if call.makers[i] in states else (i, *rest)
    return ()


def _follow(calls: Sequence[Node], key: Key, way: tuple[int, ...]) -> Node | None:
    """The last addition on that path."""
    call = _maker(calls, key)
    for i in way[:-1]:
        call = None if call is None or len(call.makers) != 2 else _maker(calls, call.makers[i])
    return call if way and call is not None and call.name in _ADDED and len(call.makers) == 2 else None


def _total(calls: Sequence[Node], call: Node, among: set[int]) -> Iterator[int]:
    """The logsumexp l of a backward product g exp(x - l)."""
    if not call.backward or call.name != "mul" or call.index not in among:
        return
    for key in call.makers:
        bent = _maker(calls, key)
        apart = _maker(calls, bent.makers[0]) if bent is not None and bent.name == "exp" and bent.makers else None
        if apart is None or apart.name != "sub" or len(apart.makers) != 2:
            continue
        total = _maker(calls, apart.makers[1])
        if total is not None and total.name == "logsumexp" and total.makers[:1] == apart.makers[:1]:
            yield total.index


def _goes_on(call: Node, total: Node) -> bool:
    """Whether the call makes the sum's next state: the first forward operator that reads the sum."""
    same = not call.backward and total.index in call.makers and call.owns and floating(call.out)
    return same and call.out.shape == total.out.shape


def _maker(calls: Sequence[Node], key: Key) -> Node | None:
    return calls[key] if isinstance(key, int) and 0 <= key < len(calls) else None


def _readers(calls: Sequence[Node], among: set[int]) -> dict[Key, list[tuple[Node, int]]]:
    """Backward sums by the tensor they read, with the argument's position."""
    readers: dict[Key, list[tuple[Node, int]]] = {}
    for call in calls:
        if call.backward and call.name in _SUMS and call.index in among:
            for i, key in zip((i for i, a in enumerate(call.args) if isinstance(a, Tensor)), call.makers, strict=False):
                readers.setdefault(key, []).append((call, i))
    return readers


def _carrying(calls: Sequence[Node], turns: Sequence[_Turn], readers: dict[Key, list[tuple[Node, int]]]) -> set[int]:
    """The sums that other iterations' shares depend on: the gradient passed to the previous iteration."""
    wanted = {turn.share.index for turn in turns}
    carrying: set[int] = set()
    behind: set[int] = set()
    for call in reversed(calls):
        if call.index in wanted or call.index in behind:
            behind |= {key for key in call.read if isinstance(key, int)}
    for reads in readers.values():
        carrying |= {call.index for call, _ in reads if call.index in behind}
    return carrying


def _group(
    turns: Sequence[_Turn], readers: dict[Key, list[tuple[Node, int]]], carried: set[int], step: int
) -> tuple[tuple[int, Changed], ...]:
    current: dict[tuple[str, int], Tensor] = {}  # values of the current run
    group: dict[int, Changed] = {}
    scaled = 0
    for turn in turns:
        group[turn.adds.index] = _kept_operand(turn.at, current, turn.number)
    for turn in turns:
        group[turn.makes] = _kept_result(current, turn.number, group.get(turn.makes))
    for turn in turns:
        other = ("made", turn.number) if step > 0 else ("read", turn.before)
        if step < 0 and turn.before < 0:
            continue  # the first iteration has no earlier state
        for call, i in readers.get(turn.share.index, []):
            if call.index not in carried:
                scaled += 1
                group[call.index] = _scaled(current, turn.number, other, i, group.get(call.index))
    return tuple(group.items()) if scaled else ()


def _kept_operand(at: int, current: dict[tuple[str, int], Tensor], number: int) -> Changed:
    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        current["read", number] = args[at]
        return func(*args, **kwargs)

    return run


def _kept_result(current: dict[tuple[str, int], Tensor], number: int, inner: Changed | None) -> Changed:
    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        out = func(*args, **kwargs) if inner is None else inner(func, args, kwargs)
        current["made", number] = out
        return out

    return run


def _scaled(
    current: dict[tuple[str, int], Tensor], number: int, other: tuple[str, int], i: int, inner: Changed | None
) -> Changed:
    """One addend of a sum, with another state in its exponent."""

    def run(func: Any, args: tuple, kwargs: dict) -> Any:
        own = current["read", number]
        share = args[i] * torch.exp(current[other].reshape(own.shape) - own)
        args = replaced(args, i, share)
        return func(*args, **kwargs) if inner is None else inner(func, args, kwargs)

    return run
