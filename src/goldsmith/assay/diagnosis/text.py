"""A diagnosis for a terminal: one sentence first, then evidence, stage table, where, other causes, the case."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from ..results import PASS, REFERENCE_FAULT
from .evidence import StageState

if TYPE_CHECKING:
    from .diagnosis import Diagnosis

WIDTH = 80
SHOWN_CAUSES, SHOWN_SENTENCES = 5, 6


def render(found: Diagnosis) -> str:
    """The whole diagnosis as text; the report itself is printed by `report`."""
    parts = [_wrapped(headline(found), 6)]
    if found.causes:
        best = found.causes[0]
        lines = [f"  - {sentence}" for sentence in best.evidence[:SHOWN_SENTENCES]]
        lines += [f"  Try: {best.mend}"] if best.mend else []
        parts.append("Why\n" + "\n".join(_wrapped(line, 4) for line in lines))
    if any(s.state != "not judged" for s in found.stages):
        parts.append(_table(found.stages))
    if found.location is not None and found.location.text:
        parts.append(_wrapped(f"Where  {found.location.text}", 7))
    if found.suspects:
        names = ", ".join(found.suspects[:6])
        parts.append(_wrapped(f"Stages that the candidate does not name, and that could be meant: {names}", 2))
    others = found.causes[1:SHOWN_CAUSES]
    if others:
        lines = [_wrapped(f"  {c.score:.2f}  {c.id}: {(c.evidence or [c.text])[0]}", 8) for c in others]
        parts.append("Other causes\n" + "\n".join(lines))
    if found.case:
        parts.append(_wrapped(_case(found), 6))
    tail = f"{found.seconds:.2f} s" + (f"; partial: {found.partial}" if found.partial else "")
    return "\n\n".join([*parts, tail]) + "\n"


def headline(found: Diagnosis) -> str:
    """The verdict in one sentence."""
    name = found.report.target or "the target"
    if found.verdict == PASS:
        return f"PASS  {name}: nothing wrong was found"
    if found.verdict == REFERENCE_FAULT:
        text = found.causes[0].evidence[0] if found.causes and found.causes[0].evidence else "the golden is at fault"
        return f"REFERENCE FAULT  {name} is not accused: {text}"
    if not found.causes:
        return f"FAIL  {name}: {found.first_wrong_stage or 'a result'} is wrong"
    best = found.causes[0]
    weak = "weak, " if best.weak else ""
    return f"FAIL  {best.text} ({best.id}, {weak}score {best.score:.2f})"


def _table(stages: list[StageState]) -> str:
    width = max(5, *(len(s.name) for s in stages))
    lines = [f"{'stage':<{width}}  {'propagated':>10}  {'isolated':>10}  state", "-" * min(WIDTH, width + 36)]
    for s in stages:
        lines.append(f"{s.name:<{width}}  {_number(s.propagated):>10}  {_number(s.isolated):>10}  {s.state}")
    return "\n".join(lines) + "\n(largest error as a multiple of the proven bound)"


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _case(found: Diagnosis) -> str:
    case = found.case
    return f"Case  {case['name']}, {case['dtype']} on {case['device']}, seed {case['seed']}, {case['threads']} threads"


def _wrapped(text: str, hang: int) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False)
