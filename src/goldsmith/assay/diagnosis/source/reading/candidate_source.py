"""CandidateSource: the user's files that hold a target's candidate, and where in them it is found again."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from ....declare.cpp_source import CppSource, NotBuilt, folder
from ....declare.target import Target
from ..cpp.libraries_of_edits import loads
from ..edits.edits import Edit
from .reached_functions import functions, is_users, reached, user_modules
from .source_file import Function, SourceFile, begin

FORWARD, BACKWARD = "forward", "backward"


class NoSource(Exception):
    """The candidate has no source that can be loaded again; the text says why, in one sentence."""


@dataclass(frozen=True)
class Part:
    """A function of the candidate. phases: whether the forward reaches it, or the backward, or both."""

    file: SourceFile
    node: ast.AST
    phases: frozenset[str]


@dataclass(frozen=True)
class CandidateSource:
    """What a child process needs, and what edits may change.

    files    by path, the files of the candidate
    parts    its functions
    modules  name -> path of the user's loaded modules
    changed  paths of the files that were edited
    origin   (module, attribute, index): the target or the candidate; backward: the attribute of its own backward
    golden   the functions of the golden, which no edit changes
    """

    files: Mapping[str, SourceFile]
    parts: tuple[Part, ...]
    modules: Mapping[str, str]
    origin: tuple[str, str, int | None]
    backward: str = ""
    paths: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    golden: tuple[Part, ...] = ()

    def with_text(self, path: str, text: str) -> CandidateSource:
        """The source after an edit of one file, with the same functions in it."""
        file = SourceFile(path, self.files[path].module, text.encode())
        before, after = _functions(self.files[path]), _functions(file)
        if len(before) != len(after):
            raise NoSource("the edit changes the number of functions")
        now = dict(zip(before, after, strict=True))
        parts = tuple(replace(p, file=file, node=now[p.node]) if p.file.path == path else p for p in self.parts)
        return replace(self, files={**self.files, path: file}, parts=parts, changed=(*self.changed, path))

    def edited_texts(self) -> dict[str, str]:
        """path -> text of the files that were edited."""
        return {path: self.files[path].data.decode(errors="replace") for path in self.changed}

    def to_arguments(self) -> dict[str, object]:
        """The arguments of `edited_modules.load`, without the edited text."""
        return {"modules": dict(self.modules), "origin": self.origin, "backward": self.backward}

    def texts(self, edit: Edit) -> dict[str, str]:
        """path -> text of the file that an edit changes."""
        return {edit.path: edit.applied(self.files[edit.path].data).decode(errors="replace")}

    def loads(self, edits: Sequence[Edit]) -> list[dict[str, str] | None]:
        """What a child process needs to load each edit; None for one that no compiler takes."""
        return [self.texts(edit) for edit in edits]

    def prepare(self, texts: Mapping[str, str]) -> bool:
        """Build edited files before a child process loads them; whether that can be done."""
        return True


@dataclass(frozen=True)
class NativeSource(CandidateSource):
    """The C++ files of a target, which says how they are built. They have no parts."""

    native: CppSource | None = None

    @property
    def data(self) -> dict[str, bytes]:
        return {path: file.data for path, file in self.files.items()}

    def with_text(self, path: str, text: str) -> NativeSource:
        file = SourceFile(path, "", text.encode())
        return replace(self, files={**self.files, path: file}, changed=(*self.changed, path))

    def to_arguments(self) -> dict[str, object]:
        return {**super().to_arguments(), "libraries": folder()}

    def loads(self, edits: Sequence[Edit]) -> list[dict[str, str] | None]:
        return [] if self.native is None else loads(self.native, self.data, edits)

    def prepare(self, texts: Mapping[str, str]) -> bool:
        try:
            return self.native is not None and self.native.library(texts).is_file()
        except NotBuilt:
            return False


def candidate_source(target: Target) -> CandidateSource:
    """Raises NoSource."""
    if target.source is not None:
        return _native_source(target, target.source)
    own = target.backward if callable(target.backward) else None
    places = _parts(target, own)
    modules = user_modules()
    known = {path: name for name, path in reversed(list(modules.items()))}
    rows = {path: found for path, found in places.items() if path in known}
    if not rows:
        raise NoSource(_why_not(target.candidate))
    origin, backward = _origin(target, own, modules)
    try:
        files = {path: SourceFile.read(path, known[path]) for path in rows}
        parts = [
            Part(file, node, frozenset(p for place, p in rows[path] if place == begin(node)))
            for path, file in files.items()
            for node in file.functions_at({place for place, _ in rows[path]})
        ]
    except (OSError, SyntaxError, ValueError) as error:
        raise NoSource(f"the candidate's file cannot be read: {error}") from error
    if not parts:
        raise NoSource("the candidate's file has changed since it was imported")
    if origin[0] == "__main__":
        if b"if __name__ ==" not in Path(modules["__main__"]).read_bytes():
            raise NoSource(
                "the program that is running holds the candidate, and importing it would run all of it again"
            )
        name = Path(modules["__main__"]).stem
        modules = {name if n == "__main__" else n: p for n, p in modules.items()}
        origin = name, *origin[1:]
    golden = tuple(_golden_parts(target))
    return CandidateSource(files, tuple(parts), modules, origin, backward, tuple(sys.path), golden=golden)


def _golden_parts(target: Target) -> Iterator[Part]:
    for path, begins in reached(target.golden).items():
        try:
            file = SourceFile.read(path, "")
            yield from (Part(file, node, frozenset()) for node in file.functions_at(begins))
        except (OSError, SyntaxError, ValueError):
            continue


def _native_source(target: Target, native: CppSource) -> NativeSource:
    modules = user_modules()
    held = next((o for name in modules if name != "__main__" for o in _held(name, target)), None)
    if held is None:
        raise NoSource("the target with its `source=` stands in no module of your own under a name")
    files = {str(path): SourceFile.read(str(path), "") for path in native.files}
    return NativeSource(files, (), modules, held, paths=tuple(sys.path), native=native)


def _functions(file: SourceFile) -> list[ast.AST]:
    return [n for n in ast.walk(file.tree) if isinstance(n, Function)]


def _parts(target: Target, own: object) -> dict[str, set[tuple[tuple[int, int], str]]]:
    """File -> (beginning, phase) of the functions that the candidate reaches and the golden does not."""
    backwards = [own, *(f for f in functions(target.candidate) if f.__name__ == BACKWARD)]
    parts: dict[str, set[tuple[tuple[int, int], str]]] = {}
    for root, phase, without in ((target.candidate, FORWARD, BACKWARD), *((b, BACKWARD, "") for b in backwards)):
        for path, begins in reached(root, without).items():
            parts.setdefault(path, set()).update((place, phase) for place in begins)
    for root in (target.golden, target.golden_backward):
        for path, begins in reached(root).items():
            parts[path] = {row for row in parts.get(path, ()) if row[0] not in begins}
    return {path: rows for path, rows in parts.items() if rows}


def _why_not(candidate: object) -> str:
    name = getattr(candidate, "__qualname__", type(candidate).__name__)
    module = getattr(candidate, "__module__", None) or type(candidate).__module__
    return f"no file of your own holds the candidate's source ({name} of {module})"


def _origin(target: Target, own: object, modules: Mapping[str, str]) -> tuple[tuple[str, str, int | None], str]:
    """Where the target stands in a module, or else its candidate and backward; the running program comes last."""
    held = next((o for name in modules if name != "__main__" for o in _held(name, target)), None)
    candidate, backward = _qualified(target.candidate), _qualified(own) if own is not None else ("", "")
    if held is None and candidate and backward and backward[0] in ("", candidate[0]):
        return (candidate[0], candidate[1], None), backward[1]
    held = held or next(_held("__main__", target) if "__main__" in modules else iter(()), None)
    if held is None:
        name = getattr(target.candidate, "__qualname__", type(target.candidate).__name__)
        raise NoSource(f"no module of your own holds the target or its candidate ({name}) under a name")
    return held, ""


def _held(name: str, target: Target) -> Iterator[tuple[str, str, int | None]]:
    """The attributes of a module that hold the target, alone or in a list."""
    module = sys.modules.get(name)
    for attribute, value in list(vars(module).items()) if isinstance(module, ModuleType) else ():
        if type(value) is Target and _is_same(value, target):
            yield name, attribute, None
        elif type(value) in (list, tuple):
            yield from ((name, attribute, n) for n, v in enumerate(value) if type(v) is Target and _is_same(v, target))


def _is_same(value: Target, target: Target) -> bool:
    return value is target or (value.candidate == target.candidate and value.golden is target.golden)


def _qualified(function: object) -> tuple[str, str] | None:
    """(module, dotted name) of a callable that its module holds under that name, or None."""
    owner = getattr(function, "__self__", None)
    if isinstance(owner, type):
        name, module = f"{owner.__qualname__}.{getattr(function, '__name__', '')}", owner.__module__
    else:
        name, module = getattr(function, "__qualname__", ""), getattr(function, "__module__", None) or ""
    value: object = sys.modules.get(module)
    if not is_users(getattr(value, "__file__", None)):
        return None
    for part in name.split("."):
        value = getattr(value, part, None)
    return (module, name) if value is not None and value == function else None
