"""Loops whose backward recomputes each chunk from a saved state, and takes the state of another chunk.

Kernels save only the state at the beginning of each chunk. If it was saved too late, or another chunk's state is read,
all states of the chunk are recomputed from the wrong one.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from ...graph.graph import followed
from ...graph.node import Instead, Key, Node
from ...graph.tensors import floating, replaced
from ..change import Change
from .gradient_carries import CHUNKS

_LEAST = 3  # iterations
_KINDS = 6
# the reader of the previous iteration's state, its argument, and the maker of that state
Reader = tuple[Node, int, Key]


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    for states, readers in list(_loops(calls))[:_KINDS]:
        n = len(states)
        for chunk in (c for c in CHUNKS if c <= n):
            begins = range(0, n, chunk)
            for step, which in ((1, "the next one"), (-1, "the previous one")):
                new = {}
                for at in begins:
                    place = min(at + step * chunk, n) - 1  # the state after that iteration
                    if place >= 0:
                        new[at] = states[place].out.detach()
                if not new:
                    continue
                for kept in (False, True):
                    text = f"the backward starts each chunk of {chunk} steps from the state of another chunk, {which}"
                    yield Change("wrong_saved_tensor", text, -1, None, {"chunk": chunk, "step": step},
                                 0.56, saved=_restarted(calls, readers, new, kept),
                                 also=("shifted", "off_by_one"))  # fmt: skip


def _restarted(
    calls: Sequence[Node], readers: Mapping[int, list[Reader]], new: Mapping[int, Tensor], kept: bool
) -> Instead:
    def instead(tensors: Mapping[Key, Tensor]) -> Mapping[Key, Tensor]:
        seeds: dict[Key, Tensor] = {}
        begun: dict[Key, Tensor] = {}
        for turn, state in new.items():
            for call, i, key in readers.get(turn, []):
                seeds[call.index] = call.func(*replaced(call.args, i, state), **call.kwargs)
                begun[key] = state
        states = followed(list(calls), seeds, None)
        return {**states, **begun} if kept else states

    return instead


def _loops(calls: Sequence[Node]) -> Iterator[tuple[list[Node], dict[int, list[Reader]]]]:
    """(results of each iteration, readers of the previous iteration's) of the loops of the forward."""
    lines: dict[tuple, list[Node]] = {}
    for call in calls:
        if not call.backward and call.owns and call.line and floating(call.out) and call.out.numel() > 1:
            lines.setdefault((call.name, call.line, call.out.shape), []).append(call)
    place = {c.index: (kind, j) for kind, members in lines.items() for j, c in enumerate(members)}
    for states in lines.values():
        if len(states) < _LEAST:
            continue
        at = {c.index: j for j, c in enumerate(states)}
        loops: dict[tuple, dict[int, Reader]] = {}
        for call in calls:
            if call.backward or not call.owns or call.index not in place:
                continue
            keys = iter(call.makers)
            for i, a in enumerate(call.args):
                key = next(keys) if isinstance(a, Tensor) else -1
                line, turn = place[call.index]
                if floating(a) and a.shape == states[0].out.shape and len(lines[line]) == len(states):
                    if turn == 0 or isinstance(key, int) and at.get(key, -1) == turn - 1:
                        loops.setdefault((line, i), {})[turn] = call, i, key
        readers: dict[int, list[Reader]] = {}
        for turns in loops.values():
            if len(turns) == len(states):  # each iteration has a reader; the first one reads the initial state
                for turn, reader in turns.items():
                    readers.setdefault(turn, []).append(reader)
        if readers:
            yield states, readers
