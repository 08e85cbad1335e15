"""Edits of whole statements: exchanged, moved into a loop or out of it, inserted; names exchanged within one."""

from __future__ import annotations

import ast
import itertools
from collections.abc import Iterator

from ..reading.value_kinds import fits
from .edits import Edit, Function, likeness
from .translation import copied

_SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr)
_FAR = 8  # statements by which one is moved


def statement_edits(function: Function) -> Iterator[Edit]:
    for body in _bodies(function):
        for first, second in itertools.pairwise(body):
            if isinstance(first, _SIMPLE) and isinstance(second, _SIMPLE) and first.lineno != second.lineno:
                if not _is_text(first):
                    yield _exchanged(function, first, second)
            if isinstance(first, _SIMPLE) and isinstance(second, ast.For | ast.While) and not _is_text(first):
                yield _into(function, first, second)
        yield from _moved(function, body)
        for loop in body:
            if isinstance(loop, ast.For | ast.While) or isinstance(loop, ast.If) and not loop.orelse:
                yield from _out_of(function, loop)
            if isinstance(loop, ast.For) and getattr(getattr(loop.iter, "func", None), "id", "") != "range":
                yield function.swap(loop.iter, f"reversed({function.file.text(loop.iter)})", "loop turned", 1.5)
    for node in function.nodes:
        if isinstance(node, (*_SIMPLE, ast.Return)):
            yield from _names_exchanged(function, node)
            yield from _words_exchanged(function, node)
        if isinstance(node, ast.Assign):
            yield from _targets(function, node)
    yield from _dense(function)
    for node in function.nodes:
        if isinstance(node, ast.If) and not node.orelse:
            yield from _other_branch(function, node)


def _other_branch(function: Function, node: ast.If) -> Iterator[Edit]:
    """An `else` that does the same without the factors which only the branch knows; all of it, or all but one."""
    own = {n.id for s in node.body for n in ast.walk(s) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
    last, end = node.lineno - 1, node.end_lineno or 0
    uses = [n for n in function.nodes if isinstance(n, ast.Name) and n.id in own and not last < n.lineno <= end]
    own -= {n.id for n in uses}
    copies = []
    for statement in node.body:
        known = _without(copied(statement), own)
        if isinstance(known, ast.Assign | ast.AugAssign) and ast.unparse(known) != ast.unparse(statement):
            copies.append(ast.unparse(known))
    at, indent = function.file.span(node)[1], " " * node.col_offset
    for chosen in dict.fromkeys((tuple(copies), *(tuple(c for c in copies if c != out) for out in copies))):
        if chosen:
            lines = "".join(f"\n{indent}    {text}" for text in chosen)
            yield function.edit(node, "branch added", 1.6, (at, at, f"\n{indent}else:{lines}"))


def _without(node: ast.AST, names: set[str]) -> ast.AST | None:
    """The tree without the factors that are or index one of these names; None if such a name is left."""

    class _Factors(ast.NodeTransformer):
        def visit_BinOp(self, inner: ast.BinOp) -> ast.AST:
            if isinstance(inner.op, ast.Mult):
                for factor, other in ((inner.right, inner.left), (inner.left, inner.right)):
                    if {n.id for n in ast.walk(factor) if isinstance(n, ast.Name)} & names:
                        if isinstance(factor, ast.Name | ast.Subscript | ast.Call):
                            return self.visit(other)
            return self.generic_visit(inner)

    node = _Factors().visit(node)
    return None if {n.id for n in ast.walk(node) if isinstance(n, ast.Name)} & names else node


def _bodies(function: Function) -> Iterator[list[ast.stmt]]:
    root = getattr(function.node, "body", [])
    for body in [root, *(getattr(n, f, None) for n in function.nodes for f in ("body", "orelse"))]:
        if isinstance(body, list) and body and isinstance(body[0], ast.stmt):
            yield body


def _is_text(node: ast.stmt) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)


def _exchanged(function: Function, first: ast.stmt, second: ast.stmt) -> Edit:
    one, other = function.file.text(first), function.file.text(second)
    spans = (*function.file.span(first), other), (*function.file.span(second), one)
    return function.edit(first, "statements exchanged", 1.8, *spans)


def _moved(function: Function, body: list[ast.stmt]) -> Iterator[Edit]:
    """A statement comes earlier or later in its block, by a few others; by one is an exchange."""
    for place, statement in enumerate(body):
        lines = _own_lines(function, statement) if isinstance(statement, _SIMPLE) else None
        if lines is None or _is_text(statement):
            continue
        text = function.file.data[lines[0] : lines[1]].decode()
        for other in (*range(max(0, place - _FAR), place - 1), *range(place + 2, min(len(body), place + _FAR + 1))):
            there = _own_lines(function, body[other])
            if there is not None and not _is_text(body[other]):
                at = there[other > place]
                cost = 1.9 + 0.05 * abs(other - place)
                yield function.edit(statement, "statement moved", cost, (*lines, ""), (at, at, text))


def _own_lines(function: Function, node: ast.stmt) -> tuple[int, int] | None:
    """The bytes of the lines of a statement that shares them with no other."""
    data = function.file.data
    start, end = function.file.span(node)
    begin = data.rfind(b"\n", 0, start) + 1
    stop = data.find(b"\n", end)
    stop = len(data) if stop < 0 else stop + 1
    rest = data[end : stop - 1].strip()
    return (begin, stop) if not data[begin:start].strip() and (not rest or rest.startswith(b"#")) else None


def _into(function: Function, statement: ast.stmt, loop: ast.For | ast.While) -> Edit:
    """A statement before a loop becomes the first one in it."""
    at = function.file.span(loop.body[0])[0]
    indent = " " * loop.body[0].col_offset
    text = function.file.text(statement)
    return function.edit(
        statement, "moved into the loop", 1.9, (*function.file.span(statement), "pass"), (at, at, f"{text}\n{indent}")
    )


def _out_of(function: Function, loop: ast.For | ast.While | ast.If) -> Iterator[Edit]:
    """The last statement of a loop or a condition comes after it, and the first one before it."""
    kind = "moved out of the loop" if not isinstance(loop, ast.If) else "moved out of the condition"
    if len(loop.body) < 2:
        return
    last, first = loop.body[-1], loop.body[0]
    indent = " " * loop.col_offset
    lines = _own_lines(function, last)
    if isinstance(last, _SIMPLE) and lines is not None:
        text = f"{indent}{function.file.text(last)}\n"
        yield function.edit(last, kind, 1.9, (*lines, text))
    if isinstance(first, _SIMPLE):
        at = function.file.span(loop)[0]
        text = f"{function.file.text(first)}\n{indent}"
        yield function.edit(first, kind, 1.9, (at, at, text), (*function.file.span(first), "pass"))


def _names_exchanged(function: Function, node: ast.stmt) -> Iterator[Edit]:
    """Two names change places wherever a statement reads them."""
    read: dict[str, list[ast.Name]] = {}
    for inner in ast.walk(node):
        if isinstance(inner, ast.Name) and isinstance(inner.ctx, ast.Load) and inner.id in function.names:
            read.setdefault(inner.id, []).append(inner)
    for first, second in itertools.combinations(read, 2):
        if len(read) <= 12 and _alike(function, first, second):
            spans = [(*function.file.span(n), second) for n in read[first]]
            spans += [(*function.file.span(n), first) for n in read[second]]
            yield function.edit(node, "names exchanged", 1.7, *spans)


def _words_exchanged(function: Function, node: ast.stmt) -> Iterator[Edit]:
    """Two words change places in all names that a statement reads: left_s * parent_d for parent_s * left_d."""
    read = [n for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)]
    words = dict.fromkeys(word for n in read if n.id in function.names and "_" in n.id for word in n.id.split("_"))
    for one, other in itertools.combinations(words, 2):
        swapped = {one: other, other: one}
        names = {n.id: "_".join(swapped.get(word, word) for word in n.id.split("_")) for n in read}
        changed = [n for n in read if names[n.id] != n.id]
        if len({n.id for n in changed}) > 1 and all(names[n.id] in function.names for n in changed):
            spans = ((*function.file.span(n), names[n.id]) for n in changed)
            yield function.edit(node, "names exchanged", 1.6, *spans)


def _targets(function: Function, node: ast.Assign) -> Iterator[Edit]:
    """Another name for what a statement binds; earlier where its name was bound before and not read in between."""
    for target in (t for one in node.targets for t in (one.elts if isinstance(one, ast.Tuple) else [one])):
        if not isinstance(target, ast.Name):
            continue
        lost = target.id in function.unread or _overwrites(function, node, target.id)
        for name in function.names:
            if name != target.id and _alike(function, name, target.id):
                cost = 2.3 - 0.6 * likeness(name, target.id) - 0.8 * lost
                yield function.swap(target, name, "another target", cost)


def _overwrites(function: Function, node: ast.stmt, name: str) -> bool:
    """Whether the statement binds a name that the one before it in the same block has bound, and does not read it."""
    block = next((body for body in _bodies(function) if node in body), [])
    uses = [n for n in function.nodes if isinstance(n, ast.Name) and n.id == name]
    bound = {function.statement(n) for n in uses if isinstance(n.ctx, ast.Store)}
    before = [s.end_lineno or 0 for s in block[: block.index(node)] if s in bound] if node in block else []
    return bool(before) and not any(
        isinstance(n.ctx, ast.Load) and before[-1] < n.lineno <= (node.end_lineno or 0) for n in uses
    )


def _dense(function: Function) -> Iterator[Edit]:
    """`x = x.contiguous()` as the first statement, for one tensor and for all."""
    body = getattr(function.node, "body", None)
    arguments = getattr(function.node, "args", None)
    if not isinstance(body, list) or arguments is None:
        return
    if any(isinstance(n, ast.Name) and n.id == "tl" for n in function.nodes):
        return
    first = body[1] if _is_text(body[0]) and len(body) > 1 else body[0]
    given = [a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs)]
    tensors = [n for n in given if function.kinds.get(n, "")[:2] in ("f[", "i[", "b[") and function.kinds[n][2] != "]"]
    at, indent = function.file.span(first)[0], " " * first.col_offset
    for names in [*([n] for n in tensors), *([tensors] if len(tensors) > 1 else [])]:
        calls = ", ".join(f"{n}.contiguous()" for n in names)
        yield function.edit(first, "made contiguous", 2.0, (at, at, f"{', '.join(names)} = {calls}\n{indent}"))


def _alike(function: Function, first: str, second: str) -> bool:
    one, other = function.kinds.get(first), function.kinds.get(second)
    return one is None or other is None or fits(one, other)
