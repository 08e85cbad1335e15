"""Edits that do what other lines of the kernel do: index a name, compare an offset with an end, use another axis."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Collection, Iterator, Mapping, Sequence

from ..reading.value_kinds import fits
from .edits import Edit, Function, likeness, loads

_AXIS_CALLS = frozenset((
    "cumsum", "flip", "sum", "mean", "amax", "amin", "softmax", "log_softmax", "logsumexp", "argmax", "argmin", "max",
    "min", "prod", "cumprod", "unsqueeze", "squeeze", "norm", "var", "std", "chunk", "unbind", "any", "all", "select",
    "narrow", "index_select", "gather", "scatter_add", "scatter_add_", "cat", "stack", "expand_dims", "reverse",
    "associative_scan", "topk", "sort",
))  # fmt: skip
_MOST_INDICES, _LONGEST = 12, 90
_ORDERS = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def neighbour_edits(function: Function, lines: Collection[int]) -> Iterator[Edit]:
    """Edits of the statements in these lines."""
    indices = _indices(function)
    for node in loads(function):
        statement = function.statement(node)
        if statement is None or statement.lineno not in lines:
            continue
        if isinstance(node, ast.Name):
            yield from _indexed(function, node, indices)
        elif isinstance(node, ast.Compare) and isinstance(node.ops[0], _ORDERS) and len(node.ops) == 1:
            yield from _compared(function, node)
        elif isinstance(node, ast.Call):
            yield from _contiguous(function, node)
        if node is _first(statement):
            yield from _other_axis(function, statement)


def inlined(function: Function, beside: Sequence[Function]) -> Iterator[tuple[str, ast.expr]]:
    """Expressions of other functions, with what their names are bound to in place of names that are unknown here."""
    known = {n.id for n in function.nodes if isinstance(n, ast.Name)} | set(function.names)
    for each in beside:
        for node in loads(each):
            if isinstance(node, ast.Subscript | ast.Call | ast.BinOp):
                names = {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
                unknown, text = names - known, each.file.text(node)
                if len(unknown) == 1 and names & known and len(text) < _LONGEST:
                    (name,) = unknown
                    value = ast.parse(each.bound.get(name, name), mode="eval").body
                    if {n.id for n in ast.walk(value) if isinstance(n, ast.Name)} <= known | {"slice"}:
                        whole = ast.unparse(value) if isinstance(value, ast.Call) else f"({ast.unparse(value)})"
                        yield whole.join(re.split(rf"\b{name}\b", text)), node


def _indices(function: Function) -> dict[str, set[str]]:
    """Index in brackets -> lengths of the first axis of what is read with it; the most frequent ones."""
    found: dict[str, list[str]] = {}
    for node in function.nodes:
        if isinstance(node, ast.Subscript) and isinstance(node.value, ast.Name):
            text = function.file.text(node.slice)
            if len(text) < _LONGEST and "\n" not in text and any(isinstance(n, ast.Name) for n in ast.walk(node.slice)):
                found.setdefault(text, []).append(_length(function, node.value.id))
    often = sorted(found, key=lambda text: -len(found[text]))[:_MOST_INDICES]
    return {text: set(found[text]) for text in often}


def _length(function: Function, name: str) -> str:
    """Of the first axis of a tensor; "" for what is none, "?" where no run has shown it."""
    shape = re.fullmatch(r"[fib]\[(\d+).*", function.kinds.get(name, ""))
    return shape[1] if shape is not None else "" if function.kinds else "?"


def _indexed(function: Function, node: ast.Name, indices: Mapping[str, set[str]]) -> Iterator[Edit]:
    """`labels[start:end]` for `labels`: a part, as of the others that are as long."""
    parent, length = function.file.parents.get(node), _length(function, node.id)
    whole = isinstance(parent, ast.Subscript) and parent.value is node or node.id in function.called
    for index, lengths in indices.items() if length and not whole else ():
        if (length == "?" or lengths & {length, "?"}) and not re.search(rf"\b{node.id}\b", index):
            yield function.swap(node, f"{node.id}[{index}]", "index added", 1.3)


def _compared(function: Function, node: ast.Compare) -> Iterator[Edit]:
    """Another offset and another end at once: `lane < size` for `place < count`."""
    (operator,) = node.ops
    (right,), left = node.comparators, node.left
    sign = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}[type(operator)]
    if not isinstance(left, ast.Name) or not isinstance(right, ast.Name):
        return
    lefts, rights = (
        [n for n in function.names if n != own.id and fits(function.kinds.get(own.id, "?"), function.kinds.get(n, "?"))]
        for own in (left, right)
    )
    for one, other in itertools.product(lefts, rights):
        if one != other:
            cost = 2.3 - 0.8 * likeness(one, other)  # an offset and its end often share a word
            yield function.swap(node, f"{one} {sign} {other}", "another condition", cost)


def _contiguous(function: Function, node: ast.Call) -> Iterator[Edit]:
    """A contiguous copy of every tensor that a kernel is launched with."""
    launch = isinstance(node.func, ast.Subscript)
    names = [
        a for a in node.args if launch and isinstance(a, ast.Name) and function.kinds.get(a.id, "f[?]")[0] in "fib"
    ]
    tensors = [a for a in names if "[]" not in function.kinds.get(a.id, "f[?]")]
    if len(tensors) > 1:
        spans = [(*function.file.span(a), f"{a.id}.contiguous()") for a in tensors]
        yield function.edit(node, "call added", 1.7, *spans)


def _first(statement: ast.stmt) -> ast.AST | None:
    return next((n for n in ast.iter_child_nodes(statement) if isinstance(n, ast.expr) and not hasattr(n, "ctx")), None)


def _other_axis(function: Function, statement: ast.stmt) -> Iterator[Edit]:
    """Another axis in all calls of a statement that name the same one."""
    places: dict[int, list[ast.Constant]] = {}
    for node in ast.walk(statement):
        name = getattr(getattr(node, "func", None), "attr", "")
        if isinstance(node, ast.Call) and name in _AXIS_CALLS:
            given = [*node.args, *(k.value for k in node.keywords if k.arg in ("dim", "axis", "dims"))]
            for value in given:
                if isinstance(value, ast.Constant) and type(value.value) is int:
                    places.setdefault(value.value, []).append(value)
    for axis, nodes in places.items():
        for other in ("0", "1", "2", "3") if len(nodes) > 1 else ():
            if other != str(axis):
                spans = [(*function.file.span(n), other) for n in nodes]
                yield function.edit(nodes[0], "another axis", 1.5, *spans)
