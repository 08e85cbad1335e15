"""Loops in chunks whose backward restarts in each chunk, so that the gradient from later chunks is lost.

In a loop's backward, the gradient of the state is the sum of the gradient from this iteration's result and the gradient
from the next iteration. The latter is left out at the end of each chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...graph.node import Changed, Node
from ...graph.tensors import floating
from ..change import Change, with_result

CHUNKS = (2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 32, 64, 128)  # iterations
_LEAST, _MOST = 3, 2048  # iterations; operators of a run, above which dependencies are not computed
_KINDS = 6
_ADDS = frozenset("add add_".split())


def changes(calls: Sequence[Node], among: set[int], leaves: Mapping[str, Tensor]) -> Iterator[Change]:
    turns = _turns(calls, among) if len(calls) <= 8 * _MOST else {}
    for edges in list(turns.values())[:_KINDS]:
        n = len(edges)
        for chunk in (c for c in CHUNKS if c < n + 1):
            group = tuple(
                (call.index, _nothing())
                for j, carried in enumerate(edges)
                if (n - j) % chunk == 0  # the state after iteration n - 1 - j of 0, 1, ... n
                for call in carried
            )
            if not group:
                continue
            text = (
                f"in the backward each chunk of {chunk} steps starts without the gradient that later steps carry to it"
            )
            params = {"chunk": chunk}
            also = ("truncated_reduction", "missing_term")
            for more, zeroed in _with_last(edges, leaves):
                yield Change(
                    "overwritten_accumulator", text + more, group[0][0], group[0][1], params,
                    0.57 - 0.01 * bool(more), group=group, leaves=zeroed, also=also,
                )  # fmt: skip


def _with_last(
    edges: Sequence[Sequence[Node]], leaves: Mapping[str, Tensor]
) -> Iterator[tuple[str, Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] | None]]:
    """The gradient of the last state starts the last chunk, or is lost as well."""
    yield "", None
    like = edges[0][0].out.shape
    last = [n for n, t in leaves.items() if n.startswith("grad_") and t.shape == like]
    if last:
        yield f", the last one without {last[0]}", lambda tensors: {n: torch.zeros_like(tensors[n]) for n in last}


def _turns(calls: Sequence[Node], among: set[int]) -> dict[tuple, list[list[Node]]]:
    """For each kind of sum in a loop's backward, by iteration: the addends from the next iteration."""
    reach = _reach(calls)
    kinds: dict[tuple, list[list[Node]]] = {}
    lines: dict[tuple, list[int]] = {}
    for call in calls:
        if call.backward:
            lines.setdefault((call.name, call.line), []).append(call.index)
    for addends, own in _sums(calls, among):
        carried = []
        for addend in addends:
            alike = lines[addend.name, addend.line]
            at = alike.index(addend.index)
            again = any(reach[addend.index] >> k & 1 for k in alike[:at])
            first = not at and len(alike) >= _LEAST - 1 and any(reach[k] >> addend.index & 1 for k in alike[1:])
            carried += [addend] if again or first else []
        if carried and (own or len(carried) < len(addends)):
            kinds.setdefault(tuple(sorted((c.name, c.line) for c in carried)), []).append(carried)
    return {key: members for key, members in kinds.items() if len(members) >= _LEAST - 1}


def _sums(calls: Sequence[Node], among: set[int]) -> Iterator[tuple[list[Node], bool]]:
    """Backward sums that are not just a step of a larger sum: (addends, whether one is an output's gradient)"""
    adds = {c.index: c for c in calls if c.backward and c.index in among and c.name in _ADDS and floating(c.out)}
    readers: dict[int, list[int]] = {}
    for call in calls:
        for key in call.read if call.owns else ():
            if key in adds:
                readers.setdefault(int(key), []).append(call.index)
    step = {k for k in adds if len(readers.get(k, ())) == 1 and readers[k][0] in adds}
    for index, call in adds.items():
        addends, own, waiting = [], False, [] if index in step else [call]
        while waiting:
            for key in waiting.pop().makers[:2]:
                if key in step:
                    waiting.append(adds[int(key)])
                elif isinstance(key, int) and 0 <= key < len(calls) and calls[key].backward:
                    addends.append(calls[key])
                else:
                    own |= str(key).startswith("grad_")
        if addends:
            yield addends, own


def _reach(calls: Sequence[Node]) -> list[int]:
    """For each operator, a bit set of the operators that its result depends on."""
    reach: list[int] = []
    for call in calls:
        bits = 0
        for key in call.read:
            if isinstance(key, int) and 0 <= key < len(reach):
                bits |= reach[key] | 1 << key
        reach.append(bits)
    return reach


def _nothing() -> Changed:
    return with_result(torch.zeros_like)
