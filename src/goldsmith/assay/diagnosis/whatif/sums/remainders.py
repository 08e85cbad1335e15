"""Remainders after whole blocks, left out of sums of several lengths, as vectorised kernels do."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from ...graph.node import Node
from ...graph.tensors import floating, replaced
from ..change import Change, with_arguments
from .reductions import axes_of, neutral, only

_BLOCKS = (2, 4, 8, 16, 32, 64, 128, 256)
_SUMS = frozenset("sum mean amax amin logsumexp linalg_vector_norm".split())
_MOST = 64  # sums of a line
_TURNS = (1, 2, 3, 4)  # sums that a line has in each iteration


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    """All sums of one source line change together, or those of one iteration."""
    lines: dict[tuple, list[Node]] = {}
    for call in calls:
        if (
            call.index in among
            and call.line
            and call.name in _SUMS
            and floating(call.args[0])
            and len(axes_of(call)) == 1
        ):
            lines.setdefault((call.name, call.line, call.backward), []).append(call)
    for members in lines.values():
        for turn in _TURNS if 1 < len(members) <= _MOST else ():
            if len(members) % turn == 0 and len(members) > turn:
                for first in range(turn):
                    yield from _cut(members[first::turn])


def _cut(members: Sequence[Node]) -> Iterator[Change]:
    lengths = [call.args[0].shape[axes_of(call)[0]] for call in members]
    if len(set(lengths)) == 1:
        return  # of one length: the changes of each sum cover it
    seen: set[tuple[int, ...]] = set()
    for block in _BLOCKS:
        rests = tuple(n % block for n in lengths)
        if not any(rests) or rests in seen:
            continue
        seen.add(rests)
        group = []
        for call, n, rest in zip(members, lengths, rests, strict=True):
            axis, fill = axes_of(call)[0], neutral(call.name)

            def whole(args: tuple, axis: int = axis, n: int = n, rest: int = rest, fill: float = fill) -> tuple:
                return replaced(args, 0, only(args[0], axis, 0, n - rest, fill))

            if rest:
                group.append((call.index, with_arguments(whole)))
        text = f"the rest after whole blocks of {block} is left out of {members[0].expression}, in {len(group)} places"
        yield Change("truncated_reduction", text, group[0][0], group[0][1], {"block": block}, 0.62, group=tuple(group),
                     also=("wrong_mask", "off_by_one"))  # fmt: skip
