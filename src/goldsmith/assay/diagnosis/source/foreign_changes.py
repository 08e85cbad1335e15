"""Why a proposed text is no patch of the candidate: it changes something else, or looks for the golden."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ...declare.target import Target
from .reading.candidate_source import CandidateSource, NativeSource
from .reading.reached_functions import functions

_REACHING = frozenset(
    """globals locals vars eval exec compile getattr setattr delattr __import__ importlib sys inspect gc ctypes os
    subprocess socket open goldsmith assay stage __globals__ __closure__ __code__ f_back f_globals""".split()
)
_ADDED = (ast.Import, ast.ImportFrom, ast.FunctionDef)  # statements of a module that a proposal may add
Places = dict[str, ast.AST]


def foreign_change(target: Target, source: CandidateSource, path: str, text: str) -> str:
    """The reason in half a sentence, or ""."""
    if isinstance(source, NativeSource):
        return "proposals for C++ files are not taken"
    try:
        after = ast.parse(text)
    except (SyntaxError, ValueError, RecursionError):
        return "it is no Python"
    before = ast.parse(source.files[path].data)
    own = {first for p in source.parts if p.file.path == path for first in [_place(p.node)]}
    places = {name for name, node in _places(before).items() if _place(node) in own}
    named = {f.__name__ for f in functions(target.golden)} - {name.rpartition(".")[2] for name in places}
    new = _words(after) - _words(before)
    if new & _REACHING:
        return f"it uses {min(new & _REACHING)}"
    asked = {w for n in places for w in _words(_places(after).get(n, ast.Pass())) - _words(_places(before)[n])} & named
    if asked:
        return f"it calls the golden ({min(asked)})"
    known = _words(before)
    added = [s for s in after.body if isinstance(s, _ADDED) and not _bound(s) & known]
    after.body = [s for s in after.body if s not in added]
    return "" if _blanked(before, places) == _blanked(after, places) else "it changes more than the candidate"


def _place(node: ast.AST) -> tuple[int, int, int, int]:
    return tuple(getattr(node, n) for n in ("lineno", "col_offset", "end_lineno", "end_col_offset"))


def _places(tree: ast.AST, prefix: str = "") -> Places:
    """Dotted name -> function, lambdas by their number."""
    found: Places = {}
    for node in _inside(tree):
        name = getattr(node, "name", "<lambda>")
        whole = f"{prefix}{name}"
        count = sum(other == whole or other.startswith(f"{whole}#") for other in found)
        whole = f"{whole}#{count}" if count else whole
        if not isinstance(node, ast.ClassDef):
            found[whole] = node
        found |= _places(node, f"{whole}.")
    return found


def _inside(tree: ast.AST) -> Iterator[ast.AST]:
    """The functions and classes directly inside a node."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.Lambda):
            yield child
        else:
            yield from _inside(child)


def _words(tree: ast.AST) -> set[str]:
    """Names, attributes and imported modules that occur."""
    words = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)}
    words |= {n.attr for n in ast.walk(tree) if isinstance(n, ast.Attribute)}
    words |= {getattr(n, "name", "") or "" for n in ast.walk(tree) if isinstance(n, ast.FunctionDef | ast.ClassDef)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            words |= {part for a in node.names for part in a.name.split(".")}
            words |= set((getattr(node, "module", "") or "").split("."))
    return words


def _bound(statement: ast.stmt) -> set[str]:
    """The names that an added statement binds."""
    if isinstance(statement, ast.Import | ast.ImportFrom):
        return {(a.asname or a.name).partition(".")[0] for a in statement.names}
    return {getattr(statement, "name", "")}


def _blanked(tree: ast.Module, places: set[str]) -> str:
    """The module without the bodies of these functions, and without constants that nothing else reads."""
    for name, node in _places(tree).items():
        if name in places:
            nothing = ast.Constant(0)
            node.body = nothing if isinstance(node, ast.Lambda) else [ast.Expr(nothing)]  # type: ignore[attr-defined]
    read = {n.id for n in ast.walk(tree) if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Load)}
    tree.body = [s for s in tree.body if not (_constant(s) and _constant(s) not in read)]
    return ast.dump(tree)


def _constant(statement: ast.stmt) -> str:
    """The name that a statement binds to a number or a text, or ""."""
    if isinstance(statement, ast.Assign) and len(statement.targets) == 1 and isinstance(statement.value, ast.Constant):
        return getattr(statement.targets[0], "id", "")
    return ""
