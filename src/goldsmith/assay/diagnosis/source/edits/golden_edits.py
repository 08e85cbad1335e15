"""Edits that bring in what the golden has: a term beside a name that both know, an expression that is nearly alike."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Sequence

from .edits import Edit, Function, likeness, loads

_SIGNS = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Pow: "**"}
_ELEMENTWISE = frozenset("exp exp2 log log2 sqrt rsqrt sin cos abs sigmoid where maximum minimum floor".split())
_ALIKE, _MOST = 0.6, 4  # likeness of two expressions, at least; expressions for one of the candidate, at most
_LONGEST = 80


def golden_edits(function: Function, golden: Sequence[Function]) -> Iterator[Edit]:
    """golden: its functions, whose names often mean the same here."""
    triton = any(isinstance(n, ast.Name) and n.id == "tl" for n in function.nodes)
    texts: dict[str, None] = {}
    for each in golden:
        for node in loads(each):
            if isinstance(node, ast.BinOp) and type(node.op) in _SIGNS:
                yield from _terms(function, each, node, triton)
            if isinstance(node, ast.BinOp | ast.Compare):
                text = _text(function, each, node, triton)
                texts |= dict.fromkeys([text] if text else [])
    for node in loads(function):
        if isinstance(node, ast.BinOp | ast.Compare):
            own = function.file.text(node)
            rows = sorted(((likeness(own, t), t) for t in texts if t != own and len(own) <= _LONGEST), reverse=True)
            for like, text in rows[:_MOST]:
                if like >= _ALIKE:
                    yield function.swap(node, text, "another expression", 1.8 - 0.8 * like)


def _terms(function: Function, golden: Function, node: ast.BinOp, triton: bool) -> Iterator[Edit]:
    """`grad + decay * w` in the golden: the same term for what is bound to `grad`, and where it is read."""
    sign = _SIGNS[type(node.op)]
    for side, other in ((node.left, node.right), (node.right, node.left)):
        term = _text(function, golden, other, triton)
        name = _own(function, side.id) if isinstance(side, ast.Name) else ""
        if not name or not term:
            continue
        if isinstance(other, ast.BinOp) and (sign != "+" or isinstance(other.op, ast.Add | ast.Sub)):
            term = f"({term})"
        for place, cost in _places(function, name):
            text = function.file.text(place)
            if len(text) <= _LONGEST and "\n" not in text:
                whole = f"({text})" if isinstance(place, ast.BinOp | ast.IfExp | ast.Compare | ast.UnaryOp) else text
                joined = f"{whole} {sign} {term}" if side is node.left else f"{term} {sign} {whole}"
                yield function.swap(place, joined, "addend added" if sign in "+-" else "factor added", cost)


def _places(function: Function, name: str) -> Iterator[tuple[ast.expr, float]]:
    """What is bound to the name, and where the name is read."""
    for node in function.nodes:
        if isinstance(node, ast.Assign):
            pairs = [(node.targets[0], node.value)]
            if isinstance(node.targets[0], ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(node.targets[0].elts, node.value.elts, strict=False))
            yield from ((value, 0.8) for target, value in pairs if getattr(target, "id", "") == name)
        elif isinstance(node, ast.Name) and node.id == name and isinstance(node.ctx, ast.Load):
            yield node, 1.1


def _own(function: Function, name: str) -> str:
    """The candidate's name for what the golden calls so: the same, or the only one with it as a part, or ""."""
    if name in function.names or name in ("torch", "math"):
        return name
    parts = [n for n in function.names if name in n.split("_") and "ptr" not in n and "stride" not in n]
    return parts[0] if len(parts) == 1 else ""


def _text(function: Function, golden: Function, node: ast.expr, triton: bool) -> str:
    """An expression of the golden as the candidate may write it, or ""."""
    text, inner = golden.file.text(node), list(ast.walk(node))
    names = {n.id: _own(function, n.id) for n in inner if isinstance(n, ast.Name)}
    if not all(names.values()) or len(text) > _LONGEST or "\n" in text:
        return ""
    text = re.sub(r"\b[A-Za-z_]\w*\b", lambda m: names.get(m.group(), m.group()), text)
    if triton:
        if any(isinstance(n, ast.Subscript) or isinstance(n, ast.Attribute) and not _is_simple(n) for n in inner):
            return ""
        text = text.replace("torch.", "tl.")
    return text


def _is_simple(node: ast.Attribute) -> bool:
    """Whether Triton has the same function under the same name."""
    return getattr(node.value, "id", "") == "torch" and node.attr in _ELEMENTWISE
