"""Candidate: the source of a kernel that somebody else wrote."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

LOADERS = {
    "python": "goldsmith.assay.gate.isolation.loading:python",
    "cuda": "goldsmith.assay.gate.formats.cuda_source:load",
}


@dataclass(frozen=True)
class Candidate:
    """A candidate's source. Triton is Python.

    name      how verdicts name it
    source    its text
    path      the file it came from, or ""
    language  "python" or "cuda"
    entry     name of the function or class to call; "": `candidate`, or `ModelNew`
    """

    name: str
    source: str
    path: str = ""
    language: str = "python"
    entry: str = ""

    def __post_init__(self) -> None:
        for argument in ("name", "source", "path", "entry"):
            if not isinstance(getattr(self, argument), str):
                raise TypeError(f"{argument}: expected a text, got {getattr(self, argument)!r}"[:200])
        if self.language not in LOADERS:
            raise ValueError(f"language: {self.language!r} is unknown; there are: {', '.join(LOADERS)}")

    @staticmethod
    def read(path: str | Path, **more: Any) -> Candidate:
        """The candidate in a file."""
        path = Path(path)
        language = "cuda" if path.suffix in (".cu", ".cuh") else "python"
        return Candidate(
            **{"name": path.stem, "source": path.read_text(), "path": str(path), "language": language, **more}
        )
