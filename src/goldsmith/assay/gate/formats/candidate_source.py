"""load_candidates: the candidates in files and folders. It reads text and runs nothing."""

from __future__ import annotations

import ast
import json
import os
import stat
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path

from ..candidate import SUFFIXES, Candidate
from ..source_files import decoded
from . import json_lines
from .submission import Submission, refused

LANGUAGES = {".py": "python", **SUFFIXES}
READ = (*LANGUAGES, ".json", ".jsonl", ".ndjson")
LARGEST = 16 << 20  # bytes of one candidate's file


class NoCandidates(ValueError):
    """Paths that hold no candidate; the text says which."""


def load_candidates(paths: str | Path | Iterable[str | Path]) -> list[Submission]:
    """The candidates in a file or folder, or in several, in this order. Those of a folder are sorted by path.

    Files: Python, CUDA C++ (.cu), C++ (.cpp), a FlashInfer-Bench solution (.json), JSON lines (.jsonl). A file that
    cannot be read is a refused candidate. Raises `NoCandidates` for a path that does not exist, is neither a file nor a
    folder, or holds none.
    """
    submissions: list[Submission] = []
    for path in map(Path, [paths] if isinstance(paths, str | os.PathLike) else paths):
        why = _unreadable(path)
        if why and not path.is_dir():
            raise NoCandidates(f"{path}: {why}")
        files = sorted(_files(path)) if path.is_dir() else [path]
        if not files:
            raise NoCandidates(f"{path}: the folder holds no candidates; their file names end in {', '.join(READ)}")
        before = len(submissions)
        for file in files:
            submissions += _read(file, str(file.relative_to(path)) if path.is_dir() else str(file.name))
        if len(submissions) == before:
            raise NoCandidates(f"{path}: the {'folder' if path.is_dir() else 'file'} holds no candidates")
    return _with_own_names(submissions)


def _files(folder: Path) -> Iterator[Path]:
    for file in folder.rglob("*"):
        hidden = any(part.startswith((".", "_")) for part in file.relative_to(folder).parts)
        if not file.is_dir() and file.suffix in READ and not hidden:
            yield file


def _unreadable(path: Path) -> str:
    """Why a path has no text to read, or "": a pipe would have none for ever."""
    try:
        mode = path.stat().st_mode
    except OSError as error:  # a link may lead nowhere, or in a circle
        leads = f"a link to {os.readlink(path)}, which leads nowhere" if path.is_symlink() else ""
        return leads or ("there is no such file or folder" if isinstance(error, FileNotFoundError) else str(error))
    return "" if stat.S_ISREG(mode) else "no ordinary file"


def _read(file: Path, name: str) -> Iterable[Submission]:
    why = _unreadable(file)
    if why:
        return [refused(name, "unreadable", f"{name} cannot be read: it is {why}")]
    try:
        if file.suffix not in (".jsonl", ".ndjson") and file.stat().st_size > LARGEST:
            return [refused(name, "too_large", f"{name} is larger than {LARGEST >> 20} MiB")]
        text = decoded(file.read_bytes()) if file.suffix == ".py" else file.read_text(encoding="utf-8-sig")
    except (OSError, ValueError) as error:
        return [refused(name, "unreadable", f"{name} cannot be read: {error}")]
    if file.suffix in (".jsonl", ".ndjson"):
        return json_lines.read(text, name)
    if file.suffix == ".json":
        try:
            return [json_lines.of_object(json.loads(text), name)]
        except (ValueError, RecursionError) as error:
            return [refused(name, "not_json", f"{name}: not JSON: {error}")]
    if file.suffix not in LANGUAGES:
        return [refused(name, "unknown_language", f"{name}: the file name of a candidate ends in {', '.join(READ)}")]
    stem = name.removesuffix(file.suffix) if file.suffix == ".py" else name
    language = LANGUAGES[file.suffix]
    problem = constant(text, "PROBLEM") if language == "python" else None
    return [Submission(Candidate(stem, text, str(file), language), problem)]


def constant(source: str, name: str) -> str | None:
    """The text that a module assigns to a name at its top level, read without running it."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return None
    for node in tree.body:
        if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == name for t in node.targets):
            value = node.value
            return value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
    return None


def _with_own_names(submissions: list[Submission]) -> list[Submission]:
    """A candidate whose name an earlier one has gets a number, so that verdicts can be told apart."""
    taken: dict[str, int] = {}
    result = []
    for each in submissions:
        name = each.candidate.name
        count = taken[name] = taken.get(name, 0) + 1
        while count > 1 and f"{name}#{count}" in taken:
            count += 1
        if count > 1:
            name = f"{name}#{count}"
            taken[name] = 1
            each = replace(each, candidate=replace(each.candidate, name=name))
            if each.verdict is not None:
                each = replace(each, verdict=replace(each.verdict, candidate=name))
        result.append(each)
    return result
