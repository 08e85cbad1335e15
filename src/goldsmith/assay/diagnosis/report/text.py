"""A diagnosis as text for a terminal: a headline, evidence, stage table, place, other causes, the case."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from ...bounds.bounded import SLACK
from ...report.results import PASS, REFERENCE_FAULT, UNJUDGED, ErrorMap
from ...report.text import headline as report_headline
from ...support.printable import visible
from ..causes.rank import displayed_causes
from ..facts.evidence import CULPRIT, StageState
from ..trace.faulty_line import MEASURED
from . import replay_command
from .result import FAILED, NOT_RUN, DiagnosisFacts

if TYPE_CHECKING:
    from ..source.patch import Patch
    from ..trace.faulty_line import FaultyLine

WIDTH = 80
FACTS, LIKELY = "Facts", "Likely, from similar known faults (share of such answers that were right)"
SHOWN_CAUSES, SHOWN_SENTENCES = 5, 6
SHOWN_CASES = 12
SHOWN_REMAINING = 3  # findings beside a patch
ROWS, COLUMNS = 8, 64  # of the map
SMALLEST = "This command examines only the smallest case, so it may rank the causes in another order."

FLOAT32 = {
    "passes": "The same case with float32 inputs passes: only 16-bit inputs show the fault.",
    "raises": "The kernel raises for float32 inputs.",
    "fails": "The same case with float32 inputs fails, too: 16-bit rounding is not the reason.",
}
WITHIN = ";\n a culprit below 1 was found by comparison with honest implementations, or has no number)"


def render(diagnosis: DiagnosisFacts, command: str = "") -> str:
    """The whole diagnosis as text; the report itself is printed by `report`. command: replays the bundle."""
    parts = [_wrapped(headline(diagnosis), 6)]
    if diagnosis.causes:
        best = diagnosis.causes[0]
        lines = [f"  - {sentence}" for sentence in best.evidence[:SHOWN_SENTENCES]]
        lines += [f"  Try: {best.mend}"] if best.mend and diagnosis.patch is None and not best.likely else []
        parts.append("\n".join([FACTS if best.likely else "Why", *(_wrapped(line, 4) for line in lines)]))
    if any(s.state != "not judged" for s in diagnosis.stages):
        parts.append(_table(diagnosis.stages, diagnosis.faults_of_other_runs()))
    cases = _cases(diagnosis)
    if cases:
        parts.append(cases)
    where = [_wrapped(f"Where  {diagnosis.location.text}", 7)] if diagnosis.location and diagnosis.location.text else []
    where += [_drawn(diagnosis.map)] if diagnosis.map is not None and max(diagnosis.map.shape) > 1 else []
    if where:
        parts.append("\n".join(where))
    if diagnosis.float32:
        parts.append(_wrapped(f"float32  {FLOAT32[diagnosis.float32]}", 9))
    if diagnosis.line is not None:
        parts.append(_line(diagnosis.line))
    parts += [_wrapped(sentence, 2) for sentence in (*diagnosis.traced, *diagnosis.undecided)]
    if diagnosis.patch is not None:
        parts.append(_patch(diagnosis.patch))
    causes = displayed_causes(diagnosis.causes)[:SHOWN_CAUSES]
    others = [c for c in causes[1:] if not c.likely]
    guesses = [c for c in causes if c.likely and c.score and diagnosis.patch is None]
    if others:
        lines = [_wrapped(f"  {c.score:.2f}  {c.id}: {(c.evidence or [c.text])[0]}", 8) for c in others]
        parts.append("Other causes\n" + "\n".join(lines))
    if guesses:
        parts.append("\n".join([LIKELY, *(_wrapped(f"  {c.guess}", 8) for c in guesses)]))
    if diagnosis.case:
        parts.append(_wrapped(_case(diagnosis), 6))
    if diagnosis.bundle is not None:
        command = command or replay_command.command_line(diagnosis)
        smaller = diagnosis.case and diagnosis.case["name"] != diagnosis.examined["name"]
        lines = [f"Bundle  {diagnosis.bundle}", f"        {command}"]
        parts.append("\n".join([*lines, *([_wrapped(f"        {SMALLEST}", 8)] if smaller else [])]))
    tail = f"{diagnosis.seconds:.2f} s" + (f"; partial: {diagnosis.partial}" if diagnosis.partial else "")
    return visible("\n\n".join([*parts, tail]) + "\n")


def headline(diagnosis: DiagnosisFacts) -> str:
    """The verdict in one sentence."""
    name = diagnosis.report.target or "the target"
    if diagnosis.partial and (diagnosis.verdict == PASS or diagnosis.verdict == UNJUDGED and diagnosis.report.partial):
        return f"NOT FINISHED  {name}: {diagnosis.partial} before all was tried; nothing wrong was found until then"
    if diagnosis.verdict == PASS:
        return f"PASS  {name}: nothing wrong was found"
    if diagnosis.verdict == UNJUDGED:
        return report_headline(diagnosis.report)
    if diagnosis.verdict == REFERENCE_FAULT:
        text = (
            diagnosis.causes[0].evidence[0]
            if diagnosis.causes and diagnosis.causes[0].evidence
            else "the golden is at fault"
        )
        return f"REFERENCE FAULT  {name} is not accused: {text}"
    if diagnosis.patch is not None and diagnosis.first_wrong_stage:
        return f"FAIL  {diagnosis.first_wrong_stage} is wrong: {diagnosis.patch.headline}"
    if not diagnosis.causes:
        return f"FAIL  {name}: {diagnosis.first_wrong_stage or 'a result'} is wrong"
    best = diagnosis.causes[0]
    if best.likely:
        return f"FAIL  {best.headline}"
    return f"FAIL  {best.headline} ({best.id}, score {best.score:.2f})"


def _patch(patch: Patch) -> str:
    """The edit that makes the candidate pass, and how much of it is shown."""
    lines = [_wrapped(f"Patch  {patch.sentence}", 7), textwrap.indent(patch.diff, "  ")]
    if patch.equals:
        lines.append(_wrapped(f"  {patch.equals_sentence}", 2))
    if patch.remaining:
        lines += [_wrapped(f"  - {text}", 4) for text in patch.remaining[:SHOWN_REMAINING]]
    return "\n".join(lines)


def _line(line: FaultyLine) -> str:
    """The line of the source that goes wrong first, and what shows it."""
    lines = [_wrapped(f"Line  {line.place}, in {line.at.function}: {line.expression}", 6)]
    return "\n".join([*lines, *(_wrapped(f"  - {sentence}", 4) for sentence in (*line.sentences, MEASURED))])


def _table(stages: list[StageState], elsewhere: Mapping[str, str]) -> str:
    width = max(5, *(len(s.name) for s in stages))
    lines = [f"{'stage':<{width}}  {'propagated':>10}  {'isolated':>10}  state", "-" * min(WIDTH, width + 36)]
    for s in stages:
        state = f"{s.state}, but wrong in {elsewhere[s.name]}" if s.name in elsewhere else s.state
        lines.append(f"{s.name:<{width}}  {_number(s.propagated):>10}  {_number(s.isolated):>10}  {state}")
    within = any(s.state == CULPRIT and max(s.propagated or 0, s.isolated or 0) <= 1 for s in stages)
    return "\n".join(lines) + "\n(largest error as a multiple of the proven bound" + (WITHIN if within else ")")


def _cases(diagnosis: DiagnosisFacts) -> str:
    """A table of the target's cases: which passed, which failed, and how many the diagnosis did not need."""
    outcomes = diagnosis.case_outcomes()
    if len(outcomes) < 2:
        return ""
    counts = Counter(outcomes.values())
    shown = [name for name, outcome in outcomes.items() if outcome != NOT_RUN][:SHOWN_CASES]
    width = min(WIDTH - 10, max([4, *map(len, shown)]))
    lines = [f"{'case':<{width}}  result", "-" * (width + 9)]
    lines += [f"{name if len(name) <= width else name[: width - 1] + '…':<{width}}  {outcomes[name]}" for name in shown]
    hidden = sum(counts.values()) - counts[NOT_RUN] - len(shown)
    if hidden:
        lines.append(f"... and {hidden} more that ran")
    if counts[NOT_RUN]:
        because = ", because one failing case is enough to diagnose" if FAILED in counts else ""
        text = f"({_plural(counts[NOT_RUN], 'case')} not run{because}; verify or assay.check runs all)"
        lines.append(_wrapped(text, 1))
    return "\n".join(lines)


def _plural(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"


def _drawn(m: ErrorMap) -> str:
    """The map in characters: `#` wrong, `.` right; each stands for a block and shows its worst element."""
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


def _case(diagnosis: DiagnosisFacts) -> str:
    case = diagnosis.case
    threads = f"{case['threads']} thread{'s' * (case['threads'] != 1)}"
    text = f"Case  {case['name']}, {case['dtype']} on {case['device']}, seed {case['seed']}, {threads}"
    values = [step for step in case.get("steps", ()) if " -> " not in step]
    text += f"; {', '.join(values)}" if values else ""
    return text + (
        f" (smallest; found in {diagnosis.examined['name']})" if case["name"] != diagnosis.examined["name"] else ""
    )


def _wrapped(text: str, hang: int) -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=" " * hang, break_long_words=False, break_on_hyphens=False)
