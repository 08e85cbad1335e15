"""Diagnosis: the result of `diagnose`, with its rendering as text, page and bundle."""

from __future__ import annotations

import os
from pathlib import Path

from . import text
from .result import DiagnosisFacts

PAGE = "diagnosis.html"


class Diagnosis(DiagnosisFacts):
    """The fault, its place and its cause; empty if nothing is wrong. `print(diagnosis)` shows it in 80 columns."""

    def to_html(self, path: str | os.PathLike) -> None:
        """Write one self-contained HTML page."""
        from . import page as diagnosis_page  # jinja2 takes 30 ms to load

        diagnosis_page.write(self, path)

    def save(self, folder: str | os.PathLike) -> Path:
        """Write the smallest failing case as a bundle with a page into `folder`; returns the folder of the bundle.

        Raises ValueError if there is no failing case to write.
        """
        if self.write_bundle is None:
            raise ValueError(f"save: the verdict is {self.verdict!r}, so there is no failing case to write")
        self.bundle = self.write_bundle(self, Path(folder))
        self.to_html(self.bundle / PAGE)
        return self.bundle

    def to_json(self) -> dict[str, object]:
        return {"headline": text.headline(self), **super().to_json()}

    def __str__(self) -> str:
        return text.render(self)
