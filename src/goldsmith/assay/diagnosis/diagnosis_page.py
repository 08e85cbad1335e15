"""Writes the page of a diagnosis: the story, then pictures, then the evidence of each cause, then the tables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..report.html import svg
from ..report.html.page import facts, now, style, template
from ..report.html.view import RUNG_MEANING, Entry
from . import again
from . import diagnosis_view as view

if TYPE_CHECKING:
    from .result import DiagnosisFacts


def write(found: DiagnosisFacts, path: str | os.PathLike, *, command: str = "", conditions: Sequence[str] = ()) -> Path:
    """Write one self-contained page; the folder is made when it is missing.

    command: what replays the bundle, where the caller knows better; conditions: short facts under the headline.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(render(found, command=command, conditions=conditions), encoding="utf-8")
    return path


def render(found: DiagnosisFacts, *, command: str = "", conditions: Sequence[str] = ()) -> str:
    """The page as text."""
    name = found.report.target or "the target"
    if found.bundle is not None and not command:
        command = again.line(found)
    environment = facts([Entry(name, report=found.report)])
    context: dict[str, Any] = {
        "style": style(),
        "title": f"{name}: diagnosis",
        "made": now(),
        "name": name,
        "found": found,
        "story": view.story(found),
        "conditions": list(conditions) or [f"{k} {environment[k]}" for k in ("gpu", "torch") if environment.get(k)],
        "strip": view.strip(found),
        "maps": view.maps(found),
        "profiles": view.profiles(found),
        "dependence": view.dependence(found),
        "causes": view.causes(found),
        "undecided": list(found.undecided),
        "left_out": dict(found.evidence.left_out) if found.evidence is not None else {},
        "case": view.case_rows(found),
        "command": command,
        "changed": view.changed_goldens(found.evidence),
        "terms": view.terms(found.evidence),
        "runs": view.runs(found),
        "memory": list(found.evidence.memory) if found.evidence is not None else [],
        "histogram": view.histogram(found),
        "section": view.details(found),
        "environment": environment,
        "rungs": RUNG_MEANING,
        "error_legend": list(enumerate(svg.ERROR_LEGEND)),
        "first_bad": svg.FIRST_BAD,
    }
    return template("diagnosis.html.j2").render(context)
