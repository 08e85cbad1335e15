"""Places counted from the wrong origin: a segment's offset not added, or positions without their shift.

Rows of several lengths lie one after another, and offsets give their beginnings. A kernel counts within a segment and
has to add its beginning. Positions in sequences of different lengths have to be counted from the same end.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from ...graph.node import Node
from ...graph.tensors import whole
from ..change import Change

_ROWS = 1 << 16
_MOST = 1024  # operators of one line
Leaves = Mapping[str, Tensor]


def changes(calls: Sequence[Node], among: set[int], leaves: Leaves) -> Iterator[Change]:
    yield from _from_the_beginning(leaves)
    yield from _unmoved(calls, among)


def _from_the_beginning(leaves: Leaves) -> Iterator[Change]:
    for by, offsets in leaves.items():
        if not whole(offsets) or offsets.dim() != 1 or len(offsets) < 3 or bool((offsets.diff() < 0).any()):
            continue
        n = int(offsets[-1])
        if int(offsets[0]) or not 2 < n <= _ROWS:
            continue
        for name, t in leaves.items():
            if name != by and t.dim() and t.shape[0] == n:

                def read(now: Leaves, name: str = name, by: str = by) -> Leaves:
                    return {name: now[name].index_select(0, _within(now[by]).to(now[name].device))}

                text = f"{name} is read from its beginning in every segment: the offset from {by} is not added"
                yield Change("invalid_index", text, -1, None, {"operand": name, "axis": 0}, 0.55, leaves=read,
                             also=("wrong_stride", "shifted"))  # fmt: skip


def _within(offsets: Tensor) -> Tensor:
    """The place of every row within its own segment."""
    place = torch.arange(int(offsets[-1]), device=offsets.device)
    return place - offsets[torch.searchsorted(offsets, place, right=True) - 1]


def _unmoved(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
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
