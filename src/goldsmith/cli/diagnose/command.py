"""`goldsmith diagnose` and `goldsmith replay`: the candidate runs in a child process, whose death is evidence, too."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from ..say import USAGE, Problem, console, duration, ends_like_ctrl_c, put_json, say, visible
from ..verify.command import INTERRUPTED, writable
from ..verify.pool import Died, Pool, WorkersFailed
from . import keeping, unending

if TYPE_CHECKING:
    from ...assay.diagnosis import Diagnosis

STATUS = {"pass": 0, "fail": 1, "reference_fault": 1, "unjudged": 2}


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line; `do` is "diagnose" or "replay"."""

    do: str
    name: str
    backend: str | None = None
    case: str | None = None
    dtype: str | None = None
    device: str | None = None
    interpret: bool = False
    budget: float | None = 60.0
    seed: int = 0
    out: str | None = None
    bundle: str | None = None
    html: str | None = None
    json: bool = False


def run(request: Request, json_to: str | None = None) -> int:
    """The whole command; returns the exit status."""
    for path in (request.html, json_to if json_to != "-" else None):
        writable(None if path is None else Path(path))
    if request.out is not None:
        keeping.folder(Path(request.out))
    if request.do == "diagnose" and request.bundle is not None:
        for option, given in (("--case", request.case), ("--dtype", request.dtype), ("--seed", request.seed or None)):
            if given is not None:
                raise Problem(
                    f"{option} {given}: a bundle is one case with its inputs; leave out {option} or --replay."
                )
    if request.bundle is not None and not Path(request.bundle).is_dir():
        raise Problem(f"{request.bundle} is no bundle: there is no such folder.")
    err = console(stderr=True)
    out = err if json_to == "-" else console()
    began = time.monotonic()
    with _Watcher(err, request) as watcher:
        reply = _asked(request, watcher)
    if isinstance(reply, Died):
        reply = _died(request, reply, watcher, time.monotonic() - began)
    if "problem" in reply:
        raise Problem(reply["problem"])
    if "broken" in reply:
        raise Problem(f"The assay itself failed: {reply['broken']}")
    lost = list(reply["lost"])
    if json_to is not None and json_to != "-":  # before anything is printed: who reads it may close the pipe
        text = json.dumps(reply["json"]) + "\n"
        lost += keeping.lost(json_to, partial(Path(json_to).write_text, text, encoding="utf-8"))
    out.print(reply["text"].rstrip("\n"), markup=False, soft_wrap=True)
    for path in reply["pages"]:
        out.print(f"Page  {path}", markup=False, soft_wrap=True)
    for said in lost:
        say(said)
    if json_to == "-":
        put_json(reply["json"])
    if reply["interrupted"] and reply["verdict"] in ("pass", "unjudged"):
        return INTERRUPTED
    return STATUS[reply["verdict"]] or (USAGE if lost else 0)


def _asked(request: Request, watcher: _Watcher) -> dict[str, Any] | Died:
    arguments = ("--interpret",) if request.interpret else ()
    try:
        with (
            ends_like_ctrl_c(),
            Pool(1, arguments=arguments, told=watcher.told, passes_on=True, until=watcher.patience.until) as pool,
        ):
            for _, reply in pool.run([asdict(request)]):
                if isinstance(reply, dict) and "ended" in reply:
                    return _ended(request, reply, watcher.last, pool.interrupted)
                if isinstance(reply, dict) and reply.get("interrupted") and not pool.interrupted:
                    return _wrong(request, "the candidate raised KeyboardInterrupt", watcher.last, 0.0)
                return reply
    except WorkersFailed as error:
        raise Problem(f"A worker process {error}") from error
    except KeyboardInterrupt:
        at = f": {watcher.last['case']}, {watcher.last['run']} was running, and did not stop" if watcher.last else ""
        raise Problem(f"Interrupted before anything was known{at}.") from None
    raise Problem("No worker answered.")


def _ended(request: Request, reply: dict[str, Any], last: dict[str, Any], interrupted: bool) -> dict[str, Any]:
    """KeyboardInterrupt or SystemExit that reached the worker: the user's, an import's, or the candidate's."""
    if interrupted:
        raise Problem("Interrupted before anything was known.")
    said = f"raised {reply['ended']}, {reply['where']}"
    if not last:
        return {"problem": f"Importing {request.name} {said}."}
    return _wrong(request, f"the candidate {said}", last, 0.0)


def _died(request: Request, died: Died, watcher: _Watcher, seconds: float) -> dict[str, Any]:
    """The death of the process as a diagnosis: what ended it, in which run, at which line."""
    last = watcher.last
    if last and watcher.stopped:
        return _never_ended(request, {**last, "seconds": watcher.patience.seconds}, died.frame, watcher.found, seconds)
    said = f"the process ended {died.how}" + (f", {died.frame}" if died.frame else "")
    if not last and watcher.stopped:
        where = f", {died.frame}" if died.frame else ""
        seconds = watcher.patience.seconds
        return {
            "problem": f"Importing {request.name or 'the target'} did not end within {seconds:.3g} s{where}. "
            "Where it is only slow, such as one that compiles, give a larger --budget."
        }
    if not last:
        return {
            "problem": f"Importing {request.name or 'the target'} ended the process: {said}. {died.last_line}".strip()
        }
    said += f"; its last line: {died.last_line!r}" if died.last_line else ""
    return _wrong(request, said, last, seconds)


def _wrong(request: Request, said: str, last: dict[str, Any], seconds: float) -> dict[str, Any]:
    from ...assay.diagnosis import Cause, Diagnosis
    from ...assay.diagnosis.rules import CATALOGUE
    from ...assay.report.check_report import Report
    from ...assay.report.results import CERTAIN, FAIL, Finding

    place = f"in run {last['run']!r} of probe {last['probe']}"
    finding = Finding(CERTAIN, "process", "", None, None, None, f"{said} ({place})", last["case"])
    report = Report(request.name, FAIL, findings=[finding], cases=[last["case"]], seconds=seconds)
    known = CATALOGUE["exception"]
    mend = "run that case alone (--case); compute-sanitizer or valgrind then names the access"
    cause = Cause(
        known.id, 1.0, "", [f"{said}", f"{place}, case {last['case']}"], {}, f"{request.name} ends its process", mend
    )
    return _reply(request, Diagnosis(FAIL, report, causes=[cause], seconds=seconds))


def _never_ended(
    request: Request, run: dict[str, Any], where: str, found: list[dict[str, Any]], seconds: float
) -> dict[str, Any]:
    """What is known of a process that had to be ended: the run that it was in, and what it had found before."""
    from ...assay.diagnosis import Diagnosis
    from ...assay.report.check_report import Report
    from ...assay.report.results import UNJUDGED

    report = Report(request.name or "the target", UNJUDGED, cases=[run["case"]], seconds=seconds)
    diagnosis = unending.into(Diagnosis(UNJUDGED, report, seconds=seconds), run, where)
    before = Report.from_json({**report.to_json(), "findings": found}).findings
    report.findings += before
    for finding in before:
        diagnosis.traced.append(f"Found before: {finding.text}.")
    return _reply(request, diagnosis)


def _reply(request: Request, found: Diagnosis) -> dict[str, Any]:
    from ...assay.diagnosis import diagnosis_page
    from ...assay.diagnosis.text import render

    html = request.html
    lost = keeping.lost(html, partial(diagnosis_page.write, found, html)) if html else []
    return {
        "text": render(found),
        "lost": lost,
        "verdict": found.verdict,
        "interrupted": False,
        "pages": [html] if html and not lost else [],
        "json": found.to_json(),
    }


class _Watcher:
    """On a terminal: what runs, how many runs, and how much of the time is over. It also keeps what ran last."""

    def __init__(self, err: Any, request: Request) -> None:
        self.last: dict[str, Any] = {}
        self.outer: list[dict[str, Any]] = []  # runs within which another goes on
        self.found: list[dict[str, Any]] = []  # in the first case in which something was found
        self.patience = unending.Patience(request.budget)
        whole = request.budget if request.do == "diagnose" else None
        self.progress = Progress(
            TextColumn("{task.description}", style="dim", markup=False),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[runs]}"),
            TimeElapsedColumn(),
            TextColumn(f"of at most {duration(whole)}" if whole else ""),
            console=err,
            transient=True,
            disable=not err.is_terminal,
        )
        self.began = time.monotonic()
        self.task = self.progress.add_task("starting".ljust(34), total=whole, runs="")

    def __enter__(self) -> _Watcher:
        self.progress.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.progress.stop()

    @property
    def stopped(self) -> bool:
        """Whether the present run has had its time."""
        until = self.patience.until()
        return until is not None and time.monotonic() >= until

    def told(self, last: dict[str, Any]) -> None:
        if "importing" in last:
            self.patience.imports()
            self._shows(f"importing {last['importing']}")
            return
        if "over" in last:
            self.patience.ended()
            self.last = self.outer.pop() if self.outer else self.last
            return
        if self.patience.began is not None:
            self.outer.append(self.last)
        self.patience.begins(last["case"])
        if last.get("found") and (not self.found or self.found[0]["case"] == last["case"]):
            self.found = last["found"]
        self.last = last
        self._shows(f"{last['case']}, {last['run']}", f"{last['runs']} runs")

    def _shows(self, now: str, runs: str = "") -> None:
        description, completed = visible(now)[:34].ljust(34), time.monotonic() - self.began
        self.progress.update(self.task, description=description, completed=completed, runs=runs)
