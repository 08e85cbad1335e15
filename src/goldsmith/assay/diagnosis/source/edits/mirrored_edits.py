"""Edits made at once in expressions that are alike but for names: kernels do for columns what they do for rows."""

from __future__ import annotations

import ast
import bisect
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from .edits import Edit, Function, Span

_COST, _MOST, _LINES = 0.3, 4, 8  # cost more than of one edit; expressions, at most, and lines between them
_NAME = re.compile(r"\b[A-Za-z_]\w*\b")


@dataclass(frozen=True)
class _Unit:
    """An expression that a statement assigns, stores or returns, or an element of such a tuple."""

    start: int
    text: str
    line: int

    @property
    def end(self) -> int:
        return self.start + len(self.text.encode())


def mirrored_edits(edits: Iterable[Edit], functions: Sequence[Function]) -> Iterator[Edit]:
    """Each edit of such an expression, in those like it as well, with their names."""
    paths = {f.file.path for f in functions}
    groups = {p: sorted(_groups([f for f in functions if f.file.path == p]), key=lambda r: r[0].start) for p in paths}
    for edit in edits:
        rows = groups[edit.path]
        at = bisect.bisect_right(rows, min(s[0] for s in edit.spans), key=lambda r: r[0].start) - 1
        if at >= 0 and max(s[1] for s in edit.spans) <= rows[at][0].end and rows[at][0].text.isascii():
            own, others = rows[at]
            spans = [_moved(span, own, other) for other in others for span in edit.spans]
            if all(s is not None for s in spans):
                yield replace(edit, spans=(*edit.spans, *(s for s in spans if s is not None)), cost=edit.cost + _COST)


def _groups(functions: Sequence[Function]) -> Iterator[tuple[_Unit, list[_Unit]]]:
    for function in functions:
        alike: dict[str, list[_Unit]] = {}
        for unit in _units(function):
            alike.setdefault(_NAME.sub("_", unit.text), []).append(unit)
        for units in alike.values():
            for unit in units:
                others = [u for u in units if u is not unit and abs(u.line - unit.line) <= _LINES]
                others = [u for u in others if u.text != unit.text and _names(unit, u) is not None]
                if 0 < len(others) < _MOST:
                    yield unit, others


def _units(function: Function) -> Iterator[_Unit]:
    for node in function.nodes:
        value = node.value if isinstance(node, ast.Assign | ast.AugAssign | ast.Expr | ast.Return) else None
        for part in value.elts if isinstance(value, ast.Tuple) else [value] if value is not None else []:
            text = function.file.text(part)
            if isinstance(part, ast.BinOp | ast.Call | ast.Compare | ast.Subscript) and "\n" not in text:
                yield _Unit(function.file.span(part)[0], text, part.lineno)


def _names(one: _Unit, other: _Unit) -> dict[str, str] | None:
    """Name in the first text -> name in the other; None if a name has two there, or if the calls differ."""
    names: dict[str, str] = {}
    for first, second in zip(_NAME.finditer(one.text), _NAME.finditer(other.text), strict=True):
        called = one.text[first.end() :].startswith("(") or one.text[: first.start()].endswith(".")
        if names.setdefault(first.group(), second.group()) != second.group() or called and first[0] != second[0]:
            return None
    return names


def _moved(span: Span, one: _Unit, other: _Unit) -> Span | None:
    """The span in the other expression, with its names; None if it begins or ends within a name."""
    names = _names(one, other) or {}
    ends = [_place(at - one.start, one.text, other.text) for at in span[:2]]
    text = _NAME.sub(lambda m: names.get(m.group(), m.group()), span[2])
    first, last = ends
    return None if first is None or last is None else (other.start + first, other.start + last, text)


def _place(at: int, one: str, other: str) -> int | None:
    moved = 0
    for first, second in zip(_NAME.finditer(one), _NAME.finditer(other), strict=True):
        if first.start() >= at:
            break
        if first.end() > at:
            return None
        moved = second.end() - first.end()
    return at + moved
