"""Renders a report for a terminal of 80 columns: one sentence first, then evidence, table, notes and cost."""

from __future__ import annotations

import re
import textwrap

from ..support.printable import visible
from .ranking import demanding, number, ranked
from .results import FAIL, NOT_JUDGED, NOT_RUN, REFERENCE_FAULT, UNJUDGED, Note, ReportFacts, Row

WIDTH = 80
ALL = "report.text(every=True) shows all"
SHOWN_FINDINGS, SHOWN_ROWS, SHOWN_NOTES, SHOWN_NAMES = 8, 16, 8, 6


def render(report: ReportFacts, *, every: bool = False, rest: str = ALL) -> str:
    """The report as text.

    every  show all findings and notes, not only the first ones and a count of the others
    rest   what shows the others, in words
    """
    parts = [_wrapped(headline(report), hang=6), _counts(report)]
    if report.findings:
        parts.append(_findings(report, every, rest))
    rows = _worst_rows(report)
    if rows:
        parts.append(_table(report, rows))
    if report.notes:
        parts.append(_notes(report, every, rest))
    parts.append(_cost(report))
    return visible("\n\n".join(p for p in parts if p) + "\n")


def headline(report: ReportFacts) -> str:
    """The verdict and the most important finding in one sentence."""
    name = report.target or "the target"
    findings = ranked(report)
    if report.verdict == REFERENCE_FAULT:
        return f"REFERENCE FAULT  {name} is not accused: {findings[0].text}"
    if report.verdict == FAIL:
        return f"FAIL  {name}: {findings[0].text}"
    refused = {n.case: n.text for n in report.notes if n.id == NOT_JUDGED}
    judged = sum(r.state != "not judged" for r in report.rows)
    left_out = {n.case: n.text for n in report.notes if n.id == NOT_RUN}
    if left_out:
        return f"NOT JUDGED  {name}: {_left_out(report, left_out, judged, len(refused))}"
    if report.verdict == UNJUDGED:
        return f"NOT JUDGED  {name}: {next(iter(refused.values()))}"
    sentence = f"PASS  {name}: {judged} results right in {_plural(len(report.cases) - len(refused), 'case')}"
    sentence += f", {_plural(len(findings), 'remark')} on quality" if findings else ""
    return sentence + (f"; {_plural(len(refused), 'case')} not judged, see the notes" if refused else "")


def _left_out(report: ReportFacts, left_out: dict[str, str], judged: int, refused: int) -> str:
    """Names the cases that did not run, and why; then the outcome of the others."""
    names = list(left_out)
    shown = ", ".join(names[:SHOWN_NAMES]) + (f" and {len(names) - SHOWN_NAMES} more" if names[SHOWN_NAMES:] else "")
    why = next(iter(left_out.values())).partition(": ")[2]
    did = "did not finish" if report.partial else "did not run"
    sentence = f"{len(names)} of {_plural(len(report.cases), 'case')} {did} ({shown}): {why}"
    ran = len(report.cases) - len(names) - refused
    return sentence + (f"; {judged} results right in {_plural(ran, 'case')}" if ran else "")


def _counts(report: ReportFacts) -> str:
    where = f"{', '.join(report.dtypes)} on {report.device}, seed {report.seed}"
    runs = report.environment.get("runs", {})
    spent = ", ".join(_plural(runs.get(name, 0), f"{name} run") for name in ("candidate", "golden"))
    text = f"{where}; {report.seconds:.2f} s, {spent}"
    return _wrapped(text + (f"; partial: {report.partial}" if report.partial else ""), hang=2)


def _findings(report: ReportFacts, every: bool, rest: str) -> str:
    findings = ranked(report)
    lines = ["Findings"]
    for finding in findings if every else findings[:SHOWN_FINDINGS]:
        lines.append(_wrapped(f"  {finding.rung:<11} {finding.probe}: {finding.text} [{finding.case}]", hang=14))
    hidden = len(findings) - SHOWN_FINDINGS
    if hidden > 0 and not every:
        lines.append(f"  ... and {hidden} more; {rest}")
    return "\n".join(lines)


def _worst_rows(report: ReportFacts) -> list[Row]:
    """Rows that are not ok, then for each tensor the plain run closest to its bound."""
    bad = [r for r in report.rows if r.state in ("bad", "quality")]
    closest: dict[str, Row] = {}
    for row in report.rows:
        if row.run == "values" and row.state not in ("bad", "quality"):
            kept = closest.get(row.tensor)
            if kept is None or (row.max_over_bound or 0) > (kept.max_over_bound or 0):
                closest[row.tensor] = row
    return (bad + list(closest.values()))[:SHOWN_ROWS]


def _table(report: ReportFacts, rows: list[Row]) -> str:
    """The table of the rows, at most 80 characters wide. With several cases it has a column for the case."""
    words = ["tensor", "case", "run"] if len(report.cases) > 1 else ["tensor", "run"]
    head = (*words, "error", "/bound", "/noise", "ulp", "state")
    cells = [
        (
            *(str(getattr(r, word)) for word in words), number(r.max_error), number(r.max_over_bound),
            number(r.rms_over_noise), number(r.ulp_max), r.state,
        )
        for r in rows
    ]  # fmt: skip
    widths = [max(len(c[i]) for c in [head, *cells]) for i in range(len(head))]
    room = WIDTH - 2 - sum(widths[len(words) :]) - 2 * (len(head) - 1)
    widths = [*_share(widths[: len(words)], room), *widths[len(words) :]]
    lines = [_line(row, widths, len(words)) for row in (head, *cells)]
    total = len(report.rows)
    if total > len(rows):
        lines.append(f"  {len(rows)} of {total} rows: the failing ones, and of the others the closest to their bounds")
    return "\n".join(lines)


def _line(cells: tuple[str, ...], widths: list[int], words: int) -> str:
    left = [_clip(c, w).ljust(w) for c, w in zip(cells[:words], widths[:words], strict=True)]
    right = [c.rjust(w) for c, w in zip(cells[words:-1], widths[words:-1], strict=True)]
    return ("  " + "  ".join([*left, *right, cells[-1]])).rstrip()


def _share(wanted: list[int], room: int) -> list[int]:
    """Widths of the text columns: as wide as their text, the widest cut first."""
    widths = list(wanted)
    while sum(widths) > room and max(widths) > 6:
        widths[widths.index(max(widths))] -= 1
    return widths


def _notes(report: ReportFacts, every: bool, rest: str) -> str:
    """Notes that a user can act on, then the number of the others.

    Notes that differ only in tensor, numbers or case appear once, with the other tensors and the number of cases.
    """
    asking = demanding(report.notes)
    grouped: dict[tuple[str, str], list[Note]] = {}
    for note in [*asking, *(n for n in report.notes if n not in asking)] if every else asking:
        likeness = re.sub(r"\d[\d.e+-]*", "#", note.text.replace(note.tensor, "@"))
        grouped.setdefault((note.id, likeness), []).append(note)
    lines = ["Notes"]
    for notes in list(grouped.values()) if every else list(grouped.values())[:SHOWN_NOTES]:
        first = notes[0]
        others = list(dict.fromkeys(n.tensor for n in notes if n.tensor != first.tensor))
        again = sum(n.tensor == first.tensor for n in notes) - 1
        text = f"  {first.id}: {first.text} [{first.case}]" + (f" (and {again} more)" if again else "")
        lines.append(_wrapped(text + (f"; likewise {', '.join(others)}" if others else ""), hang=4))
    hidden = 0 if every else len(grouped) - SHOWN_NOTES
    if hidden > 0:
        lines.append(f"  ... and {hidden} more kinds; {rest}")
    if not every and len(asking) < len(report.notes):
        kinds = ", ".join(sorted({n.id for n in report.notes} - {n.id for n in asking}))
        folded = len(report.notes) - len(asking)
        kind = "not a fault" if folded == 1 else "not faults"
        text = f"  {_plural(folded, 'observation')}, {kind} ({kinds}); {rest}"
        lines.append(_wrapped(text, hang=4))
    return "\n".join(lines)


def _cost(report: ReportFacts) -> str:
    ran = [f"{p.name} {p.seconds:.2f} s" for p in report.probes if p.ran and p.seconds >= 0.005]
    quick = [p.name for p in report.probes if p.ran and p.seconds < 0.005]
    reasons: dict[str, list[str]] = {}
    for probe in report.probes:
        if not probe.ran:
            reasons.setdefault(probe.reason, []).append(probe.name)
    skipped = [f"{', '.join(names)} ({reason})" for reason, names in reasons.items()]
    lines = [_wrapped("Probes: " + ", ".join(ran + quick), hang=2)] if ran or quick else []
    if skipped:
        lines.append(_wrapped("Not run: " + "; ".join(skipped), hang=2))
    return "\n".join(lines)


def _wrapped(text: str, hang: int) -> str:
    return "\n".join(
        textwrap.wrap(text, WIDTH, subsequent_indent=" " * hang, break_on_hyphens=False, drop_whitespace=True)
    )


def _clip(text: str, width: int) -> str:
    return text if len(text) <= width else text[: max(width - 1, 1)] + "…"


def _plural(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
