"""Edits that insert a statement which stands elsewhere: for another name, in another function, or in the golden.

A pointer is advanced by the row in one kernel, and in the other one nothing reads the stride. A forward exchanges rows
and columns under a condition, and its backward does not.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Iterable, Iterator, Sequence

from .edits import Edit, Function, Span, likeness
from .translation import Pair, Translation

_SIMPLE = (ast.Assign, ast.AugAssign, ast.Expr)
_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}
_PLACES, _PAIRS = 4, 24  # before which a statement comes; pairs of names, at most
_COST, _UNREAD = 1.5, 1.3  # of a statement; less for one that reads a name which nothing else reads


def copied_statements(
    function: Function, beside: Sequence[Function], golden: Sequence[Function], pairs: Sequence[Pair]
) -> Iterator[Edit]:
    own = {ast.unparse(n) for n in function.nodes if isinstance(n, ast.stmt)}
    yield from _for_other_names(function, own, pairs)
    names = Translation(function)
    statements = [n for each in beside for n in each.nodes if isinstance(n, ast.stmt)]
    texts = dict.fromkeys(text for n in statements if _updates(n) and (text := names.text(n)))
    texts |= dict.fromkeys(text for each in golden for text in _golden_updates(function, each))
    for text in texts:
        if text not in own:
            yield from _inserted(function, text)
    alike = [text for n in statements if isinstance(n, _SIMPLE) and (text := names.text(n))]
    yield from _in_place(function, dict.fromkeys(text for text in alike if text not in own))


def pairs_of_names(function: Function) -> list[Pair]:
    """(part, other part) of names that differ in one part; those first that lead to a name that nothing reads.

    ("x", "y") for sum_x and sum_y, ("k", "v") for dk and dv, ("x", "grad") for x_stride and grad_stride.
    """
    found: dict[Pair, float] = {}
    for one in function.names:
        for other in function.names:
            pair = _pair(one, other) if one != other else ("", "")
            if pair[0] and pair[1]:
                found[pair] = found.get(pair, 0) + 1 + 9 * (other in function.unread)
    return sorted((p for p, n in found.items() if n > 1), key=lambda p: -found[p])


def _pair(one: str, other: str) -> Pair:
    """The parts in which two names differ: words, or letters where the names are as long and short."""
    words, others = one.split("_"), other.split("_")
    start = next((n for n, (a, b) in enumerate(zip(words, others, strict=False)) if a != b), 0)
    end = next((n for n, (a, b) in enumerate(zip(words[::-1], others[::-1], strict=False)) if a != b), 0)
    mine, its = words[start : len(words) - end], others[start : len(others) - end]
    if len(words) + len(others) > 2 and len(mine) == 1 and its:
        return mine[0], "_".join(its)
    if len(one) != len(other) or len(one) > 12:
        return "", ""
    apart = [i for i, (a, b) in enumerate(zip(one, other, strict=True)) if a != b]
    return one[apart[0] : apart[-1] + 1], other[apart[0] : apart[-1] + 1]


def _for_other_names(function: Function, own: set[str], pairs: Sequence[Pair]) -> Iterator[Edit]:
    """Behind a statement the same for another name; at once for all names that nothing reads."""
    best: dict[str, tuple[float, Span, ast.stmt]] = {}
    texts: dict[str, None] = {}
    renamings = [Translation(function, pair=pair) for pair in pairs[:_PAIRS]]
    for node in function.nodes:
        if not isinstance(node, _SIMPLE) or isinstance(node.value, ast.Constant):
            continue
        for names in renamings:
            text = names.text(node)
            if not text or text in own:
                continue
            texts[text] = None
            at = function.file.span(node)[1]
            span = at, at, "\n" + " " * node.col_offset + text
            new = {n.id for n in ast.walk(ast.parse(text)) if isinstance(n, ast.Name)} & function.unread
            yield function.edit(node, "statement copied", _COST + 0.5 - _UNREAD * bool(new), span)
            for name in new:
                alike = likeness(function.file.text(node), text)
                if name not in best or alike > best[name][0]:
                    best[name] = alike, span, node
    yield from _in_place(function, texts)
    spans = {span[2]: span for _, span, _ in best.values()}
    if len(spans) > 1:
        joined: dict[int, str] = {}
        for at, _, text in spans.values():
            joined[at] = joined.get(at, "") + text
        node = next(iter(best.values()))[2]
        yield function.edit(node, "statement copied", _COST - _UNREAD, *((at, at, text) for at, text in joined.items()))


def _updates(node: ast.stmt) -> bool:
    """Whether a statement changes what it reads, alone or under a condition."""
    if isinstance(node, ast.If) and not node.orelse and len(node.body) == 1:
        return _updates(node.body[0])
    if isinstance(node, ast.AugAssign):
        return isinstance(node.target, ast.Name)
    return isinstance(node, ast.Assign) and bool(_bound(node) & _read(node.value))


def _bound(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}


def _read(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}


def _golden_updates(function: Function, golden: Function) -> Iterator[str]:
    """`grad = grad + decay * w` where the golden adds that term to something made of `grad`."""
    names = Translation(function, golden=True)
    for node in golden.nodes:
        if not isinstance(node, ast.BinOp) or type(node.op) not in _SIGNS:
            continue
        for side, other in ((node.left, node.right), (node.right, node.left)):
            term, sign = names.text(other), _SIGNS[type(node.op)]
            if not term or side is node.right and sign in "-/":
                continue
            term = f"({term})" if isinstance(other, ast.BinOp) and sign != "+" else term
            bound = {names.name(n) for n in _read(side)} & set(function.names)
            yield from (f"{name} = {name} {sign} {term}" for name in sorted(bound) if len(bound) <= 2)


def _in_place(function: Function, texts: Iterable[str]) -> Iterator[Edit]:
    """Each of these statements in the place of one that writes to the same."""
    own: dict[str, list[ast.stmt]] = {}
    for node in function.nodes:
        if isinstance(node, _SIMPLE):
            own.setdefault(_written(node), []).append(node)
    for text in texts:
        for node in own.get(_written(ast.parse(text).body[0]), ()):
            yield function.edit(node, "like its twin", 1.5, (*function.file.span(node), text))


def _written(node: ast.stmt) -> str:
    """What a statement writes to: its target, or the function that it calls with its first argument."""
    if isinstance(node, ast.Assign):
        return ast.unparse(node.targets[0])
    if isinstance(node, ast.AugAssign):
        return ast.unparse(node.target)
    value = getattr(node, "value", None)
    first = value.args[0] if isinstance(value, ast.Call) and value.args else value
    return f"({ast.unparse(first)})" if isinstance(first, ast.AST) else ""


def _inserted(function: Function, text: str) -> Iterator[Edit]:
    """The statement before each of the first ones that read what it binds, where all that it reads is bound."""
    (node,) = ast.parse(text).body
    bound, read = _bound(node) | _targets(node), _read(node) & set(function.names)
    cost = _COST - _UNREAD * bool(read & function.unread)
    first: dict[str, int] = {}
    for n in function.nodes:
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store):
            first.setdefault(n.id, n.lineno)
    count = 0
    for statement in function.nodes:
        if count == _PLACES or not isinstance(statement, ast.stmt):
            continue
        heads = [getattr(statement, f, None) for f in ("value", "test", "iter")]
        reads = {name for head in heads if isinstance(head, ast.AST) for name in _read(head)}
        later = not function.file.text(statement).startswith("elif")
        if later and bound & reads and all(first.get(name, 0) < statement.lineno for name in read):
            at, indent = function.file.span(statement)[0], " " * statement.col_offset
            lines = textwrap.indent(text, indent).lstrip()
            yield function.edit(statement, "statement copied", cost + 0.1 * count, (at, at, f"{lines}\n{indent}"))
            count += 1


def _targets(node: ast.AST) -> set[str]:
    return {n.target.id for n in ast.walk(node) if isinstance(n, ast.AugAssign) and isinstance(n.target, ast.Name)}
