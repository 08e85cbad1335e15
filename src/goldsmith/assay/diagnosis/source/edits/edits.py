"""Edits of source text: spans of bytes with new text, and the rules for expressions that they share."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from difflib import SequenceMatcher
from functools import cached_property

from ..reading.source_file import SourceFile

Span = tuple[int, int, str]
Place = tuple[str, int]  # file, line of a statement
Line = tuple[str, int, str]  # file, line, function
_WHOLE = (ast.Name, ast.Constant, ast.Call, ast.Attribute, ast.Subscript, ast.List, ast.Dict)
_OPEN = (ast.BinOp, ast.UnaryOp, ast.Compare, ast.BoolOp, ast.Attribute, ast.Subscript, ast.Starred, ast.IfExp)


@dataclass(frozen=True)
class Edit:
    """A change of one file. spans: (first byte, byte behind the last, new text), apart; kind: what it does.

    cost: the smaller, the earlier it is tried; place: the line of the statement that it changes; joins: the kinds of
    the edits of which it consists, if there are several.
    """

    path: str
    spans: tuple[Span, ...]
    kind: str
    cost: float
    line: int
    place: int = 0
    function: str = ""
    joins: tuple[str, ...] = ()

    @property
    def size(self) -> int:
        """Bytes that the edit removes and adds."""
        return sum(end - start + len(text) for start, end, text in self.spans)

    def applied(self, data: bytes) -> bytes:
        for start, end, text in sorted(self.spans, reverse=True):
            data = data[:start] + text.encode() + data[end:]
        return data

    def overlaps(self, other: Edit) -> bool:
        return self.path == other.path and any(
            a[0] < b[1] and b[0] < a[1] or a[0] == b[0] for a in self.spans for b in other.spans
        )

    @property
    def kinds(self) -> str:
        """Of all edits of which it consists."""
        return ", ".join(self.joins or (self.kind,))

    def joined(self, other: Edit) -> Edit:
        """Both edits at once, at this one's place and of its kind."""
        joins = (*(self.joins or (self.kind,)), *(other.joins or (other.kind,)))
        return replace(self, spans=(*self.spans, *other.spans), cost=self.cost + other.cost, joins=joins)


@dataclass(frozen=True)
class Function:
    """A function to be edited, with the names and the expressions that occur in it.

    names     variables that it reads or binds, in the order of their first use
    kinds     variable -> kind of its value, as one run showed it; {} if no run reached the function
    """

    file: SourceFile
    node: ast.AST
    penalty: float = 0.0
    kinds: Mapping[str, str] = field(default_factory=dict)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """Every node of the body, without annotations and decorators."""
        found: list[ast.AST] = []
        pending: list[ast.AST] = list(reversed(_body(self.node)))
        while pending:
            node = pending.pop()
            found.append(node)
            children = list(ast.iter_child_nodes(node))
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                children = list(node.body)
            if isinstance(node, ast.AnnAssign):
                children = [node.target, *([node.value] if node.value else [])]
            pending += reversed(children)
        return found

    @cached_property
    def places(self) -> set[Place]:
        """The statements of the body. Trees share nodes such as `ast.Load()`, which are in no statement."""
        own = (self.statement(n) for n in self.nodes if isinstance(n, ast.expr | ast.stmt))
        return {(self.file.path, n.lineno) for n in own if n is not None}

    @cached_property
    def saving(self) -> set[ast.stmt | None]:
        """The statements of a forward that save something for the backward, which only gradients show."""
        saves = (n for n in self.nodes if isinstance(n, ast.Attribute) and getattr(n.value, "id", "") == "ctx")
        return {self.statement(n) for n in saves}

    @cached_property
    def names(self) -> list[str]:
        arguments = getattr(self.node, "args", None)
        given = [a.arg for a in _arguments(arguments)] if arguments is not None else []
        bound = {n.id for n in self.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)}
        read = [n.id for n in self.nodes if isinstance(n, ast.Name) and n.id not in self.called]
        names = [n for n in dict.fromkeys([*given, *read]) if n in bound or n in given or n in read]
        return [n for n in names if "[" in self.kinds.get(n, "[")]  # numbers and tensors

    @cached_property
    def bound(self) -> dict[str, str]:
        """Name -> the expression that it is bound to last."""
        binding = (n for n in self.nodes if isinstance(n, ast.Assign) and isinstance(n.targets[0], ast.Name))
        return {n.targets[0].id: self.file.text(n.value) for n in binding}  # type: ignore[attr-defined]

    @cached_property
    def unread(self) -> set[str]:
        """Names that are bound and that nothing reads: what they hold is missing somewhere."""
        read = {n.id for n in self.nodes if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
        return set(self.names) - read

    @cached_property
    def called(self) -> set[str]:
        """Names that stand for functions, modules and such."""
        parents = self.file.parents
        names = set()
        for node in self.nodes:
            if isinstance(node, ast.Name):
                parent = parents.get(node)
                call = isinstance(parent, ast.Call) and parent.func is node
                module = isinstance(parent, ast.Attribute) and node.id in ("tl", "torch", "math", "F", "np", "triton")
                if call or module:
                    names.add(node.id)
        return names | {"ctx", "self", "cls", "tl", "torch", "math", "triton", "assay", "np"}

    @property
    def name(self) -> str:
        return getattr(self.node, "name", "")

    def statement(self, node: ast.AST) -> ast.stmt | None:
        """The innermost statement around a node."""
        at: ast.AST | None = node
        while at is not None and not isinstance(at, ast.stmt):
            at = self.file.parents.get(at)
        return at

    def edit(self, node: ast.AST, kind: str, cost: float, *spans: Span) -> Edit:
        statement = self.statement(node)
        line = getattr(node, "lineno", 0)
        place = statement.lineno if statement is not None else line
        penalty = 0.0 if statement in self.saving else self.penalty
        return Edit(self.file.path, spans, kind, cost + penalty, line, place, self.name)

    def swap(self, node: ast.AST, text: str, kind: str, cost: float) -> Edit:
        """The edit that puts an expression's text in the place of `node`, in parentheses where it needs them."""
        return self.edit(node, kind, cost, (*self.file.span(node), self.fitted(node, text)))

    def fitted(self, node: ast.AST, text: str) -> str:
        parent = self.file.parents.get(node)
        inside = isinstance(parent, _OPEN) and not (isinstance(parent, ast.Subscript) and parent.slice is node)
        inside = inside or isinstance(parent, ast.Call) and parent.func is node
        return f"({text})" if inside and not _is_whole(text) and not self.in_parentheses(node) else text

    def in_parentheses(self, node: ast.AST) -> bool:
        start, end = self.file.span(node)
        before, after = self.file.data[:start].rstrip(), self.file.data[end:].lstrip()
        parent = self.file.parents.get(node)
        own = not (isinstance(parent, ast.Call) and parent.func is not node)
        return own and before.endswith(b"(") and after.startswith(b")")


def likeness(one: str, other: str) -> float:
    """From 0 to 1: how much two texts have in common."""
    return SequenceMatcher(None, one, other, autojunk=False).ratio()


def _is_whole(text: str) -> bool:
    try:
        return isinstance(ast.parse(text, mode="eval").body, _WHOLE) and not text.startswith("-")
    except SyntaxError:
        return False


def _body(node: ast.AST) -> list[ast.AST]:
    return [node.body] if isinstance(node, ast.Lambda) else list(node.body)  # type: ignore[attr-defined]


def _arguments(arguments: ast.arguments) -> list[ast.arg]:
    more = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *more]


def cheapest_first(edits: Iterable[Edit]) -> list[Edit]:
    """Each change once, by cost."""
    known: dict[tuple[str, tuple[Span, ...]], Edit] = {}
    for edit in edits:
        key = edit.path, edit.spans
        if key not in known or known[key].cost > edit.cost:
            known[key] = edit
    return sorted(known.values(), key=lambda e: e.cost)


def loads(function: Function) -> Iterator[ast.expr]:
    """Expressions that are read, and that stand alone: no names of keywords, no formatted strings."""
    for node in function.nodes:
        parent = function.file.parents.get(node)
        if isinstance(node, ast.expr) and isinstance(getattr(node, "ctx", ast.Load()), ast.Load):
            if not isinstance(parent, ast.JoinedStr | ast.FormattedValue) and not isinstance(
                node, ast.Slice | ast.Starred | ast.JoinedStr | ast.FormattedValue | ast.Lambda
            ):
                yield node
