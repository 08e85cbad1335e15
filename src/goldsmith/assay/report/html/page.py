"""Writes the HTML page of one report, or of many reports below a matrix of operator x backend x case."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2

from ...support.output_file import write_whole
from ...support.printable import visible
from ..ranking import severity
from ..results import REFERENCE_FAULT, ReportFacts
from . import prose, svg, view
from .view import Entry

LIMIT_BYTES = 2_000_000
_RUNS = {"calls": "candidate in plain calls"}
NOT_RUN = "Not run: "  # the beginning of remarks on what was left out; they stand below the headline
# rows, cells per side of a map, and maps of each report; the first level of detail that fits the limit is used
DETAIL = ((400, 64, 4), (120, 48, 2), (60, 32, 1), (24, 24, 1), (8, 16, 1), (0, 16, 0))


def write(
    reports: Sequence[ReportFacts | Entry],
    path: str | Path,
    *,
    title: str = "",
    conditions: Sequence[str] = (),
    remarks: Sequence[str] = (),
    column: str = "",
) -> Path:
    """Write `reports` as one self-contained page, creating the folder if it is missing.

    conditions: short facts under the headline (machine, versions). remarks: sentences below the matrix that say what
    ran, what did not run, and why. column: what `backend` of each entry is, such as "test", if it is not a backend.
    """
    write_whole(path, render(reports, title=title, conditions=conditions, remarks=remarks, column=column))
    return Path(path)


def render(
    reports: Sequence[ReportFacts | Entry],
    *,
    title: str = "",
    conditions: Sequence[str] = (),
    remarks: Sequence[str] = (),
    column: str = "",
) -> str:
    """The page as text; many reports get less detail each, to stay under 2 MB, and the page says so."""
    entries = [r if isinstance(r, Entry) else Entry(r.target, report=r) for r in reports]
    if not entries:
        raise ValueError("a page needs at least one report")
    text = ""
    for rows, cells, maps in DETAIL:
        text = _render(entries, title, conditions, remarks, column, rows, cells, maps)
        if len(text.encode()) <= LIMIT_BYTES:
            break
    return text


def _render(
    entries: list[Entry],
    title: str,
    conditions: Sequence[str],
    remarks: Sequence[str],
    column: str,
    rows: int,
    cells: int,
    maps: int,
) -> str:
    story = len(entries) == 1 and entries[0].report is not None
    # failing entries come first, with full detail; passing ones show only their worst rows
    sections = [
        view.section(e, max_rows=rows if e.failed or story else min(rows, 60), map_cells=cells, max_maps=maps)
        for e in entries
        if e.report is not None
    ]
    sections.sort(key=lambda s: severity(s.report))
    not_run = [line for line in remarks if line.startswith(NOT_RUN)]
    context: dict[str, Any] = {
        "style": style(),
        "title": title or (f"{entries[0].name}: assay" if story else "goldsmith verify"),
        "story": story,
        "sections": sections,
        "groups": _groups(entries),
        "kind": "target" if column else " or ".join(_kinds(entries)),
        "column": column or "backend",
        "summary": summary(entries, column),
        "timed": not conditions,  # the caller's own conditions include the total time
        "conditions": list(conditions) or _conditions(entries),
        "not_run": not_run,
        "remarks": [line for line in remarks if line not in not_run],
        "environment": facts(entries),
        "made": now(),
        "rungs": view.RUNG_MEANING,
        "error_legend": list(enumerate(svg.ERROR_LEGEND)),
        "first_bad": svg.FIRST_BAD,
    }
    return template("page.html.j2").render(context)


def summary(entries: Sequence[Entry], column: str = "") -> dict[str, str]:
    """The verdict over all entries: the verdict's word, a headline, the counts, and the worst finding."""
    run = [e for e in entries if e.report is not None]
    failed = sorted([e for e in run if e.failed], key=lambda e: severity(e.report) if e.report else ())
    partial = [e for e in run if e.verdict == "partial"]
    kinds = {"target": {e.operator for e in run}} if column else _kinds(run)
    cases = sum(view.judged_cases(e.report) for e in run if e.report)
    runs = sum(len({(r.case, r.run) for r in e.report.rows}) for e in run if e.report)
    counted = [*((len(names), kind) for kind, names in kinds.items()), (len(run), "check"), (cases, "case")]
    counts = ", ".join(view.count(number, what) for number, what in counted)
    counts += f", {view.count(runs, 'run')}"
    misdeclared = sum(e.misdeclared for e in entries)
    absent = len(entries) - len(run) - misdeclared
    if misdeclared:
        counts += f"; {view.count(misdeclared, 'target')} declared wrongly"
    if absent:
        counts += f"; {view.count(absent, 'check')} could not run here"
    if failed:
        named = [e.operator if column else e.name for e in failed]  # a test has the name of its target
        accused = [e for e in failed if e.verdict != REFERENCE_FAULT]
        what = "rejected" if accused else "without a verdict, because the reference is at fault"
        is_or_are = "is" if len(failed) == 1 else "are"
        headline = f"{len(failed)} of {view.count(len(run), 'check')} {is_or_are} {what}: "
        headline += f"{view.join(list(dict.fromkeys(named)))}."
        why = view.headline(failed[0].report) if failed[0].report is not None else ""
        why = f"{named[0]}: {why}" if len(failed) > 1 else why
        return {"verdict": "fail" if accused else REFERENCE_FAULT, "headline": headline, "counts": counts, "why": why}
    if partial or not run:
        return {
            "verdict": "partial",
            "headline": "Nothing wrong so far; not everything was judged.",
            "counts": counts,
            "why": "",
        }
    return {"verdict": "pass", "headline": "Everything tried here holds.", "counts": counts, "why": ""}


def _kinds(entries: Sequence[Entry]) -> dict[str, set[str]]:
    """The operator names, grouped into operators (they have backends) and the user's own targets (they have none)."""
    kinds: dict[str, set[str]] = {}
    for entry in entries:
        kinds.setdefault("operator" if entry.backend else "target", set()).add(entry.operator)
    return kinds or {"target": set()}


def _groups(entries: Sequence[Entry]) -> list[tuple[str, list[dict[str, object]]]]:
    groups: dict[str, list[dict[str, Any]]] = {}
    for entry in entries:
        groups.setdefault(entry.operator, []).append(view.matrix_row(entry))
    return list(groups.items())


def _conditions(entries: Sequence[Entry]) -> list[str]:
    environment = facts(entries)
    known = ("machine", "gpu", "device", "torch", "triton", "python")
    return [f"{k} {environment[k]}" for k in known if environment.get(k)]


def facts(entries: Sequence[Entry]) -> dict[str, str]:
    """Versions and machine from the first report that has them; calls and launches are summed."""
    merged: dict[str, str] = {}
    runs: dict[str, int] = {}
    interpreted = 0
    for entry in entries:
        for key, value in (entry.report.environment if entry.report is not None else {}).items():
            if key == "runs" and isinstance(value, dict):
                runs = {k: runs.get(k, 0) + value.get(k, 0) for k in {**runs, **value}}
            elif key == "interpreted" and isinstance(value, int):
                interpreted += value
            elif value is not None and not isinstance(value, dict):
                merged.setdefault(str(key), ", ".join(map(str, value)) if isinstance(value, list) else str(value))
    if runs:
        merged["calls"] = ", ".join(f"{number:,} of the {_RUNS.get(who, who)}" for who, number in runs.items())
    if interpreted:
        merged["interpreter"] = f"{interpreted:,} launches in Triton's interpreter"
    return merged


@functools.cache
def style() -> str:
    return (Path(__file__).parent / "style.css").read_text(encoding="utf-8")


@functools.cache
def template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=jinja2.StrictUndefined,
        finalize=_shown,
    )
    environment.filters |= {
        "num": view.number,
        "secs": view.seconds,
        "breakable": prose.breakable,
        "prose": prose.prose,
        "sentence": lambda text: prose.prose(view.sentence(text)),
        "shape": lambda shape: "×".join(map(str, shape)) or "scalar",
    }
    environment.globals |= {"glyph": svg.glyph, "seal": svg.seal, "count": view.count, "words": view.VERDICT_WORD}
    return environment.get_template(name)


def _shown(value: object) -> object:
    """A template value without control characters; Markup drawings keep their type."""
    return type(value)(visible(value)) if isinstance(value, str) else value


def now() -> str:
    return datetime.now().astimezone().strftime("%d %B %Y, %H:%M")
