"""Candidate: the source of a kernel that somebody else wrote."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from .source_files import decoded

LANGUAGES = ("python", "cuda", "cpp")
SUFFIXES = {".cu": "cuda", ".cpp": "cpp", ".cc": "cpp", ".cxx": "cpp"}  # all others: Python
LOADER = "goldsmith.assay.gate.candidate_call:load"  # runs in the candidate's process


@dataclass(frozen=True)
class Candidate:
    """A candidate's source. Triton is Python.

    name      how verdicts name it, and nothing else
    source    its text
    path      the file it came from, or ""
    language  one of LANGUAGES
    entry     name of the function or class to call; "": as the problem says, or `candidate`, or `ModelNew`
    files     its other sources: path relative to the source -> text
    call      how it is called, if not as the problem says: a kind of `candidate_call.CandidateCall`
    """

    name: str
    source: str
    path: str = ""
    language: str = "python"
    entry: str = ""
    files: Mapping[str, str] = field(default_factory=dict)
    call: str = ""

    def __post_init__(self) -> None:
        for argument in ("name", "source", "path", "entry", "call"):
            if not isinstance(getattr(self, argument), str):
                raise TypeError(f"{argument}: expected a text, got {getattr(self, argument)!r}"[:200])
        if self.language not in LANGUAGES:
            raise ValueError(f"language: {self.language!r} is unknown; there are: {', '.join(LANGUAGES)}")
        object.__setattr__(self, "source", self.source.removeprefix("\ufeff"))  # a mark of UTF-8, no part of the text

    @staticmethod
    def read(path: str | Path, **more: Any) -> Candidate:
        """The candidate in a file."""
        path = Path(path)
        language = SUFFIXES.get(path.suffix, "python")
        source = decoded(path.read_bytes()) if language == "python" else path.read_text(encoding="utf-8")
        return Candidate(**{"name": path.stem, "source": source, "path": str(path), "language": language, **more})

    def loading(self, construct: Mapping[str, object]) -> dict[str, object]:
        """The arguments of LOADER."""
        own = {name: getattr(self, name) for name in ("source", "entry", "language", "call")}
        return {**own, "files": dict(self.files), "construct": dict(construct)}

    def to_json(self) -> dict[str, object]:
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        return cls(**data)
