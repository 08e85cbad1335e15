"""`goldsmith diagnose` and `goldsmith replay`: the candidate runs in a worker process, whose death is evidence."""

from __future__ import annotations

import signal
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, cast

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Column
from rich.text import Text

from ..output_files import check_files, check_folder, write_json_file, write_or_explain
from ..signals import terminate_like_ctrl_c
from ..terminal import (
    INTERRUPTED,
    INTERRUPTED_EARLY,
    Failure,
    Interruption,
    console,
    duration,
    print_paragraph,
    visible,
    write_json,
)
from ..workers.pool import STEP_LIMIT, Died, Pool, WorkersFailed, overdue_sentence
from . import deadlines

if TYPE_CHECKING:
    from ...assay.diagnosis import Diagnosis
    from ..json_types import JsonObject
    from ..workers.messages import DiagnosisReply, DiagnosisRequest, ProgressMessage, RunMessage

RAISED = "look for what raises it: a candidate may raise whatever is an Exception, and nothing else"
STATUS = {"pass": 0, "fail": 1, "reference_fault": 1, "unjudged": 2}


@dataclass(frozen=True)
class DiagnoseRequest:
    """The command-line options of one run."""

    do: Literal["diagnose", "replay"]
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
    patch: bool = False
    apply: str | None = None
    propose: str | None = None
    limit: float | None = None


def run(request: DiagnoseRequest, json_to: str | None = None) -> int:
    """Run the command and return its exit status."""
    outputs = request.html, request.apply, json_to if json_to != "-" else None
    check_files(*(None if path is None else Path(path) for path in outputs))
    if request.out is not None:
        check_folder(Path(request.out))
    if request.do == "diagnose" and request.bundle is not None:
        for option, value in (("--case", request.case), ("--dtype", request.dtype), ("--seed", request.seed or None)):
            if value is not None:
                raise Failure(
                    f"{option} {value} does not go with --replay: a bundle is one case with its inputs. Leave one out."
                )
    if request.bundle is not None and not Path(request.bundle).is_dir():
        raise Failure(f"{request.bundle} is not a bundle: there is no such folder.")
    err = console(stderr=True)
    out = err if json_to == "-" else console()
    began = time.monotonic()
    with _RunProgress(err, request) as progress:
        reply = _ask_worker(request, progress)
    if isinstance(reply, Died):
        reply = _died(request, reply, progress, time.monotonic() - began)
    if "problem" in reply:
        raise Failure(reply["problem"])
    if "broken" in reply:
        raise Failure(f"The assay itself failed: {reply['broken']}")
    lost = list(reply["lost"])
    try:
        out.print(_coloured(reply["text"].rstrip("\n")), soft_wrap=True)
        for path in reply["pages"]:
            out.print(f"Page  {path}", markup=False, soft_wrap=True)
    finally:  # the reader of stdout may have closed the pipe
        if json_to is not None and json_to != "-":
            lost += write_or_explain(json_to, partial(write_json_file, json_to, reply["json"]))
    for sentence in lost:
        print_paragraph(sentence)
    if json_to == "-":
        write_json(reply["json"])
    if reply["interrupted"] and reply["verdict"] in ("pass", "unjudged"):
        return INTERRUPTED
    return STATUS[reply["verdict"]]


def _coloured(text: str) -> Text:
    """The diagnosis as a terminal shows it: the verdict, the headings and the state of each stage stand out."""
    coloured = Text(text)
    coloured.highlight_regex(r"(?m)^PASS\b|(?<=  )ok$", "green")
    coloured.highlight_regex(r"(?m)^(FAIL|REFERENCE FAULT)\b|(?<=  )culprit$", "bold red")
    coloured.highlight_regex(r"(?m)^  \+(?!\+).*$", "green")
    coloured.highlight_regex(r"(?m)^  -(?![- ]).*$", "red")
    coloured.highlight_regex(r"(?m)^(Why|Where|Patch|Other causes|Case)\b", "bold")
    return coloured


def _ask_worker(request: DiagnoseRequest, progress: _RunProgress) -> DiagnosisReply | Died:
    arguments = ("--interpret",) if request.interpret else ()
    try:
        with (
            terminate_like_ctrl_c(),
            Pool(
                1,
                arguments=arguments,
                on_progress=progress.update,
                forward_ctrl_c=True,
                until=progress.deadline.until,
                step_limit=request.limit or STEP_LIMIT,
            ) as pool,  # fmt: skip
        ):
            for _, reply in pool.run([cast("DiagnosisRequest", asdict(request))]):
                if isinstance(reply, dict) and "ended" in reply:
                    if pool.interrupted:
                        return _interrupted(request, progress)
                    return _ended(request, reply, progress.last)
                if isinstance(reply, dict) and reply.get("interrupted") and not pool.interrupted:
                    how = "the candidate raised KeyboardInterrupt"
                    return _ended_by_candidate(request, how, progress.last, 0.0, advice=RAISED)
                return reply
    except WorkersFailed as error:
        raise Failure(f"A worker process {error}") from error
    except KeyboardInterrupt:
        return _interrupted(request, progress)
    raise Failure("No worker answered.")


def _interrupted(request: DiagnoseRequest, progress: _RunProgress) -> DiagnosisReply:
    """The findings so far after a Ctrl-C that the worker could not answer; raises Interruption if there are none."""
    last, seconds = progress.last, time.monotonic() - progress.began
    place = f": {last['case']}, {last['run']} was running and did not stop" if last and progress.running else ""
    if not progress.findings:  # nothing to show: do not import torch for it
        raise Interruption(f"{INTERRUPTED_EARLY}{place}.")
    from ...assay.diagnosis import Diagnosis
    from ...assay.report.check_report import Report
    from ...assay.report.results import FAIL, QUALITY

    if all(finding["rung"] == QUALITY for finding in progress.findings):
        raise Interruption(f"{INTERRUPTED_EARLY}{place}.")
    report = Report(request.name, FAIL, cases=[last["case"]], seconds=seconds, partial="interrupted")
    report = Report.from_json({**report.to_json(), "findings": progress.findings})
    findings = [f"Found before that: {finding.text}." for finding in report.findings]
    diagnosis = Diagnosis(FAIL, report, partial="interrupted", traced=[f"Interrupted{place}.", *findings])
    return _reply(request, diagnosis)


def _ended(request: DiagnoseRequest, reply: DiagnosisReply, last: RunMessage) -> DiagnosisReply:
    """The diagnosis after KeyboardInterrupt or SystemExit in the worker: from an import or the candidate."""
    how = f"raised {reply['ended']}, {reply['where']}"
    if not last:
        return {"problem": f"Importing {request.name} {how}."}
    return _ended_by_candidate(request, f"the candidate {how}", last, 0.0, advice=RAISED)


def _died(request: DiagnoseRequest, died: Died, progress: _RunProgress, seconds: float) -> DiagnosisReply:
    """The diagnosis if the worker died: how, in which run, at which line."""
    last = progress.last
    if died.overdue:
        return {"problem": overdue_sentence(request.name or "the target", died.overdue)}
    if last and died.ended == "timed_out":
        text = f"run {last['run']!r} of probe {last['probe']} was ended {died.how} (case {last['case']})"
        return _never_ended(request, last, text, progress.findings, seconds, "--limit")
    if last and progress.stopped:
        text = deadlines.timeout_sentence({**last, "seconds": progress.deadline.seconds}, died.frame)
        return _never_ended(request, last, text, progress.findings, seconds, "--budget")
    how = f"the process {'was ended' if died.ended else 'ended'} {died.how}" + (f", {died.frame}" if died.frame else "")
    if not last and progress.stopped:
        where = f", {died.frame}" if died.frame else ""
        seconds = progress.deadline.seconds
        return {
            "problem": f"Importing {request.name or 'the target'} did not finish within {seconds:.3g} s{where}. "
            "If it is only slow, because it compiles, for example, give a larger --budget."
        }
    if not last:
        return {
            "problem": f"Importing {request.name or 'the target'} ended the process: {how}. {died.last_line}".strip()
        }
    how += f"; its last line: {died.last_line!r}" if died.last_line else ""
    return _ended_by_candidate(request, how, last, seconds, advice=_advice(request, died))


def _advice(request: DiagnoseRequest, died: Died) -> str:
    """What to do about a process that ended, as far as the way it ended says."""
    from ..placement import device_of

    if died.ended in ("crashed", "cheating"):
        return "look for what writes to a file descriptor that the kernel has not opened"
    if died.ended == "over_memory":
        return "look for what fills the memory; if the case needs that much, run a smaller one (--case)"
    if died.signal == signal.SIGKILL:
        return "look at the memory that it takes: the system kills a process for that, or somebody else did"
    if not died.signal:
        return "look for what ends the process: os._exit, or exit() in a library that the kernel calls"
    on_a_gpu = device_of({"device": request.device, "interpret": request.interpret}).startswith("cuda")
    tool = "compute-sanitizer" if on_a_gpu else "valgrind or gdb"
    return f"run only that case (--case) under {tool}, to see which access or instruction it is"


def _ended_by_candidate(
    request: DiagnoseRequest, how: str, last: RunMessage, seconds: float, *, advice: str
) -> DiagnosisReply:
    from ...assay.diagnosis import Cause, Diagnosis
    from ...assay.diagnosis.causes.rules import CATALOGUE
    from ...assay.report.check_report import Report
    from ...assay.report.results import CERTAIN, FAIL, Finding

    place = f"in run {last['run']!r} of probe {last['probe']}"
    finding = Finding(CERTAIN, "process", "", None, None, None, f"{how} ({place})", last["case"])
    report = Report(request.name, FAIL, findings=[finding], cases=[last["case"]], seconds=seconds)
    known = CATALOGUE["exception"]
    cause = Cause(
        known.id, 1.0, "", [how, f"{place}, case {last['case']}"], {}, f"{request.name} ends its process", advice
    )
    return _reply(request, Diagnosis(FAIL, report, causes=[cause], seconds=seconds))


def _never_ended(
    request: DiagnoseRequest, run: RunMessage, text: str, findings: list[JsonObject], seconds: float, option: str
) -> DiagnosisReply:
    """The diagnosis of a process that had to be killed: the run that hung, and the findings before it."""
    from ...assay.diagnosis import Diagnosis
    from ...assay.report.check_report import Report
    from ...assay.report.results import UNJUDGED

    report = Report(request.name or "the target", UNJUDGED, cases=[run["case"]], seconds=seconds)
    diagnosis = deadlines.add_timeout(Diagnosis(UNJUDGED, report, seconds=seconds), run["case"], text, option)
    before = Report.from_json({**report.to_json(), "findings": findings}).findings
    report.findings += before
    for finding in before:
        diagnosis.traced.append(f"Found before that: {finding.text}.")
    return _reply(request, diagnosis)


def _reply(request: DiagnoseRequest, diagnosis: Diagnosis) -> DiagnosisReply:
    from ...assay.diagnosis.report import page as diagnosis_page
    from ...assay.diagnosis.report.text import render

    html = request.html
    lost = write_or_explain(html, partial(diagnosis_page.write, diagnosis, html)) if html else []
    return {
        "text": render(diagnosis),
        "lost": lost,
        "verdict": diagnosis.verdict,
        "interrupted": False,
        "pages": [html] if html and not lost else [],
        "json": diagnosis.to_json(),
    }


class _RunProgress:
    """Shows the present run and the time on a terminal, and keeps the last run, its deadline and its findings."""

    def __init__(self, err: Console, request: DiagnoseRequest) -> None:
        self.last: RunMessage = {}
        self.outer: list[RunMessage] = []  # runs that are waiting for a run nested in them
        self.findings: list[JsonObject] = []  # findings of the first case that has any
        self.deadline = deadlines.RunDeadline(request.budget)
        whole = request.budget if request.do == "diagnose" else None
        self.bar = Progress(
            TextColumn("{task.description}", style="dim", markup=False, table_column=Column(no_wrap=True)),
            BarColumn(bar_width=20),
            TextColumn("{task.fields[runs]}", table_column=Column(no_wrap=True)),
            TimeElapsedColumn(),
            TextColumn(f"of at most {duration(whole)}" if whole else "", table_column=Column(no_wrap=True)),
            console=err,
            transient=True,
            disable=not err.is_terminal,
        )
        self.began = time.monotonic()
        self.task = self.bar.add_task("starting", total=whole, runs="")

    def __enter__(self) -> _RunProgress:
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    @property
    def running(self) -> bool:
        """Whether a run has begun that has not ended."""
        return bool(self.last) and self.deadline.began is not None

    @property
    def stopped(self) -> bool:
        """Whether the present run is past its deadline."""
        until = self.deadline.until()
        return until is not None and time.monotonic() >= until

    def update(self, last: ProgressMessage) -> None:
        if "importing" in last:
            self.deadline.begin_import()
            self._show(f"importing {last['importing']}")
            return
        if "searching" in last:
            self._show(last["searching"])
            return
        if "over" in last:
            self.deadline.end()
            self.last = self.outer.pop() if self.outer else self.last
            return
        if self.deadline.began is not None:
            self.outer.append(self.last)
        self.deadline.begin(last["case"])
        if last.get("findings") and (not self.findings or self.findings[0]["case"] == last["case"]):
            self.findings = last["findings"]
        self.last = last
        self._show(f"{last['case']}, {last['run']}", f"{last['runs']} runs")

    def _show(self, now: str, runs: str = "") -> None:
        width = max(8, min(34, self.bar.console.width - 46))
        description, completed = visible(now)[:width].ljust(width), time.monotonic() - self.began
        self.bar.update(self.task, description=description, completed=completed, runs=runs)
