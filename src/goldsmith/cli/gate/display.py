"""Output of `goldsmith gate`: progress, a table of candidates that were not accepted, times, a closing sentence."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from ...assay.gate.verdict import (
    ACCEPTED,
    CHEATING,
    CRASHED,
    OVER_MEMORY,
    REFUSED,
    STATUSES,
    TIMED_OUT,
    WRONG,
    Verdict,
)
from ..terminal import count, duration, visible

COLOURS = {
    ACCEPTED: "green", WRONG: "bold red", CHEATING: "bold magenta", CRASHED: "red", TIMED_OUT: "yellow",
    OVER_MEMORY: "yellow", REFUSED: "dim",
}  # fmt: skip
SHOWN = 40  # candidates that were not accepted, in the table
TIMES_SHOWN = 40


class GateProgress:
    """A bar on a terminal; in a log, one line for each candidate that was not accepted, and one every few seconds."""

    def __init__(self, console: Console, total: int) -> None:
        self.console, self.total = console, total
        self.statuses = Counter[str]()
        narrow = console.width < 80
        self.progress = Progress(
            TextColumn("{task.completed}/{task.total}"),
            BarColumn(bar_width=12 if narrow else 28),
            TextColumn("{task.fields[counts]}", style="dim"),
            *([] if narrow else [TimeElapsedColumn()]),
            TimeRemainingColumn(compact=True),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task("", total=total, counts="")

    def __enter__(self) -> GateProgress:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def judged(self, verdict: Verdict) -> None:
        """A verdict is there, though it may wait for earlier ones."""
        self.statuses[verdict.status] += 1
        self.progress.update(self.task, advance=1, counts=counts(self.statuses, short=self.console.width < 80))

    def finished(self, verdict: Verdict) -> None:
        if not self.console.is_terminal and not verdict.ok:
            self.console.print(line(verdict), soft_wrap=True, highlight=False)


def line(verdict: Verdict) -> str:
    reason = f" ({verdict.reason})" if verdict.reason else ""
    return f"[{COLOURS[verdict.status]}]{verdict.status}[/]{reason}  {_name(verdict.candidate)}"


def _name(text: str) -> str:
    """A name without line breaks: on a line of its own, a part of it could look like a verdict."""
    return escape(visible(text).replace("\n", "\\n").replace("\t", "\\t"))


def _text(out: Console, text: str, at: int) -> str:
    """A sentence that begins at column `at` and whose further lines are indented, for the same reason."""
    first, *further = visible(text).split("\n")
    lines = [textwrap.fill(first, out.width, initial_indent=" " * at, subsequent_indent=" " * 4)[at:]]
    lines += [textwrap.fill(line, out.width, initial_indent=" " * 4, subsequent_indent=" " * 4) for line in further]
    return escape("\n".join(lines))


def counts(statuses: Counter[str], *, short: bool = False) -> str:
    named = [(s, statuses[s]) for s in STATUSES if statuses[s]]
    if short:
        accepted = statuses[ACCEPTED]
        return f"{accepted} accepted, {sum(statuses.values()) - accepted} not"
    return ", ".join(f"{n} {status}" for status, n in named)


def show(out: Console, verdicts: Sequence[Verdict], *, every: bool) -> None:
    """The table of candidates that were not accepted, with the evidence below each, and the times of the others."""
    others = [v for v in verdicts if not v.ok]
    shown = others if every else others[:SHOWN]
    for verdict in shown:
        place = f"  [dim]{_name(verdict.case)}[/]" if verdict.case else ""
        out.print(f"{line(verdict)}{place}", highlight=False)
        for sentence in verdict.evidence if every else verdict.evidence[:1]:
            out.print(f"  {_text(out, sentence, 2)}", highlight=False)
        if verdict.diagnosis:
            out.print(f"  [bold]diagnosis[/]  {_text(out, verdict.diagnosis, 13)}", highlight=False)
    if len(shown) < len(others):
        out.print(f"[dim]and {count(len(others) - len(shown), 'further candidate')}: --verbose shows them[/]")
    timed = [v for v in verdicts if v.timing is not None]
    if timed:
        out.print(times(timed, narrow=out.width < 80))
        for verdict in timed:
            for doubt in (verdict.timing or {}).get("doubts", ()):
                name = f"  {_name(verdict.candidate)}: "
                out.print(f"{name}{_text(out, doubt, min(len(name), out.width // 2))}", highlight=False)
    if shown or timed:
        out.print()


def times(verdicts: Sequence[Verdict], *, narrow: bool = False) -> Table:
    """The fastest first."""
    table = Table(box=None, padding=(0, 2, 0, 0), show_edge=False, header_style="dim")
    table.add_column("candidate", overflow="ellipsis", no_wrap=True)
    for name in ("time", "speed-up") if narrow else ("time", "p10 to p90", "golden in torch", "speed-up", "floor"):
        table.add_column(name, justify="right", no_wrap=True)
    rows = sorted(((v.timing or {}, v) for v in verdicts), key=lambda row: row[0].get("time", 0.0))
    for timing, verdict in rows[:TIMES_SHOWN]:
        speedup = timing.get("speedup")
        cells = [microseconds(timing["time"]), f"{speedup:.2f}x" if speedup else "-"]
        if not narrow:
            low, high = timing["p10"], timing["p90"]
            spread = "-" if low is None else f"{microseconds(low)} to {microseconds(high)}"
            reference = timing.get("reference")
            own = microseconds(reference) if reference else "-"
            cells = [cells[0], spread, own, cells[1], microseconds(timing["floor"])]
        table.add_row(_name(verdict.candidate), *cells)
    return table


def microseconds(value: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if value >= size:
            return f"{value / size:.3g} {unit}"
    return f"{value:.3g} us"


def conclusion(verdicts: Sequence[Verdict], total: int, conditions: Sequence[str]) -> str:
    statuses = Counter(v.status for v in verdicts)
    colour = "green" if statuses[ACCEPTED] == total else "red"
    first = f"[bold {colour}]{statuses[ACCEPTED]} of {count(total, 'candidate')} accepted[/]"
    others = {s: n for s, n in statuses.items() if s != ACCEPTED}
    rest = counts(Counter(others))
    return f"{first}{': ' + rest if rest else ''} [dim]({escape('; '.join(conditions))})[/]"


__all__ = ["GateProgress", "conclusion", "counts", "duration", "line", "show", "times"]
