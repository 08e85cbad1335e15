"""CppSource: the C++ files that a candidate is built from, so that edited copies of them can be built and run."""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import os
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...core.tracing import TargetError, TargetTypeError

SWITCH = "goldsmith_edit"  # the number in a library of many edits that says which of them runs
_PREBUILT = "library of edits"  # in place of a path, in what a process is told about edited files
_HEADERS = (".h", ".hh", ".hpp", ".hxx", ".inc", ".inl")
_SECONDS = 120.0
_folder = ""


class NotBuilt(TargetError):
    """The files could not be built. output: what the command wrote."""

    def __init__(self, text: str, output: str = ""):
        super().__init__(text)
        self.output = output


@dataclass(frozen=True)
class CppSource:
    """The C++ files that a candidate is built from: with them, a diagnosis looks for a patch in these files.

    files  one path or several, with the headers that may be edited
    build  a command in which {files} stands for all files but headers, {library} for what it makes, and {here} for the
           folder of the files, as in "c++ -O2 -shared -fPIC -I {here} {files} -o {library}"; or a function that is
           called with a list of paths and the path of the library. The files are copies in a temporary folder
    load   makes the candidate from the path of a library, or a pair (candidate, backward)
    """

    files: Any
    build: str | Callable[[list[Path], Path], object]
    load: Callable[[Path], object]

    def __post_init__(self) -> None:
        given = [self.files] if isinstance(self.files, str | os.PathLike) else self.files
        if not isinstance(given, list | tuple) or not given or not all(isinstance(f, str | os.PathLike) for f in given):
            raise TargetTypeError(f"files: expected a path or a list of paths, got {self.files!r}")
        paths = tuple(Path(f).resolve() for f in given)
        missing = next((p for p in paths if not p.is_file()), None)
        if missing is not None:
            raise TargetError(f"files: there is no file {missing}")
        if not [p for p in paths if p.suffix not in _HEADERS]:
            raise TargetError(f"files: {paths[0].name} is a header; name a file that can be compiled")
        if isinstance(self.build, str):
            lacking = next((word for word in ("{files}", "{library}") if word not in self.build), None)
            if lacking is not None:
                raise TargetError(
                    f"build: {self.build!r} lacks {lacking}, as in 'c++ -shared -fPIC {{files}} -o {{library}}'"
                )
        elif not callable(self.build):
            raise TargetTypeError(f"build: expected a command or a function, got {type(self.build).__name__}")
        if not callable(self.load):
            raise TargetTypeError(f"load: expected a function of the library's path, got {type(self.load).__name__}")
        object.__setattr__(self, "files", paths)

    def loaded(self) -> Any:
        """What `load` makes of the library of the files as they are."""
        return self.load(self.library({}))

    def parts(self, edited: Mapping[str, str]) -> tuple[Callable, Callable | None]:
        """(candidate, backward) of edited files. edited: path -> text, or what `numbered` gives."""
        library, number = self._prebuilt(edited)
        if number is not None:
            ctypes.c_int.in_dll(ctypes.CDLL(os.fspath(library)), SWITCH).value = number
        parts = self.load(library)
        candidate, backward = parts if isinstance(parts, tuple) else (parts, None)
        if not callable(candidate):
            raise TargetTypeError(f"load: expected a callable candidate from it, got {type(candidate).__name__}")
        return candidate, backward

    def _prebuilt(self, edited: Mapping[str, str]) -> tuple[Path, int | None]:
        number, _, path = edited.get(_PREBUILT, "").partition(" ")
        return (Path(path), int(number)) if number else (self.library(edited), None)

    def library(self, edited: Mapping[str, str]) -> Path:
        """The library of the files, some of them with another text; built once. Raises NotBuilt."""
        texts = {p: edited[str(p)].encode() if str(p) in edited else p.read_bytes() for p in self.files}
        named = self.build if isinstance(self.build, str) else (self.build.__module__, self.build.__qualname__)
        digest = hashlib.sha256(repr((named, *texts.items())).encode())
        library = Path(folder()) / f"{digest.hexdigest()[:24]}.so"
        if not library.exists():
            with tempfile.TemporaryDirectory(dir=folder()) as place:
                os.replace(self._built(Path(place), texts), library)
        return library

    def _built(self, place: Path, texts: Mapping[Path, bytes]) -> Path:
        here = Path(os.path.commonpath([p.parent for p in texts]))
        copies = {p: place / p.relative_to(here) for p in texts}
        for path, copy in copies.items():
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(texts[path])
        units = [copy for path, copy in copies.items() if path.suffix not in _HEADERS]
        library = place / "library.so"
        if isinstance(self.build, str):
            _run(_words(self.build, units, library, here), place)
        else:
            try:
                self.build(units, library)
            except Exception as error:
                output = getattr(error, "stderr", None) or str(error)
                output = output.decode(errors="replace") if isinstance(output, bytes) else str(output)
                raise NotBuilt(f"build: raised {type(error).__name__}: {error}", output) from error
        if not library.is_file():
            raise NotBuilt("build: it ended, and made no library where it was asked for")
        return library


def _words(command: str, units: Sequence[Path], library: Path, here: Path) -> list[str]:
    words: list[str] = []
    for word in shlex.split(command):
        if word == "{files}":
            words += map(str, units)
        else:
            joined = " ".join(map(str, units))
            words.append(
                word.replace("{files}", joined).replace("{library}", str(library)).replace("{here}", str(here))
            )
    return words


def _run(words: Sequence[str], place: Path) -> None:
    shown = " ".join(words)
    try:
        done = subprocess.run(
            words, cwd=place, capture_output=True, text=True, errors="replace", timeout=_SECONDS, check=False
        )
    except OSError as error:
        raise NotBuilt(f"build: {words[0]} cannot be started: {error}") from error
    except subprocess.TimeoutExpired as error:
        raise NotBuilt(f"build: the command took more than {_SECONDS:g} s: {shown}") from error
    if done.returncode:
        output = done.stderr + done.stdout
        raise NotBuilt(f"build: the command failed: {shown}\n{output[:2000]}", output)


def numbered(library: Path, number: int) -> dict[str, str]:
    """What a process is told of an edit that a library holds beside others."""
    return {_PREBUILT: f"{number} {library}"}


def folder() -> str:
    """The folder of the libraries of this process and its children; it is removed at the end."""
    global _folder
    if not _folder:
        _folder = tempfile.mkdtemp(prefix="goldsmith-cpp-")
        atexit.register(shutil.rmtree, _folder, ignore_errors=True)
    return _folder


def use_folder(path: str) -> None:
    """Take the libraries that the parent process has built, and put others beside them."""
    global _folder
    _folder = path or _folder
