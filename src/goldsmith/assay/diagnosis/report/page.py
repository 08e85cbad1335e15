"""Writes a diagnosis as an HTML page: the story, pictures, the evidence of each cause, then tables."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from ...report.html import svg
from ...report.html.page import facts, now, style, template
from ...report.html.view import RUNG_MEANING, Entry
from ...support.output_file import write_whole
from ..trace.faulty_line import MEASURED
from . import replay_command, view
from .result import DiagnosisFacts
from .text import FLOAT32


def write(
    diagnosis: DiagnosisFacts, path: str | os.PathLike, *, command: str = "", conditions: Sequence[str] = ()
) -> Path:
    """Write one self-contained page; creates its folder if it is missing.

    command     the command that replays the bundle, if the caller knows a better one
    conditions  short facts below the headline
    """
    write_whole(path, render(diagnosis, command=command, conditions=conditions))
    return Path(path)


def render(diagnosis: DiagnosisFacts, *, command: str = "", conditions: Sequence[str] = ()) -> str:
    """The page as text."""
    name = diagnosis.report.target or "the target"
    if diagnosis.bundle is not None and not command:
        command = replay_command.command_line(diagnosis)
    environment = facts([Entry(name, report=diagnosis.report)])
    context: dict[str, object] = {
        "style": style(),
        "title": f"{name}: diagnosis",
        "made": now(),
        "name": name,
        "found": diagnosis,
        "float32": FLOAT32,
        "line_measured": MEASURED,
        "story": view.story(diagnosis),
        "conditions": list(conditions) or [f"{k} {environment[k]}" for k in ("gpu", "torch") if environment.get(k)],
        "strip": view.strip(diagnosis),
        "stages": view.stages(diagnosis),
        "maps": view.maps(diagnosis),
        "dependence": view.dependence(diagnosis),
        "causes": view.causes(diagnosis),
        "undecided": list(diagnosis.undecided),
        "left_out": dict(diagnosis.evidence.left_out) if diagnosis.evidence is not None else {},
        "case": view.case_rows(diagnosis),
        "cases": view.case_table(diagnosis),
        "command": command,
        "changed": view.changed_goldens(diagnosis.evidence),
        "runs": view.runs(diagnosis),
        "memory": list(diagnosis.evidence.memory) if diagnosis.evidence is not None else [],
        "section": view.details(diagnosis),
        "environment": environment,
        "rungs": RUNG_MEANING,
        "error_legend": list(enumerate(svg.ERROR_LEGEND)),
        "first_bad": svg.FIRST_BAD,
    }
    return template("diagnosis.html.j2").render(context)
