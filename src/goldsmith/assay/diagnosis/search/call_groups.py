"""The same change at several operators: a line in a loop, or an expression that is written twice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from ..edits.golden_edit import NamedEdit
from ..graph.loops import signature
from ..graph.node import Node
from ..graph.tensors import whole

_MOST = 64  # operators in a group
_SHOWN = 4096  # integers to compare
_NUMBER = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?")


def _indexed_alike(call: Node) -> tuple | None:
    """Reads of several tensors with the same integers."""
    numbers = [a for a in (*call.args, *_listed(call.args)) if whole(a)]
    if not numbers:
        return None
    return (call.name, call.backward, *(str(n.tolist()) for n in numbers if n.numel() <= _SHOWN))


def _listed(args: tuple) -> list:
    return [b for a in args if isinstance(a, list | tuple) for b in a]


def grouped(calls: Sequence[Node], changes: Mapping[int, Sequence[NamedEdit]]) -> Iterator[NamedEdit]:
    """One change for every kind shared by all operators of a line, of an expression, or with the same indices."""
    groups: dict[tuple, list[Node]] = {}
    for call in calls:
        if changes.get(call.index):
            if call.line:
                groups.setdefault((call.name, call.line, str(call.backward)), []).append(call)
                groups.setdefault(signature(calls, call), []).append(call)
            if any(call.operands):
                groups.setdefault((call.name, call.expression, str(call.backward)), []).append(call)
            indexed = _indexed_alike(call)
            if indexed is not None:
                groups.setdefault(indexed, []).append(call)
    seen = set()
    for members in [*groups.values(), *_in_turn(groups)]:
        key = tuple(c.index for c in members)
        if 1 < len(members) <= _MOST and key not in seen:
            seen.add(key)
            yield from together(members, changes)


def _in_turn(groups: Mapping[tuple, Sequence[Node]]) -> Iterator[Sequence[Node]]:
    """If a line calls an operator several times per iteration: one of those calls, in all iterations."""
    for (_, where, *_), members in groups.items():
        for each in (2, 3, 4) if ":" in str(where) else ():
            if len(members) >= 2 * each and len(members) % each == 0:
                yield from (members[i::each] for i in range(each))


def together(members: Sequence[Node], changes: Mapping[int, Sequence[NamedEdit]]) -> Iterator[NamedEdit]:
    """One change for every kind that all members share."""
    kinds = [_kinds(call, changes[call.index]) for call in members]
    for kind, first in kinds[0].items():
        alike = [k[kind] for k in kinds if kind in k]
        if len(alike) != len(members):
            continue
        text = f"{first.text}, in {len(members)} places"
        if first.free is not None:  # the fitted number comes after it
            text = f"like {len(members) - 1} similar operators, {first.text}"
        cause, also = first.cause, first.also
        if cause == "missing_term" and _running(members):  # in every iteration the earlier value is dropped
            cause, also = "overwritten_accumulator", ("missing_term", "lost_update")
        actions = tuple(action for c in alike for action in c.edit.actions)
        edit = replace(first.edit, actions=actions)
        yield replace(first, cause=cause, text=text, edit=edit, prior=first.prior - 0.05, also=also)


def _running(members: Sequence[Node]) -> bool:
    """Whether each member adds to the result of the one before."""
    chained = zip(members, members[1:], strict=False)
    return members[0].name in ("add", "add_") and all(a.index in b.makers for a, b in chained)


def _kinds(call: Node, changes: Sequence[NamedEdit]) -> dict[tuple[str, str, int], NamedEdit]:
    """Changes by cause, text without names and numbers, and position among equal ones."""
    kinds: dict[tuple[str, str, int], NamedEdit] = {}
    for change in changes:
        text = change.text
        for name in sorted({call.expression, *call.operands}, key=len, reverse=True):
            text = text.replace(name, "@") if name else text
        text, count = _NUMBER.sub("#", text), 0
        while (change.cause, text, count) in kinds:
            count += 1
        kinds[change.cause, text, count] = change
    return kinds
