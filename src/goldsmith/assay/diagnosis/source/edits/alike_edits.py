"""Edits made in several places, because the first of them mended a part: faults sit in both directions of a kernel."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace

from .edits import Edit

_MOST = 16  # other places, at most
_SAME = "\0"  # stands for the text that an edit keeps
Change = tuple[str, str]


def alike_edits(edit: Edit, edits: Iterable[Edit], data: bytes) -> Iterator[Edit]:
    """`edit` together with those that make the same change elsewhere in the file: with each of them, and with all."""
    wanted = _changes(edit, data)
    others: list[Edit] = []
    for other in edits:
        if other.kind == edit.kind and other.path == edit.path and len(others) < _MOST and not edit.overlaps(other):
            if _changes(other, data) == wanted:
                others.append(other)
    for other in others:
        yield _first(edit.joined(other))
    whole = edit
    for other in sorted(others, key=lambda o: len(o.spans)):
        if not whole.overlaps(other):
            whole = whole.joined(other)
    if len(whole.spans) > len(edit.spans) and len(others) > 1:
        yield _first(whole)


def _first(edit: Edit) -> Edit:
    """The edit with a cost that puts it before all others."""
    return replace(edit, cost=-1.0)


def _changes(edit: Edit, data: bytes) -> set[Change]:
    return {_change(data[start:end].decode(errors="replace"), text) for start, end, text in edit.spans}


def _change(before: str, after: str) -> Change:
    """What is replaced by what, without the text that both have whole: a factor that is added to x is also one of y."""
    if before and before in after:
        return _SAME, after.replace(before, _SAME, 1)
    if after and after in before:
        return before.replace(after, _SAME, 1), _SAME
    return before, after
