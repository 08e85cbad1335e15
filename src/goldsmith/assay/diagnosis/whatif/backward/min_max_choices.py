"""Backward branches that differ from the forward: the whole gradient goes to one side of a min or max.

min(r A, clip(r) A) has no gradient where the clipped side is taken and r is outside its limits. A kernel that only
tests whether r is within its limits always takes the gradient of one side, whichever is smaller.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from ...graph.node import Changed, Node
from ..change import Change, instead

_CHOICES = frozenset("minimum maximum".split())
_MASKS = frozenset("gt lt ge le".split())
_MOST = 64


def changes(calls: Sequence[Node], among: set[int]) -> Iterator[Change]:
    """The choices of one source line change together in all iterations."""
    lines: dict[str, list[tuple[Node, Node | None, Node | None]]] = {}
    for call in calls:
        if call.backward or call.name not in _CHOICES or len(call.makers) != 2:
            continue
        sides = _sides(calls, call)
        if any(s is not None and s.index in among for s in sides):
            lines.setdefault(call.line or str(call.index), []).append((call, *sides))
    for members in lines.values():
        for always in (0, 1) if len(members) <= _MOST else ():
            group: list[tuple[int, Changed]] = []
            for _, *both in members:
                for i, side in enumerate(both):
                    if side is not None:
                        group += _whole(calls, side) if i == always else [(side.index, _nothing())]
            call = members[0][0]
            name = call.operand(always) or ("the first", "the second")[always]
            text = f"in the backward {call.expression} always takes {name}, whichever the forward took"
            if group:
                yield Change("wrong_decision", text, group[0][0], group[0][1], {"operand": name}, 0.6,
                             group=tuple(group), also=("wrong_mask", "wrong_saved_tensor"))  # fmt: skip


def _sides(calls: Sequence[Node], choice: Node) -> tuple[Node | None, Node | None]:
    """The operators that hide the gradient where the other operand is taken, for the first and the second operand."""
    sides: list[Node | None] = [None, None]
    masks = {c.index: c for c in calls if c.backward and c.name in _MASKS and c.makers == choice.makers}
    for call in calls:
        if (
            call.backward
            and call.name.rstrip("_") == "masked_fill"
            and len(call.makers) > 1
            and call.makers[1] in masks
        ):
            mask = masks[int(call.makers[1])].name
            first = (mask in ("gt", "ge")) == (choice.name == "minimum")  # hidden where the first operand is larger
            sides[0 if first else 1] = call
    return sides[0], sides[1]


def _whole(calls: Sequence[Node], side: Node) -> Iterator[tuple[int, Changed]]:
    """The whole gradient that reaches the choice; autograd halves it first where both operands are equal."""
    halved = calls[side.makers[0]] if isinstance(side.makers[0], int) and side.makers[0] >= 0 else None
    if halved is not None and halved.name == "where":
        yield halved.index, instead(lambda mask, half, sent: sent.clone())
    yield side.index, instead(lambda x, *a: x.clone())


def _nothing() -> Changed:
    return instead(lambda x, *a: torch.zeros_like(x))
