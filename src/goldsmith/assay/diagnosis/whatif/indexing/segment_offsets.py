"""Positions without their shift: in sequences of different lengths they have to be counted from the same end."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import whole
from ..change import Change

_MOST = 1024  # operators of one line


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    """Shifts that a line adds to positions are left out wherever it runs: all of them, or those of one kind."""
    lines: dict[str, list[Node]] = {}
    for call in calls:
        number = call.args[1] if len(call.args) > 1 else None
        moves = call.name in ("add", "sub") and whole(call.args[0]) and isinstance(number, int)
        if moves and call.index in among and call.line and call.args[0].numel() > 1:
            lines.setdefault(call.line, []).append(call)
    for members in lines.values():
        names = sorted({call.name for call in members})
        kinds = [names] + [[one] for one in names if len(names) > 1]
        for kind in kinds:
            some = [call for call in members if call.name in kind]
            if any(call.args[1] for call in some) and len(some) <= _MOST:
                signs = " and ".join({"add": "added", "sub": "taken off"}[k] for k in kind)
                text = f"what is {signs} in {members[0].operand(0) or 'positions'} is left out, {len(some)} times"
                group = tuple((call.index, _as_it_is) for call in some)
                yield Change("shifted", text, some[0].index, _as_it_is, {}, 0.55, group=group,
                             also=("missing_term", "off_by_one"))  # fmt: skip


def _as_it_is(func: Callable[..., object], args: tuple, kwargs: dict) -> Tensor:
    return args[0].clone()
