"""Edits that copy a twin: a statement that does for one name what another does, or should do, for another name.

Kernels treat x and y, dk and dv, or rows and columns alike; what is missing on one side stands on the other.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Sequence

from .edits import Edit, Function

_NAME = re.compile(r"\"[^\"]*\"|'[^']*'|\b[A-Za-z_]\w*\b")  # or a text, which stays
_SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr)
_LONGEST, _MOST_PAIRS = 200, 40
Pair = tuple[str, str]


def twin_edits(function: Function, beside: Sequence[Function], lines: Collection[int]) -> Iterator[Edit]:
    """Statements in these lines become like their twins, and twins that are missing come behind the other one."""
    own = _statements(function)
    pairs = _pairs(function.names)
    texts = {text for _, text in own}
    copies: dict[str, list[tuple[str, bool]]] = {}
    for each in (function, *beside):
        known = {*function.names, *(n.id for n in function.nodes if isinstance(n, ast.Name))}
        for node, text in own if each is function else _statements(each):
            for pair in (("", ""), *pairs):
                copy = _renamed(text, pair, known)
                if copy is None or copy in texts:
                    continue
                copies.setdefault(_target(ast.parse(copy).body[0]), []).append((copy, bool(pair[0])))
                if pair[0] and each is function and node.lineno in lines:
                    at = function.file.span(node)[1]
                    yield function.edit(node, "twin added", 2.0, (at, at, "\n" + " " * node.col_offset + copy))
    for node, text in own:
        for copy, renamed in dict.fromkeys(copies.get(_target(node), ())):
            if node.lineno in lines and copy != text:
                yield function.edit(node, "like its twin", 1.4 + 0.1 * renamed, (*function.file.span(node), copy))


def _statements(function: Function) -> list[tuple[ast.stmt, str]]:
    nodes = [
        n for n in function.nodes if isinstance(n, _SIMPLE) and not isinstance(getattr(n, "value", 0), ast.Constant)
    ]
    texts = ((n, function.file.text(n)) for n in nodes)
    return [(n, text) for n, text in texts if len(text) <= _LONGEST and "\n" not in text]


def _pairs(names: Sequence[str]) -> list[Pair]:
    """(part, other part) of names that differ in one part: ("x", "y") for sum_x and sum_y, ("k", "v") for dk and dv."""
    found: dict[Pair, int] = {}
    for one in names:
        for other in names:
            if one != other and len(one) == len(other) <= 12:
                apart = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
                pair = one[apart[0] : apart[-1] + 1], other[apart[0] : apart[-1] + 1]
                found[pair] = found.get(pair, 0) + 1
    often = sorted((p for p, n in found.items() if n > 1), key=lambda p: -found[p])
    return often[:_MOST_PAIRS]


def _renamed(text: str, pair: Pair, known: Collection[str]) -> str | None:
    """The text for the other part of a pair; None if it names what the function does not know, or changes nothing."""
    missing = False

    def other(match: re.Match[str]) -> str:
        nonlocal missing
        name = match.group()
        if name[0] in "\"'":
            return name
        changed = name.replace(*pair) if pair[0] else name
        if changed in known:
            return changed
        before = text[: match.start()].rstrip()
        missing |= name not in known and not before.endswith(".") and not text[match.end() :].lstrip().startswith("=")
        return name

    copy = _NAME.sub(other, text)
    return None if missing or pair[0] and copy == text else copy


def _target(node: ast.stmt) -> str:
    """What a statement writes to: its target, or the function that it calls with its first argument."""
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0])
    if isinstance(node, ast.AugAssign):
        return ast.unparse(node.target)
    value = getattr(node, "value", None)
    first = value.args[0] if isinstance(value, ast.Call) and value.args else value
    return f"({ast.unparse(first)})" if first is not None else ""
