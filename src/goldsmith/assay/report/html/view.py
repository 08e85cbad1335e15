"""Computes the contents of the page from reports: sentences, worst rows, strips and maps. No markup except drawings."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..ranking import OBSERVATIONS, demanding, number, ranked
from ..results import FAIL, NOT_RUN, PASS, REFERENCE_FAULT, UNJUDGED, ErrorMap, Finding, Note, ReportFacts, Row
from . import svg
from .maps import map_view
from .prose import title_and_rest
from .strip import SEVERITY, stage_strip

RUNG_MEANING = {
    "CERTAIN": "more than rounding can do to the golden's formula in any order of its sums, or not rounding at all",
    "STATISTICAL": "far beyond the noise of eight legal orders of the golden, and again on a fresh seed",
    "SYSTEMATIC": "the errors share a slope, a sign or a pattern",
    "QUALITY": "within bounds, worse than an honest implementation",
}
VERDICT_WORD = {PASS: "pass", FAIL: "fail", REFERENCE_FAULT: "reference at fault"}
ABSENT = "absent"  # state of a case that was not judged
NOT_JUDGED = ("cannot_run", "not_judged", NOT_RUN)  # ids of notes on cases without a verdict
REPLAY = "replay"  # id of the note that answers a replay
MAX_ROWS, MAX_FINDINGS, MAX_NOTES = 400, 60, 8


@dataclass(frozen=True)
class Entry:
    """One line of the matrix: an operator on a backend, with its report or the reason why it has none."""

    operator: str
    backend: str = ""
    report: ReportFacts | None = None
    reason: str = ""
    how: str = ""  # "interpreter", if the kernels did not run on their device
    misdeclared: bool = False  # the reason is a mistake in the declaration, not this machine

    @property
    def name(self) -> str:
        return f"{self.operator} on {self.backend}" if self.backend else self.operator

    @property
    def anchor(self) -> str:
        return "t-" + re.sub(r"[^A-Za-z0-9_-]+", "-", f"{self.operator}-{self.backend}").strip("-")

    @property
    def verdict(self) -> str:
        if self.report is None:
            return "absent"
        unfinished = self.report.partial or unjudged(self.report)
        return "partial" if unfinished and self.report.verdict in (PASS, UNJUDGED) else self.report.verdict

    @property
    def failed(self) -> bool:
        return self.verdict in (FAIL, REFERENCE_FAULT)


def unjudged(report: ReportFacts) -> str:
    """The reason why no case of the report was judged (Triton's interpreter lacks a feature, say); "" if any was."""
    judged = {r.case for r in report.rows} | {f.case for f in report.findings}
    if report.verdict == UNJUDGED:  # judged cases do not count here: the requested ones were not judged
        judged = set()
    reasons = {n.case: n.text for n in report.notes if n.id in NOT_JUDGED and n.case not in judged}
    return next(iter(reasons.values())) if reasons and not judged else ""


def shown_maps(report: ReportFacts, most: int) -> dict[str, ErrorMap]:
    """At most `most` maps of the findings' tensors and cases, the most certain first; of any tensor if all is right.

    A finding without a map (an input modified, a process that ended) gets none, because another tensor's map would
    mislead.
    """
    maps = {key: m for key, m in report.maps.items() if pictured(m)}
    if report.ok:
        return dict(list(maps.items())[:most])
    drawn = {(m.case, m.tensor): key for key, m in maps.items() if m.bad}
    keys = [drawn[f.case, f.tensor] for f in ranked(report) if (f.case, f.tensor) in drawn]
    return {key: report.maps[key] for key in list(dict.fromkeys(keys))[:most]}


def pictured(m: ErrorMap) -> bool:
    """Whether a map is worth a picture: a single number is not."""
    return math.prod(m.shape) > 1


def seconds(value: float) -> str:
    if value < 9.95:
        return f"{value:.1f} s" if value >= 0.05 or not value else "< 0.1 s"
    return f"{value:.0f} s" if value < 120 else f"{value / 60:.0f} min"


def count(n: int, word: str) -> str:
    return f"{n:,} {word}{'' if n == 1 else 's'}"


def join(words: Sequence[str], most: int = 3) -> str:
    shown = list(words[:most])
    rest = len(words) - len(shown)
    if rest:
        shown.append(f"{rest} more")
    return shown[0] if len(shown) == 1 else ", ".join(shown[:-1]) + " and " + shown[-1] if shown else ""


def sentence(text: str) -> str:
    """The text with one full stop at the end; its first letter stays as it is, since it may start a tensor's name."""
    text = text.strip()
    return text if text.endswith((".", "!", "?")) or not text else text + "."


@dataclass
class Section:
    """All contents of the page about one report."""

    entry: Entry
    report: ReportFacts
    headline: str
    title: str  # of a page about this report alone, and the rest of the sentence
    rest: str
    cases: int  # number of cases with a verdict
    strip: list[dict[str, str]]
    findings: list[dict[str, object]]  # of the headline's case
    elsewhere: list[dict[str, object]]  # of other cases
    more_findings: int
    notes: list[dict[str, object]]  # that a reader can act on
    observations: list[dict[str, object]]  # the other notes
    maps: list[dict[str, object]]
    tensors: list[dict[str, object]]
    rows: list[Row]
    rows_total: int
    probes: list[object] = field(default_factory=list)


def section(entry: Entry, *, max_rows: int = MAX_ROWS, map_cells: int = 64, max_maps: int = 4) -> Section:
    report = entry.report
    if report is None:
        raise ValueError(f"{entry.name} has no report")
    notable = [r for r in report.rows if r.state != "ok"]
    plain = [r for r in report.rows if r.state == "ok"]
    notable.sort(key=lambda r: -SEVERITY.get(r.state, 1))
    chosen = (notable + plain)[:max_rows]
    findings = ranked(report)
    here = [f for f in findings if f.case == findings[0].case]
    elsewhere = [f for f in findings if f.case != findings[0].case][: max(0, MAX_FINDINGS - len(here))]
    sentence_of_all = headline(report)
    answer = answer_of_replay(report)
    title, rest = (sentence(answer), sentence_of_all) if answer else title_and_rest(sentence_of_all)
    return Section(
        entry=entry,
        report=report,
        headline=sentence_of_all,
        title=title,
        rest=rest,
        cases=judged_cases(report),
        strip=stage_strip(report),
        findings=[finding_view(f) for f in here[:MAX_FINDINGS]],
        elsewhere=[finding_view(f) for f in elsewhere],
        more_findings=len(findings) - len(here[:MAX_FINDINGS]) - len(elsewhere),
        notes=notes_view([n for n in demanding(report.notes) if n.id != REPLAY]),
        observations=notes_view([n for n in report.notes if n.id in OBSERVATIONS]),
        maps=[map_view(m, map_cells) for m in shown_maps(report, max_maps).values()],
        tensors=tensor_view(report.rows),
        rows=chosen,
        rows_total=len(report.rows),
        probes=list(report.probes),
    )


def headline(report: ReportFacts) -> str:
    """The first sentence: the most certain finding, or that nothing is wrong."""
    if report.findings:
        return sentence(ranked(report)[0].text)
    if report.verdict == REFERENCE_FAULT:
        return "The reference is at fault, so the candidate is not accused."
    if report.verdict == FAIL:
        return "The check failed, but no probe reported a finding."
    left_out = [n for n in report.notes if n.id == NOT_RUN]
    if left_out and judged_cases(report):
        did = "did not finish" if report.partial else "did not run"
        why = left_out[0].text.partition(": ")[2]
        return f"{len(left_out)} of {count(len(report.cases), 'case')} {did}: {why}."
    if unjudged(report):
        return f"Nothing was judged: {sentence(unjudged(report))}"
    runs = len({(r.case, r.run) for r in report.rows})
    tensors = len({r.tensor for r in report.rows})
    checked = f"{count(judged_cases(report), 'case')}, {count(runs, 'run')}, {count(tensors, 'tensor')}"
    if report.partial:
        return f"Nothing wrong so far ({checked}); {sentence(report.partial)}"
    return f"Everything tried here holds: {checked}, all within what rounding allows."


def answer_of_replay(report: ReportFacts) -> str:
    """Whether a replayed case gives what it gave before; "" for any other report."""
    answer = next((note.text for note in report.notes if note.id == REPLAY), "")
    return answer[:1].upper() + answer[1:]


def notes_view(notes: Sequence[Note]) -> list[dict[str, object]]:
    """Notes grouped by kind: the first text of each tensor, and the number of other cases with the same note."""
    kinds: dict[str, dict[str, list[Note]]] = {}
    for note in notes:
        kinds.setdefault(note.id, {}).setdefault(note.tensor, []).append(note)
    return [
        {
            "kind": kind.replace("_", " "),
            "lines": [
                {
                    "tensor": tensor,
                    "text": group[0].text,
                    "case": group[0].case,
                    "more": len({n.case for n in group}) - 1,
                }
                for tensor, group in list(tensors.items())[:MAX_NOTES]
            ],
            "hidden": max(0, len(tensors) - MAX_NOTES),
        }
        for kind, tensors in kinds.items()
    ]


def finding_view(finding: Finding) -> dict[str, object]:
    where = ""
    if finding.location is not None:
        where = finding.location.text or _where(finding)
        where = "" if where in finding.text else where
    bars = ""
    if finding.measured is not None and finding.limit is not None:
        bars = svg.excess(
            finding.measured, finding.limit, f"measured {number(finding.measured)}, allowed {number(finding.limit)}"
        )
    return {"f": finding, "meaning": RUNG_MEANING.get(finding.rung, ""), "where": where, "bars": bars}


def _where(finding: Finding) -> str:
    location = finding.location
    if location is None:
        return ""
    parts = [f"segment {s}" for s in location.segments]
    for axis, ranges in location.axes.items():
        spans = ", ".join(f"{lo}" if lo == hi else f"{lo}..{hi}" for lo, hi in ranges[:4])
        parts.append(f"{axis} {spans}" + (" ..." if len(ranges) > 4 else ""))
    if location.fraction:
        parts.append(f"{100 * location.fraction:.3g} % of the elements")
    return "; ".join(parts)


def tensor_view(rows: Iterable[Row]) -> list[dict[str, object]]:
    """For each tensor: the distance of every run from its proven bound, and the worst figures."""
    groups: dict[str, list[Row]] = {}
    for row in rows:
        groups.setdefault(row.tensor, []).append(row)
    views = []
    for name, group in groups.items():
        ratios = [r.max_over_bound for r in group if r.max_over_bound is not None]
        worst = _max(ratios)
        title = f"{name}: worst error / bound {number(worst)} in {count(len(group), 'run')}"
        views.append(
            {
                "name": name,
                "kind": group[0].kind,
                "runs": len(group),
                "worst": worst,
                "noise": _max([r.rms_over_noise for r in group]),
                "p50": _max([r.ulp_p50 for r in group]),
                "p99": _max([r.ulp_p99 for r in group]),
                "ulp": _max([r.ulp_max for r in group]),
                "state": max((r.state for r in group), key=lambda s: SEVERITY.get(s, 1)),
                "dots": svg.headroom(ratios, title) if ratios else "",
            }
        )
    return views


def _max(values: Iterable[float | None]) -> float | None:
    present = [v for v in values if v is not None]
    if any(math.isnan(v) for v in present):
        return math.nan
    return max(present, default=None)


def case_states(report: ReportFacts) -> dict[str, str]:
    states = dict.fromkeys(report.cases, "ok")
    for row in report.rows:
        if SEVERITY.get(row.state, 1) > SEVERITY.get(states.get(row.case, "ok"), 0) and row.state in ("bad", "quality"):
            states[row.case] = row.state
    judged = {row.case for row in report.rows}
    states |= {n.case: ABSENT for n in report.notes if n.id in NOT_JUDGED and n.case in states and n.case not in judged}
    for finding in report.findings:
        if finding.case in states:
            states[finding.case] = "quality" if finding.rung == "QUALITY" and states[finding.case] != "bad" else "bad"
    return states


def judged_cases(report: ReportFacts) -> int:
    """How many cases of the report have a verdict."""
    return sum(state != ABSENT for state in case_states(report).values())


def matrix_row(entry: Entry) -> dict[str, object]:
    report = entry.report
    if report is None:
        return {"entry": entry, "squares": "", "cases": 0, "worst": None}
    states = case_states(report)
    bad = sum(s == "bad" for s in states.values())
    label = f"{entry.name}: {count(len(states), 'case')}, {bad or 'none'} wrong"
    href = f"#{entry.anchor}"
    words = {"ok": "right", "bad": "wrong", "quality": "right, but poor", "absent": "cannot run on this backend"}
    cells = [svg.Square(s, f"{c}: {words.get(s, s)}", href if s == "bad" else "") for c, s in states.items()]
    return {
        "entry": entry,
        "squares": svg.squares(cells, label),
        "cases": len(states),
        "bad": bad,
        "worst": worst_ratio(report),
    }


def worst_ratio(report: ReportFacts) -> float | None:
    """The worst error of an output or gradient as a share of its proven bound."""
    return _max(r.max_over_bound for r in report.rows if r.kind != "stage")
