"""Translation: how a function would write what another function or the golden writes, name by name."""

from __future__ import annotations

import ast
import builtins
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from .edits import Function

_ELEMENTWISE = frozenset("exp exp2 log log2 sqrt rsqrt sin cos abs sigmoid where maximum minimum floor".split())
_MODULES = frozenset(("torch", "tl", "math"))
_LONGEST = 120
Pair = tuple[str, str]


@dataclass(frozen=True)
class Translation:
    """Into names of `function`.

    golden  the other one is the golden: a name is also known as a part of the only name that has it, and of torch's
            functions a Triton kernel knows those that Triton has
    pair    (part, other part) of names: what is done for one name, for another one
    """

    function: Function
    golden: bool = False
    pair: Pair = ("", "")
    texts: dict[ast.AST, str] = field(default_factory=dict, compare=False)

    @cached_property
    def known(self) -> set[str]:
        names = {n.id for n in self.function.nodes if isinstance(n, ast.Name)}
        return {*self.function.names, *names, *vars(builtins)}

    @cached_property
    def triton(self) -> bool:
        return any(isinstance(n, ast.Name) and n.id == "tl" for n in self.function.nodes)

    def name(self, name: str) -> str:
        """The candidate's name; "" for one that it does not know."""
        if self.pair[0]:
            return renamed(name, self.pair, self.known)
        if self.golden and name == "torch":
            return "tl" if self.triton else name
        if name in self.known or self.golden and name in _MODULES:
            return name
        own = self.function.names if self.golden else []
        parts = [n for n in own if name in n.split("_") and "ptr" not in n and "stride" not in n]
        return parts[0] if len(parts) == 1 else ""

    def text(self, node: ast.AST) -> str:
        """An expression or a statement as the candidate may write it; "" if it cannot."""
        if node not in self.texts:
            try:
                text = ast.unparse(_Renaming(self).visit(copied(node)))
            except _Unknown:
                text = ""
            self.texts[node] = text if len(text) <= _LONGEST else ""
        return self.texts[node]


def copied(node: object) -> Any:
    """A tree anew, without the places of its expressions; `copy.deepcopy` takes five times as long."""
    if isinstance(node, list):
        return [copied(n) for n in node]
    if not isinstance(node, ast.AST) or not node._fields:
        return node
    new = type(node)(*(copied(getattr(node, f, None)) for f in node._fields))
    if isinstance(node, ast.stmt):
        new.lineno = node.lineno  # type: ignore[attr-defined]
    return new


def renamed(name: str, pair: Pair, known: set[str]) -> str:
    """The name for the other part of a pair, if that is known; the same name otherwise."""
    one, other = pair
    words = name.split("_")
    if one not in name:
        return name
    for at in (n for n, word in enumerate(words) if word == one):
        whole = "_".join([*words[:at], other, *words[at + 1 :]])
        if whole in known:
            return whole
    changed = name.replace(one, other)
    return changed if changed in known else name


class _Unknown(Exception):
    """A name or an operation that the candidate does not know."""


class _Renaming(ast.NodeTransformer):
    def __init__(self, names: Translation):
        self.names = names
        self.tiles = names.golden and names.triton

    def visit_Name(self, node: ast.Name) -> ast.AST:
        name = self.names.name(node.id)
        if not name:
            raise _Unknown
        return ast.Name(name, node.ctx)

    def visit_Call(self, node: ast.Call) -> ast.AST:
        function = node.func
        method = isinstance(function, ast.Attribute) and getattr(function.value, "id", "") not in _MODULES
        if self.tiles and method and not node.args and not node.keywords and function.attr in _ELEMENTWISE:  # type: ignore[attr-defined]
            function = ast.Attribute(ast.Name("torch", ast.Load()), function.attr, ast.Load())  # type: ignore[attr-defined]
            node = ast.Call(function, [node.func.value], [])  # type: ignore[attr-defined]
        return self.generic_visit(node)

    def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
        if self.tiles:
            raise _Unknown
        return self.generic_visit(node)

    def visit_Attribute(self, node: ast.Attribute) -> ast.AST:
        if self.tiles and not (getattr(node.value, "id", "") == "torch" and node.attr in _ELEMENTWISE):
            raise _Unknown
        return self.generic_visit(node)
