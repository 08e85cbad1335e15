"""A diagnosis for a terminal: one sentence first, then evidence, stage table, where, other causes, the case."""

from __future__ import annotations

import textwrap
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..bounds.bounded import SLACK
from ..report.results import PASS, REFERENCE_FAULT, UNJUDGED, ErrorMap
from ..report.text import headline as report_headline
from ..support.printable import visible
from . import again
from .evidence import CULPRIT, StageState
from .rank import shown

if TYPE_CHECKING:
    from .result import DiagnosisFacts

WIDTH = 80
SHOWN_CAUSES, SHOWN_SENTENCES = 5, 6
ROWS, COLUMNS = 8, 64  # of the map
SMALLEST = "It looks at the smallest case alone, which shows less: causes may stand in another order there."

WITHIN = ";\n a culprit below 1 is told by the noise of honest implementations, or by what has no number)"


def render(found: DiagnosisFacts, command: str = "") -> str:
    """The whole diagnosis as text; the report itself is printed by `report`. command: what replays the bundle."""
    parts = [_wrapped(headline(found), 6)]
    if found.causes:
        best = found.causes[0]
        lines = [f"  - {sentence}" for sentence in best.evidence[:SHOWN_SENTENCES]]
        lines += [f"  Try: {best.mend}"] if best.mend else []
        parts.append("Why\n" + "\n".join(_wrapped(line, 4) for line in lines))
    if any(s.state != "not judged" for s in found.stages):
        parts.append(_table(found.stages))
    where = [_wrapped(f"Where  {found.location.text}", 7)] if found.location and found.location.text else []
    where += [_drawn(found.map)] if found.map is not None and max(found.map.shape) > 1 else []
    if where:
        parts.append("\n".join(where))
    parts += [_wrapped(sentence, 2) for sentence in (*found.traced, *found.undecided)]
    others = shown(found.causes)[1:SHOWN_CAUSES]
    if others:
        lines = [_wrapped(f"  {c.score:.2f}  {c.id}: {(c.evidence or [c.text])[0]}", 8) for c in others]
        parts.append("Other causes\n" + "\n".join(lines))
    if found.case:
        parts.append(_wrapped(_case(found), 6))
    if found.bundle is not None:
        command = command or again.line(found)
        parts.append(f"Bundle  {found.bundle}\n        {command}")
        if found.case and found.case["name"] != found.examined["name"]:
            parts.append(_wrapped(SMALLEST, 2))
    tail = f"{found.seconds:.2f} s" + (f"; partial: {found.partial}" if found.partial else "")
    return visible("\n\n".join([*parts, tail]) + "\n")


def headline(found: DiagnosisFacts) -> str:
    """The verdict in one sentence."""
    name = found.report.target or "the target"
    if found.partial and (found.verdict == PASS or found.verdict == UNJUDGED and found.report.partial):
        return f"NOT FINISHED  {name}: {found.partial} before all was tried; nothing wrong was found until then"
    if found.verdict == PASS:
        return f"PASS  {name}: nothing wrong was found"
    if found.verdict == UNJUDGED:
        return report_headline(found.report)
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
    within = any(s.state == CULPRIT and max(s.propagated or 0, s.isolated or 0) <= 1 for s in stages)
    return "\n".join(lines) + "\n(largest error as a multiple of the proven bound" + (WITHIN if within else ")")


def _drawn(m: ErrorMap) -> str:
    """The map in characters: `#` wrong, `.` right; each stands for a block, whose worst element counts."""
    rows = _folded([_folded(row, COLUMNS, max) for row in m.error_over_limit], ROWS, _worst)
    lines = ["       " + "".join("#" if not v <= SLACK else "." for v in row) for row in rows]
    shape = f"{m.shape[0]} x {m.shape[1]}"
    return "\n".join([*lines, f"       (# wrong, . right; {shape} elements, rows are all axes but the last)"])


def _folded(values: list[Any], most: int, worst: Callable[[list[Any]], Any]) -> list[Any]:
    size = -(-len(values) // most)
    return [worst(values[i : i + size]) for i in range(0, len(values), size)]


def _worst(rows: list[list[float]]) -> list[float]:
    return [max(column) for column in zip(*rows, strict=True)]


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3g}"


def _case(found: DiagnosisFacts) -> str:
    case = found.case
    text = f"Case  {case['name']}, {case['dtype']} on {case['device']}, seed {case['seed']}, {case['threads']} threads"
    values = [step for step in case.get("steps", ()) if " -> " not in step]
    text += f"; {', '.join(values)}" if values else ""
    return text + (f" (smallest; found in {found.examined['name']})" if case["name"] != found.examined["name"] else "")


def _wrapped(text: str, hang: int) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False)
