"""Merges the reports of many cases into one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from ...assay.report.check_report import Report
from ...assay.report.html.view import NOT_JUDGED, shown_maps
from ...assay.report.results import FAIL, PASS, REFERENCE_FAULT, UNJUDGED, ErrorMap, Note, ProbeRun, nothing_compared
from ..json_types import JsonObject

GOOD_MAPS, BAD_MAPS = 1, 6
NOT_SELECTED = "not selected"  # assay.check's reason for a probe that was not requested


def merge(name: str, reports: Sequence[Report]) -> Report:
    """Merge reports into one: findings and rows in order, probes added up, each note once."""
    verdicts = {r.verdict for r in reports}
    verdict = next((v for v in (FAIL, REFERENCE_FAULT) if v in verdicts), PASS)
    if UNJUDGED in verdicts and verdict == PASS and not any(_judges_something(r) for r in reports):
        verdict = UNJUDGED
    merged = Report(name, verdict)
    notes: dict[tuple[str, str, str, str], Note] = {}
    probes: dict[str, list[ProbeRun]] = {}
    for report in reports:
        merged.findings += report.findings
        merged.rows += report.rows
        merged.cases += [case for case in report.cases if case not in merged.cases]
        for note in report.notes:
            case = note.case if note.id in NOT_JUDGED else ""  # these notes are kept for every case
            notes.setdefault((note.id, note.tensor, note.text, case), note)
        for probe in report.probes:
            probes.setdefault(probe.name, []).append(probe)
        merged.maps |= {f"{key} {report.cases[0]}": m for key, m in report.maps.items()}
        merged.environment = _environment(merged.environment, report.environment)
        merged.seconds += report.seconds
        merged.dtypes += [d for d in report.dtypes if d not in merged.dtypes]
        merged.stages += [s for s in report.stages if s not in merged.stages]
        merged.device, merged.seed, merged.strict = report.device, report.seed, report.strict
        merged.partial = merged.partial or report.partial
    merged.notes = list(notes.values())
    empty = nothing_compared(merged) if verdict == PASS else []
    if empty:
        merged.notes, merged.verdict = [*merged.notes, *empty], UNJUDGED
    merged.probes = [_sum_of_runs(runs) for runs in probes.values()]
    merged.maps = _few_maps(merged)
    return merged


def _environment(one: JsonObject, other: JsonObject) -> JsonObject:
    """The first environment, completed by the second, with the numbers of runs added up."""
    spent = [cast("dict[str, int]", e.get("runs") or {}) for e in (one, other)]
    runs = {k: sum(s.get(k, 0) for s in spent) for k in {**spent[0], **spent[1]}}
    interpreted = sum(cast("int", e.get("interpreted", 0)) for e in (one, other))
    return {**other, **one, "runs": runs, "interpreted": interpreted}


def _judges_something(report: Report) -> bool:
    """Whether a passing report says anything about the candidate: that of an empty output does not."""
    return report.verdict == PASS and any(r.kind == "output" and 0 not in r.shape for r in report.rows)


def _sum_of_runs(runs: Sequence[ProbeRun]) -> ProbeRun:
    """One probe over all cases; if it was not selected, the reason names --thorough."""
    ran = [p for p in runs if p.ran]
    reasons = sorted({p.reason for p in runs if not p.ran and p.reason and p.reason != NOT_SELECTED})
    if any(p.reason == NOT_SELECTED for p in runs if not p.ran):
        reasons.append("the others with --thorough" if ran else "with --thorough")
    share = f"{len(ran)} of {len(runs)} cases" if 0 < len(ran) < len(runs) else ""
    reason = "; ".join(filter(None, (share, *reasons)))
    return ProbeRun(runs[0].name, bool(ran), reason, sum(p.seconds for p in runs), sum(p.runs for p in runs))


def _few_maps(report: Report) -> dict[str, ErrorMap]:
    """The maps of the findings, or the largest map of a passing report."""
    if not report.ok:
        return shown_maps(report, BAD_MAPS)
    good = sorted(report.maps.items(), key=lambda item: item[1].shape[0] * item[1].shape[1])
    return dict(good[-GOOD_MAPS:])
