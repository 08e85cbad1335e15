"""Verdicts as one HTML page, on the template of the assay's reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from .verdict import ACCEPTED, STATUSES, Verdict

MOST = 2000  # candidates with a row of their own
SENTENCES = 4  # of evidence


def write(verdicts: Sequence[Verdict], path: str | Path, *, conditions: Sequence[str] = ()) -> None:
    """Write the page, creating the folder if it is missing."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(page(verdicts, conditions=conditions), encoding="utf-8", errors="backslashreplace")


def page(verdicts: Sequence[Verdict], *, conditions: Sequence[str] = ()) -> str:
    """The page as text; those that were not accepted come first."""
    from ..report.html.page import now, style, template  # jinja2 takes 30 ms to load

    counts = Counter(v.status for v in verdicts)
    others = [v for v in verdicts if not v.ok]
    timed = sorted((v for v in verdicts if v.timing is not None), key=lambda v: (v.timing or {}).get("time", 0.0))
    context: dict[str, object] = {
        "style": style(),
        "title": "goldsmith gate",
        "made": now(),
        "verdict": "fail" if others else "pass",
        "headline": f"{counts[ACCEPTED]} of {len(verdicts)} candidates accepted.",
        "conditions": conditions,
        "counts": [(s, counts[s]) for s in STATUSES if counts[s]],
        "others": [_row(v) for v in others[:MOST]],
        "others_total": len(others),
        "timed": [{"name": v.candidate, **(v.timing or {})} for v in timed[:MOST]],
        "accepted": [v.candidate for v in verdicts if v.ok][:MOST],
        "environment": {},
    }
    return template("gate.html.j2").render(context)


def _row(verdict: Verdict) -> dict[str, object]:
    return {
        "name": verdict.candidate,
        "status": verdict.status,
        "reason": verdict.reason,
        "case": verdict.case,
        "seconds": f"{verdict.seconds:.1f}",
        "evidence": verdict.evidence[:SENTENCES],
        "diagnosis": verdict.diagnosis,
    }
