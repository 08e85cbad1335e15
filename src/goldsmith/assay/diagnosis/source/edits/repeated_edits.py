"""Edits made in several places: kernels compute one thing in two loops, or in both phases.

Wherever the same expression stands, or wherever the same change can be made, once it has mended a part.
"""

from __future__ import annotations

import ast
import bisect
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from .edits import Edit, Function

_COST, _MOST = 0.3, 6  # cost more than of the edit in one place; places, at most
_OTHERS = 16  # other places, at most
_SAME = "\0"  # stands for the text that an edit keeps
Change = tuple[str, str]
Starts = list[int]


def repeated_edits(edits: Iterable[Edit], functions: Sequence[Function]) -> Iterator[Edit]:
    """Each edit that lies in an expression which occurs again, in all of these places; the smallest such expression."""
    files = {f.file.path: f.file.data for f in functions}
    spans = {path: _repeated([f for f in functions if f.file.path == path]) for path in files}
    for edit in edits:
        found = _smallest(spans[edit.path], edit)
        if found is not None:
            start, all_of_them = found
            shifted = [
                (first - start + at, last - start + at, text) for at in all_of_them for first, last, text in edit.spans
            ]
            yield replace(edit, spans=tuple(shifted), cost=edit.cost + _COST)


def _repeated(functions: Sequence[Function]) -> list[tuple[int, int, Starts]]:
    """(first byte, byte behind the last, where the same text stands), of each expression that occurs again."""
    places: dict[str, dict[tuple[int, int], None]] = {}
    for function in functions:
        for node in function.nodes:
            if isinstance(node, ast.BinOp | ast.Call | ast.Attribute | ast.Compare | ast.UnaryOp | ast.Subscript):
                text = function.file.text(node)
                if len(text) > 3:
                    places.setdefault(text, {})[function.file.span(node)] = None
    return sorted(
        (start, end, [s for s, _ in found])
        for found in places.values()
        if 1 < len(found) <= _MOST
        for start, end in found
    )


def _smallest(spans: Sequence[tuple[int, int, Starts]], edit: Edit) -> tuple[int, Starts] | None:
    first, last = min(s[0] for s in edit.spans), max(s[1] for s in edit.spans)
    best: tuple[int, int, Starts] | None = None
    for start, end, starts in reversed(spans[: bisect.bisect_right(spans, first, key=lambda s: s[0])]):
        if first - start > 300:
            break
        if end >= last and (best is None or end - start < best[1] - best[0]):
            best = start, end, starts
    return None if best is None else (best[0], best[2])


def alike_edits(edit: Edit, edits: Iterable[Edit], data: bytes) -> Iterator[Edit]:
    """`edit` together with those that make the same change elsewhere in the file: with each of them, and with all."""
    wanted = _changes(edit, data)
    others: list[Edit] = []
    for other in edits:
        if other.kind == edit.kind and other.path == edit.path and len(others) < _OTHERS and not edit.overlaps(other):
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
