"""SourceFile: the text of one module with its syntax tree, where each node knows its bytes and its parent."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

Function = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda


@dataclass(frozen=True)
class SourceFile:
    """One file. module: the name under which it is imported; data: its bytes, since syntax trees count bytes."""

    path: str
    module: str
    data: bytes

    @staticmethod
    def read(path: str, module: str) -> SourceFile:
        return SourceFile(path, module, Path(path).read_bytes())

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.data)

    @cached_property
    def parents(self) -> dict[ast.AST, ast.AST]:
        return {child: node for node in ast.walk(self.tree) for child in ast.iter_child_nodes(node)}

    @cached_property
    def _starts(self) -> list[int]:
        starts = [0]
        for line in self.data.splitlines(keepends=True):
            starts.append(starts[-1] + len(line))
        return starts

    @cached_property
    def _mark(self) -> int:
        """Bytes of a byte order mark, which syntax trees do not count."""
        return 3 if self.data.startswith(b"\xef\xbb\xbf") else 0

    def span(self, node: ast.AST) -> tuple[int, int]:
        """The bytes of a node, from its first to behind its last; parentheses around an expression are outside."""
        return self.offset(node.lineno, node.col_offset), self.offset(node.end_lineno, node.end_col_offset)  # type: ignore[attr-defined]

    def offset(self, line: int, column: int) -> int:
        return self._starts[line - 1] + column + (self._mark if line == 1 else 0)

    def text(self, node: ast.AST) -> str:
        start, end = self.span(node)
        return self.data[start:end].decode()

    def functions_at(self, begins: set[tuple[int, int]]) -> list[ast.AST]:
        """The functions that begin at one of these places."""
        return [n for n in ast.walk(self.tree) if isinstance(n, Function) and begin(n) in begins]


def first_line(node: ast.AST) -> int:
    decorators = getattr(node, "decorator_list", [])
    return decorators[0].lineno if decorators else node.lineno  # type: ignore[attr-defined]


def head_lines(statement: ast.stmt) -> range:
    """The lines of a statement without those of its body."""
    body = getattr(statement, "body", None)
    end = body[0].lineno if body else (statement.end_lineno or statement.lineno) + 1
    return range(statement.lineno, max(end, statement.lineno + 1))


def begin(node: ast.AST) -> tuple[int, int]:
    """Where a function begins, as its code knows it: a lambda with its body, others in a line, with the decorators."""
    return (node.body.lineno, node.body.col_offset) if isinstance(node, ast.Lambda) else (first_line(node), -1)
