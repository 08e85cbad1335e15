"""Report: what `check` returns. It adds the rendering as text and as a page to ReportFacts."""

from __future__ import annotations

from . import text
from .results import ReportFacts


class Report(ReportFacts):
    """The result of `check`: a verdict with everything it rests on. `print(report)` shows it in 80 columns."""

    def to_html(self, path: str) -> None:
        """Write one self-contained HTML page."""
        from .html import page  # jinja2 takes 30 ms to load

        page.write([self], path)

    def text(self, *, every: bool = False) -> str:
        """The report in 80 columns. every: all findings and notes; otherwise the first, and how many more there are."""
        return text.render(self, every=every)

    def __str__(self) -> str:
        return text.render(self)
