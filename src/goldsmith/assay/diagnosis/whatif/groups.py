"""The same change at several operators: a line in a loop, or an expression that is written twice."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from .calls import Call, Change

_MOST = 64  # operators in a group
_NUMBER = re.compile(r"\d+(\.\d+)?(e[-+]?\d+)?")


def grouped(calls: Sequence[Call], changes: Mapping[int, Sequence[Change]]) -> Iterator[Change]:
    """One change for every kind that all operators of a line, or of an expression, know."""
    groups: dict[tuple[str, ...], list[Call]] = {}
    for call in calls:
        if changes.get(call.index):
            if call.line:
                groups.setdefault((call.name, call.line, str(call.backward)), []).append(call)
            if any(call.operands):
                groups.setdefault((call.name, call.said, str(call.backward)), []).append(call)
    told = set()
    for members in groups.values():
        key = tuple(c.index for c in members)
        if 1 < len(members) <= _MOST and key not in told:
            told.add(key)
            yield from together(members, changes)


def together(members: Sequence[Call], changes: Mapping[int, Sequence[Change]]) -> Iterator[Change]:
    """One change for every kind that all members know."""
    kinds = [_kinds(call, changes[call.index]) for call in members]
    for kind, first in kinds[0].items():
        alike = [k[kind] for k in kinds if kind in k]
        if len(alike) == len(members) and first.change is not None:
            group = tuple((c.at, c.change) for c in alike if c.change is not None)
            text = f"{first.text}, and so {len(members)} times"
            if first.free is not None:  # the number that is sought comes after it
                text = f"as {len(members) - 1} more of them, {first.text}"
            yield replace(first, text=text, group=group, prior=first.prior - 0.05)


def _kinds(call: Call, changes: Sequence[Change]) -> dict[tuple[str, str, int], Change]:
    """By cause, text without names and numbers, and which of its like it is."""
    found: dict[tuple[str, str, int], Change] = {}
    for change in changes:
        text = change.text
        for name in sorted({call.said, *call.operands}, key=len, reverse=True):
            text = text.replace(name, "@") if name else text
        text, count = _NUMBER.sub("#", text), 0
        while (change.cause, text, count) in found:
            count += 1
        found[change.cause, text, count] = change
    return found
