"""Edits that make an expression like its counterpart: one of the golden, of another function, or for another name.

Kernels treat x and y, dk and dv, rows and columns alike, and a backward does again what its forward does. Both
expressions are aligned tree by tree, and where they differ, the counterpart's part comes in.
"""

from __future__ import annotations

import ast
import itertools
import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache

from .edits import Edit, Function, Span
from .translation import Pair, Translation

_KINDS = (ast.BinOp, ast.Call, ast.Compare, ast.Subscript, ast.BoolOp, ast.IfExp)
_GROUPS = {
    ast.Add: "sum", ast.Sub: "sum",
    ast.Mult: "product", ast.Div: "product", ast.FloorDiv: "product", ast.Mod: "product",
}  # fmt: skip
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.FloorDiv: "//", ast.Mod: "%"}
_ALIKE, _WORDS = 0.5, 0.3  # shares of leaves and of words in common, at least
_MOST, _DIFFERENCES, _PAIRS = 6, 3, 24  # counterparts of an expression, their differences, pairs of names, at most
_UNREAD = 0.9  # cost less for what brings in a name that nothing reads
_NAME, _LEAF = re.compile(r"[A-Za-z_]\w*"), re.compile(r"[\w.]*\w")
_OF_NODES = lru_cache(1 << 14)  # what is asked of the same nodes again and again


@dataclass(frozen=True)
class Counterpart:
    """An expression of another place. cost: the more, the less it has to do with the candidate's."""

    node: ast.expr
    names: Translation
    cost: float

    @cached_property
    def words(self) -> frozenset[str]:
        return frozenset(self.names.name(w) or w for w in _words(self.node))

    @cached_property
    def leaves(self) -> int:
        return _leaves(self.node).total()


@dataclass(frozen=True)
class _Difference:
    """Two parts. left, sign: before the own part, and the other operator between them, if that differs as well."""

    own: ast.AST
    other: ast.AST
    left: ast.AST | None = None
    sign: str = ""


def counterpart_edits(
    function: Function, beside: Sequence[Function], golden: Sequence[Function], pairs: Sequence[Pair]
) -> Iterator[Edit]:
    """pairs: parts of names, for each of which the function may do the same."""
    table: dict[str, list[Counterpart]] = {}
    for counterpart in _counterparts(function, beside, golden, pairs):
        table.setdefault(_signature(counterpart.node), []).append(counterpart)
    for node in _expressions(function):
        found: list[tuple[float, list[Edit]]] = []
        words, leaves = _words(node), _leaves(node).total()
        for other in table.get(_signature(node), ()) if len(words) > 1 else ():
            shared = len(words & other.words)
            if shared >= 2 and shared >= _WORDS * len(words | other.words) and other.node is not node:
                found += [(edits[0].cost, edits) for edits in [_aligned(function, node, leaves, other)] if edits]
        for _, edits in sorted(found, key=lambda row: row[0])[:_MOST]:
            yield from edits


def _counterparts(
    function: Function, beside: Sequence[Function], golden: Sequence[Function], pairs: Sequence[Pair]
) -> Iterator[Counterpart]:
    for source, names, cost in (
        *((g, Translation(function, golden=True), 0.0) for g in golden),
        *((f, Translation(function), 0.0) for f in (function, *beside)),
        *((function, Translation(function, pair=p), 0.1) for p in pairs[:_PAIRS]),
    ):
        yield from (Counterpart(node, names, cost) for node in _expressions(source))


def _expressions(function: Function) -> list[ast.expr]:
    return [n for n in function.nodes if isinstance(n, _KINDS) and isinstance(getattr(n, "ctx", ast.Load()), ast.Load)]


def _signature(node: ast.AST) -> str:
    """What two expressions must have in common to be compared."""
    if isinstance(node, ast.BinOp):
        return _GROUPS.get(type(node.op), type(node.op).__name__)
    if isinstance(node, ast.Call):
        return getattr(node.func, "attr", getattr(node.func, "id", "call"))
    return type(node).__name__


@_OF_NODES
def _words(node: ast.AST) -> frozenset[str]:
    found = (getattr(n, "id", getattr(n, "attr", "")) for n in ast.walk(node))
    return frozenset(w for w in found if w)


@_OF_NODES
def _leaves(node: ast.AST) -> Counter[str]:
    """Names and numbers."""
    return Counter(_LEAF.findall(ast.unparse(node)))


def _aligned(function: Function, node: ast.expr, leaves: int, other: Counterpart) -> list[Edit]:
    """The edit that brings in all differences, and each alone."""
    differences = list(itertools.islice(_differences(node, other.node, other.names), _DIFFERENCES + 1))
    if not 0 < len(differences) <= _DIFFERENCES:
        return []
    kept = leaves - sum((_leaves(d.own) - _leaves(d.other)).total() for d in differences)
    alike = (kept / leaves + kept / other.leaves) / 2
    if alike < _ALIKE:
        return []
    changes = [_change(function, d, other.names) for d in differences]
    written = [c for c in changes if c is not None]
    groups = [[c] for c in written]
    if len(written) > 1 and len(written) == len(differences):
        groups.insert(0, written)
    cost = 1.9 - alike + other.cost
    return [_edit(function, node, group, cost + 0.1 * (n > 0)) for n, group in enumerate(groups)]


def _edit(function: Function, node: ast.expr, changes: Sequence[tuple[Span, str]], cost: float) -> Edit:
    kind = changes[0][1] if len(changes) == 1 else "like its twin"
    unread = any(name in function.unread for (_, _, text), _ in changes for name in _NAME.findall(text))
    return function.edit(node, kind, cost - _UNREAD * unread, *(span for span, _ in changes))


def _differences(own: ast.AST, other: ast.AST, names: Translation) -> Iterator[_Difference]:
    """The smallest parts in which the trees differ; with another operator comes its right operand."""
    if isinstance(own, ast.Name) and isinstance(other, ast.Name) and names.name(other.id) == own.id:
        return
    if isinstance(own, ast.Constant) and isinstance(other, ast.Constant) and own.value == other.value:
        return
    children = _children(own, other)
    if children is not None:
        for one, two in children:
            yield from _differences(one, two, names)
        return
    if isinstance(own, ast.BinOp) and isinstance(other, ast.BinOp) and _signature(own) == _signature(other):
        yield from _differences(own.left, other.left, names)
        yield _Difference(own.right, other.right, own.left, _SIGNS[type(other.op)])
    else:
        yield _Difference(own, other)


def _children(own: ast.AST, other: ast.AST) -> list[tuple[ast.AST, ast.AST]] | None:
    """The parts of two trees of the same form, in pairs; None if their forms differ."""
    if type(own) is not type(other) or isinstance(own, ast.Name | ast.Constant):
        return None
    mine, its = _parts(own), _parts(other)
    if len(mine) != len(its) or any(a != b for (a, _), (b, _) in zip(mine, its, strict=True)):
        return None
    return [(a, b) for (_, a), (_, b) in zip(mine, its, strict=True)]


@_OF_NODES
def _parts(node: ast.AST) -> list[tuple[object, ast.AST]]:
    """(what must be alike, part) of a tree."""
    if isinstance(node, ast.Call):
        called = [(getattr(node.func, "attr", ""), node.func)]
        keywords = sorted(((k.arg or "**", k.value) for k in node.keywords), key=lambda row: row[0])
        return [*called, *((n, a) for n, a in enumerate(node.args)), *keywords]
    if isinstance(node, ast.Attribute):
        return [(node.attr, node.value)]
    form: tuple[object, ...] = tuple(
        type(n) for n in ast.iter_child_nodes(node) if not isinstance(n, ast.expr | ast.Slice | ast.expr_context)
    )
    children = [n for n in ast.iter_child_nodes(node) if isinstance(n, ast.expr | ast.Slice)]
    if isinstance(node, ast.Slice):
        form = tuple(part is None for part in (node.lower, node.upper, node.step))
    return [(form, n) for n in children]


def _change(function: Function, difference: _Difference, names: Translation) -> tuple[Span, str] | None:
    """The change that brings in the other part, and its kind; None if it cannot be written here."""
    own, other = difference.own, difference.other
    text, before = names.text(other), ast.unparse(own)
    if not isinstance(own, ast.expr) or not text:
        return None
    start, end = function.file.span(own)
    if difference.left is not None:
        left = function.file.span(difference.left)[1]
        gap = function.file.data[left:start].decode()
        at = left + len(gap) - len(gap.lstrip(" \t\n\\)"))
        closing = function.file.data[start - 1 : start] == b"(" and function.file.data[end : end + 1] == b")"
        wrapped = f"({text})" if isinstance(other, ast.BinOp | ast.UnaryOp | ast.IfExp) else text
        return (at, end + closing, f"{difference.sign} {wrapped}"), "operator"
    return ((start, end, function.fitted(own, text)), _kind(own, other, before, text)) if text != before else None


def _kind(own: ast.AST, other: ast.AST, before: str, after: str) -> str:
    """What the other expression does, in the words of the other edits."""
    if isinstance(own, ast.Name) and isinstance(other, ast.Name):
        return "another name"
    if isinstance(own, ast.Constant) and isinstance(other, ast.Constant):
        return "number"
    if after in (f"-{before}", f"-({before})") or before in (f"-{after}", f"-({after})"):
        return "sign"
    for whole, part, does in ((other, before, "added"), (own, after, "removed")):
        if isinstance(whole, ast.BinOp) and part in (ast.unparse(whole.left), ast.unparse(whole.right)):
            return f"{'addend' if isinstance(whole.op, ast.Add | ast.Sub) else 'factor'} {does}"
    return "another expression"
