"""A folder of problems, of which each candidate names its own."""

from __future__ import annotations

import functools
import json
from pathlib import Path


class UnknownProblem(ValueError):
    """A candidate names no problem, or one that the folder does not hold."""


class ProblemFolder:
    """Names -> files: `softmax` or `softmax.py` for Python files, the definition's name for FlashInfer-Bench."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.files: dict[str, Path] = {}
        for path in sorted(folder.rglob("*")):
            hidden = any(part.startswith((".", "_")) for part in path.relative_to(folder).parts)
            if path.is_file() and not hidden and path.suffix == ".py":
                self.files.setdefault(path.stem, path)
                self.files.setdefault(str(path.relative_to(folder).with_suffix("")), path)
            elif path.is_file() and not hidden and path.suffix == ".json":
                for name in _definition(path):
                    self.files.setdefault(name, path)

    def named(self, name: str | None) -> str:
        """The file of the problem with that name; the only one where no name is given."""
        if name is None:
            if len(set(self.files.values())) == 1:
                return str(next(iter(self.files.values())))
            number = len(set(self.files.values()))
            raise UnknownProblem(f"it names no problem, and the folder {self.folder} holds {number} files of problems")
        path = self.files.get(name.removesuffix(".py"))
        if path is None:
            raise UnknownProblem(f"{self.folder} holds no problem {name!r}")
        return str(path)


def problem_folder(folder: Path) -> ProblemFolder:
    return _listing(folder, Path.cwd())


@functools.cache
def _listing(folder: Path, current: Path) -> ProblemFolder:
    """current: the current folder, in which a relative path is looked up."""
    return ProblemFolder(folder)


def _definition(path: Path) -> list[str]:
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, OSError):
        return []
    return [str(data["name"])] if isinstance(data, dict) and "reference" in data and "name" in data else []
