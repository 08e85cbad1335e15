"""Output of `goldsmith verify`: progress, the matrix of verdicts, failing cases, and a closing sentence."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence

from rich.console import Console
from rich.markup import escape
from rich.padding import Padding
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from ...assay.report.html.view import NOT_JUDGED, Entry, case_states, judged_cases, worst_ratio
from ...assay.report.ranking import demanding, number, ranked
from ...assay.report.results import QUALITY, Finding
from ..terminal import WholeTable, count, duration
from .checks import INTERRUPTED, PROCESS, Check
from .outcome import VerifyOutcome

WORDS = {"pass": "[green]pass[/]", "fail": "[bold red]FAIL[/]", "reference_fault": "[bold red]REFERENCE[/]"}
WORDS |= {"partial": "[yellow]not finished[/]", "absent": "[dim]cannot run here[/]"}
MISDECLARED, UNJUDGED = "[yellow]declared wrongly[/]", "[yellow]not judged[/]"
CASES_SHOWN = 3
QUIET_S = 30.0  # seconds after which a log gets a line although no check has finished


class _Left(ProgressColumn):
    """Time left, estimated from the cost of the finished cases rather than from their number."""

    def render(self, task: Task) -> Text:
        if not task.completed or task.elapsed is None or task.total is None:
            return Text("")
        left = task.elapsed * (task.total - task.completed) / task.completed
        return Text(f"about {duration(left)} left" if left >= 1 else "")


class VerifyProgress:
    """A progress bar on a terminal; in a log, a line per finished check, and one where that takes long."""

    def __init__(self, console: Console, checks: Sequence[Check]) -> None:
        self.console, self.checks = console, checks
        self.cases = sum(len(c.jobs) for c in checks)
        self.done = 0
        self.began = self.printed = time.monotonic()
        self.narrow = console.width < 80
        self.progress = Progress(
            TextColumn("{task.fields[now]}", style="dim", table_column=Column(no_wrap=True)),
            BarColumn(bar_width=8 if self.narrow else 28),
            TextColumn("{task.fields[done]}", table_column=Column(no_wrap=True)),
            *(() if self.narrow else (TimeElapsedColumn(),)),
            _Left(table_column=Column(no_wrap=True)),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self.task = self.progress.add_task(
            "", total=sum(job.cost for c in checks for job in c.jobs), now="starting workers", done=""
        )

    def __enter__(self) -> VerifyProgress:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    def finished(self, check: Check, cost: float, now: str) -> None:
        self.done += 1
        width = max(8, self.console.width - 47) if self.narrow else max(24, min(44, self.console.width - 80))
        shown = now if len(now) <= width else f"{now[: width - 1]}…"
        self.progress.update(self.task, advance=cost, now=shown.ljust(width), done=f"{self.done}/{self.cases} cases")
        if self.console.is_terminal:
            return
        if check.complete:
            self._print(_line(check))
        elif time.monotonic() - self.printed >= QUIET_S:
            taken = duration(time.monotonic() - self.began)
            self._print(f"[dim]{self.done} of {count(self.cases, 'case')} after {taken}: {escape(now)}[/]")

    def _print(self, line: str) -> None:
        self.printed = time.monotonic()
        self.console.print(line, markup=True)


def _line(check: Check) -> str:
    entry = check.entry()
    word = WORDS[entry.verdict] if entry.report is not None else _absence(entry)
    seconds = sum(r.seconds for r in check.reports)
    cases = judged_cases(entry.report) if entry.report is not None else len(check.jobs)
    return f"{word}  {escape(check.name)}  [dim]{count(cases, 'case')}, {duration(seconds)}[/]"


def matrix(entries: Sequence[Entry], modes: dict[str, str]) -> WholeTable:
    table = WholeTable(labels=2)
    table.add_column("operator" if any(e.backend for e in entries) else "target", no_wrap=True)
    table.add_column("backend", no_wrap=True)
    table.add_column("verdict", no_wrap=True)
    table.add_column("cases", justify="right", no_wrap=True)
    table.add_column("error / bound", justify="right", no_wrap=True)
    table.add_column("time", justify="right", no_wrap=True)
    last = ""
    for entry in entries:
        operator = "" if entry.operator == last else f"[bold]{escape(entry.operator)}[/]"
        last = entry.operator
        backend = escape(entry.backend) + (
            f"{' ' if entry.backend else ''}[dim]({modes[entry.name]})[/]" if modes.get(entry.name) else ""
        )
        if entry.report is None:
            table.add_row(operator, backend, _absence(entry), "", "", "")
            continue
        right = sum(s in ("ok", "quality") for s in case_states(entry.report).values())
        table.add_row(
            operator,
            backend,
            WORDS[entry.verdict],
            f"{right}/{judged_cases(entry.report)}",
            number(worst_ratio(entry.report)),
            duration(entry.report.seconds),
        )
    return table


def _absence(entry: Entry) -> str:
    """The word shown when there is no verdict."""
    if entry.misdeclared:
        return MISDECLARED
    if INTERRUPTED in entry.reason:
        return WORDS["partial"]
    return WORDS["absent"] if entry.backend else UNJUDGED


def left_out(checks: Sequence[Check]) -> list[str]:
    """One sentence that counts, over all checks, the cases that a run of this size leaves out."""
    numbers: dict[str, int] = {}
    for check in checks:
        for cases, text in check.left_out:
            numbers[text] = numbers.get(text, 0) + cases
    parts = [f"{cases:,} {text.replace('cases', 'case', 1) if cases == 1 else text}" for text, cases in numbers.items()]
    return [f"Not run: {'; '.join(parts)}."] if parts else []


def problems(console: Console, outcome: VerifyOutcome) -> None:
    """Print mistakes in declarations, and why the run ended early."""
    for text in dict.fromkeys([*(c.problem for c in outcome.checks if c.problem), outcome.broken]):
        if text:
            console.print(f"\n[yellow]{escape(text)}[/]")


def remarks(entries: Sequence[Entry]) -> list[str]:
    """The lines below the matrix: what did not run, with each reason once, and quality findings."""
    reasons: dict[str, list[str]] = {}
    poor = 0
    for entry in entries:
        if entry.misdeclared:
            continue  # `problems` prints these
        if entry.report is None:
            reasons.setdefault(entry.reason, []).append(entry.name)
            continue
        poor += any(f.rung == QUALITY for f in entry.report.findings)
        skipped: dict[str, int] = {}
        for note in entry.report.notes:
            if note.id in NOT_JUDGED:
                skipped[note.text] = skipped.get(note.text, 0) + 1
        for reason, times in skipped.items():
            reasons.setdefault(reason, []).append(f"{entry.name}, {count(times, 'case')}")
    lines = [f"Not run: {reason} ({'; '.join(names)})." for reason, names in reasons.items()]
    if poor:
        lines.append(
            f"Within bounds, but less accurate than an honest implementation: {count(poor, 'check')} (see the report)"
        )
    return lines


def notes(console: Console, entries: Sequence[Entry], *, every: bool) -> None:
    """Print how many notes there are, of which kinds, or all of them, those that a user can act on first."""
    noted = [(e, [n for n in e.report.notes if n.id not in NOT_JUDGED]) for e in entries if e.report is not None]
    total = sum(len(of_entry) for _, of_entry in noted)
    if not total:
        return
    if not every:
        kinds = ", ".join(sorted({n.id.replace("_", " ") for _, of_entry in noted for n in of_entry}))
        console.print(
            f"\n[dim]{count(total, 'note')}, {_no_fault(total)} ({escape(kinds)}): --verbose shows {_them(total)}.[/]"
        )
        return
    for entry, of_entry in noted:
        if of_entry:
            console.print(f"\nNotes on [bold]{escape(entry.name)}[/], {_no_fault(len(of_entry))}")
        asking = demanding(of_entry)
        for note in [*asking, *(n for n in of_entry if n not in asking)]:
            where = f", case {note.case}" if note.case else ""
            body = f"[dim]{escape(note.id.replace('_', ' ') + where)}[/]\n{escape(note.text)}"
            console.print(Padding(body, (0, 0, 0, 2)))


def failures(console: Console, entries: Sequence[Entry], *, every: bool = False) -> None:
    """Print the most important finding of up to three cases of each failing check, and how many more there are.

    every: print all findings instead.
    """
    for entry in entries:
        if not entry.failed or entry.report is None:
            continue
        findings = ranked(entry.report)
        first: dict[str, Finding] = {}
        for finding in findings:
            first.setdefault(finding.case, finding)
        shown = findings if every else list(first.values())[:CASES_SHOWN]
        console.print()
        console.print(f"{WORDS[entry.verdict]}  [bold]{escape(entry.name)}[/]")
        for finding in shown:
            where = f"case {finding.case}, " if finding.case else ""
            body = f"[dim]{escape(where)}probe {finding.probe}, {finding.rung}[/]\n{escape(finding.text)}"
            console.print(Padding(body, (0, 0, 0, 2)))
        cases, more = len(first) - CASES_SHOWN, len(findings) - len(shown)
        if more > 0:
            others = f", {'' if more == cases else 'also '}in {count(cases, 'other case')}" if cases > 0 else ""
            text = f"[dim]and {count(more, 'further finding')}{others}: --verbose shows {_them(more)}[/]"
            console.print(Padding(text, (0, 0, 0, 2)))


def _no_fault(number: int) -> str:
    return "not a fault" if number == 1 else "not faults"


def _them(number: int) -> str:
    return "it" if number == 1 else "them"


def conclusion(outcome: VerifyOutcome) -> str:
    """The last line: how many checks failed, were interrupted, or could not run."""
    entries = outcome.entries
    reported = [e for e in entries if e.report is not None]
    failed = [e for e in reported if e.failed]
    unfinished = [e for e in entries if e.verdict == "partial" or INTERRUPTED in e.reason]
    misdeclared = sum(e.misdeclared for e in entries)
    absent = len(entries) - len(reported) - misdeclared
    cases = sum(judged_cases(e.report) for e in reported if e.report)
    counted = f"{count(len(reported), 'check')}, {count(cases, 'case')}, {duration(outcome.seconds)} in all"
    if absent and not unfinished:
        without = sum(e.report is None and not e.misdeclared and not e.backend for e in entries)
        counted += f"; {count(absent - without, 'check')} cannot run on this machine" if absent > without else ""
        counted += f"; {count(without, 'check')} not judged" if without else ""
    if misdeclared:
        counted += f"; {count(misdeclared, 'target')} declared wrongly"
    if outcome.interrupted:
        counted += "; interrupted"
    elif outcome.broken:
        counted += "; ended early, because no worker process was left"
    if failed:
        return (
            f"[bold red]{len(failed)} of {count(len(reported), 'check')} failed[/]{_deaths(failed)} [dim]({counted})[/]"
        )
    if unfinished or outcome.broken or misdeclared:
        return f"[yellow]No failures among the finished checks[/] [dim]({counted})[/]"
    if not reported:
        backends = ": none of the requested backends can run here" if any(e.backend for e in entries) else ""
        return f"[yellow]Nothing was checked{backends}[/]"
    return f"[bold green]All checks passed[/] [dim]({counted})[/]"


def _deaths(failed: Sequence[Entry]) -> str:
    """The checks whose process ended, and how, in words."""
    deaths = []
    for entry in failed:
        ends = [f for f in entry.report.findings if f.probe == PROCESS] if entry.report else []
        if ends:
            more = f" and {count(len(ends) - 1, 'other case')}" if len(ends) > 1 else ""
            how = (
                re.split(" while |, which ", ends[0].text)[0]
                .removeprefix("the process ")
                .removeprefix("the candidate ")
            )
            deaths.append(f"{entry.name} {how} in case {ends[0].case}{more}")
    return escape(": " + "; ".join(deaths)) if deaths else ""
