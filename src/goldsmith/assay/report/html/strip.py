"""The stage strip: a box for every stage, output and gradient in the golden's order."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..results import ReportFacts, Row
from . import svg

SEVERITY = {"bad": 4, "quality": 3, "note": 2, "not judged": 1, "ok": 0}
UNNAMED = "not named"  # a stage of the golden that the candidate does not name
UNNAMED_WORD = "not named by the candidate"
STATE_WORD = {
    "ok": "right",
    "bad": "wrong",
    "quality": "right, but poor",
    "note": "right, with a note",
    UNNAMED: UNNAMED_WORD,
}


def stage_strip(report: ReportFacts) -> list[dict[str, str]]:
    """A box for every stage, output and gradient in the golden's order, with its worst state of any run.

    The strip includes stages that the candidate does not name, to show the computation between the others. Findings
    about anything else, such as an input that was modified, have no box.
    """
    worst: dict[str, Row] = {}
    for row in report.rows:
        name = _plain_name(row.tensor)
        seen = worst.get(name)
        if seen is None or SEVERITY.get(row.state, 1) > SEVERITY.get(seen.state, 1):
            worst[name] = row
    for finding in report.findings:
        if finding.tensor and finding.rung != "QUALITY":
            name = _plain_name(finding.tensor)
            known = worst.get(name)
            kind = known.kind if known else "grad" if name.endswith(".grad") else "stage"
            if known or kind == "grad" or name in report.stages:
                worst[name] = Row(finding.case, "", name, kind, "", (), math.nan, state="bad")
    for name in map(_plain_name, report.stages):
        worst.setdefault(name, Row("", "", name, "stage", "", (), 0.0, state=UNNAMED))
    names = _in_order(worst, [_plain_name(name) for name in report.stages])
    first_bad = next((n for n in names if worst[n].state == "bad"), None)
    return [
        {
            "name": name,
            "kind": worst[name].kind,
            "state": worst[name].state,
            "word": _word(worst[name]),
            "glyph": svg.glyph(worst[name].state),
            "first": "first" if name == first_bad else "",
        }
        for name in names
    ]


def _word(row: Row) -> str:
    if row.state == "note" and row.kind == "stage":
        return "differs"
    return STATE_WORD.get(row.state, row.state)


def _plain_name(tensor: str) -> str:
    """The tensor's name without "saved.", because a saved result and its stage share a box."""
    return tensor.removeprefix("saved.")


def _in_order(worst: dict[str, Row], order: Sequence[str]) -> list[str]:
    """The names in the golden's order; gradients of stages come before those of inputs, the last stage first."""
    place = {name: float(k) for k, name in enumerate(order)}
    grads = min((place[n] for n, row in worst.items() if row.kind == "grad" and n in place), default=float(len(order)))
    rank = {"stage": 0, "saved": 1, "output": 2, "grad": 3}

    def key(name: str) -> float:
        if name in place:
            return place[name]
        stage = name.removesuffix(".grad")
        if stage != name and stage in place:
            return grads - 0.5 - place[stage] / (2 * len(order) + 2)
        return len(order) + rank.get(worst[name].kind, 4)

    return sorted(worst, key=key)
