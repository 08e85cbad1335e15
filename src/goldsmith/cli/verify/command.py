"""`goldsmith verify`: list the checks in one worker, run them in several, show the outcome."""

from __future__ import annotations

import os
import random
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, cast

from rich.console import Console
from rich.markup import escape

from ... import __version__
from ..output_files import check_files, write_json_file, write_or_explain
from ..signals import terminate_like_ctrl_c
from ..terminal import (
    INTERRUPTED_EARLY,
    Failure,
    Interruption,
    console,
    count,
    duration,
    print_paragraph,
    write_json,
)
from ..workers.pool import Died, Pool, StepOverdue, WorkersFailed, overdue_sentence
from . import display
from .outcome import VerifyOutcome, VerifyRequest
from .selection import Job, examined

if TYPE_CHECKING:
    from ...assay.report.html.view import Entry
    from ..workers.messages import CheckRequest, ListRequest
    from .checks import Check

LARGE = 3.0  # estimated seconds of a case that comes before its group's others
ALONE = 10.0  # of one that needs no group, such as a large case with all probes
WORTH_A_WORKER = 10.0  # estimated seconds of cases for which another worker starts CUDA
INTERPRETER = "interpreter"  # how Triton kernels ran if not on a GPU


def run(request: VerifyRequest, *, html: Path | None = None, json_to: str | None = None) -> int:
    """Run the command and return its exit status."""
    err = console(stderr=True)
    out = err if json_to == "-" else console()
    check_files(html, Path(json_to) if json_to not in (None, "-") else None)
    outcome = verify(request, err)
    entries = outcome.entries
    remarks = [*outcome.remarks, *display.left_out(outcome.checks), *display.remarks(entries)]
    written, lost = list[str](), list[str]()

    def keep(word: str, path: str | Path, write: Callable[[], object]) -> None:
        failures = write_or_explain(path, write)
        lost.extend(failures)
        written.extend([] if failures else [f"{word}: {path}"])

    try:
        _show(out, outcome, entries, remarks, every=request.verbose)
    finally:  # the reader of stdout may have closed the pipe
        if html is not None:
            from ...assay.report.html import page

            conditions = _conditions(outcome)
            write = partial(page.write, title="goldsmith verify", conditions=conditions, remarks=remarks)
            keep("Report", html, partial(write, entries, html))
        if json_to is not None and json_to != "-":
            keep("JSON", json_to, partial(write_json_file, json_to, outcome.to_json()))
    for line in written:
        out.print(line, soft_wrap=True, markup=False)
    out.print(display.conclusion(outcome))
    for sentence in lost:
        print_paragraph(sentence)
    if json_to == "-":
        write_json(outcome.to_json())
    return outcome.status


def _show(
    out: Console, outcome: VerifyOutcome, entries: Sequence[Entry], remarks: Sequence[str], *, every: bool
) -> None:
    """Prints the table of checks, the remarks below it, and the findings of failed checks."""
    out.print(display.matrix(entries, {c.name: c.how for c in outcome.checks}))
    for line in remarks:
        out.print(f"\n[dim]{escape(line)}[/]")
    display.failures(out, entries, every=every)
    display.notes(out, entries, every=every)
    display.problems(out, outcome)
    out.print()


def verify(request: VerifyRequest, err: Console) -> VerifyOutcome:
    """List the checks and run them. After Ctrl-C, SIGTERM or SIGHUP it returns the checks finished so far."""
    began = time.monotonic()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    size = 1 if request.ranks else request.jobs or max(1, min(cores, 16))  # ranks use the cores
    arguments = ("--interpret",) if request.interpret else ()
    try:
        with (
            terminate_like_ctrl_c(),
            Pool(size, arguments=arguments, threads=max(1, cores // size), step_limit=request.step_limit) as pool,
        ):
            try:
                with err.status("[dim]loading operators[/]"):
                    outcome = _list_checks(pool, request)
            except Failure:
                if request.ranks:
                    pool.ask({"do": "end"})
                raise
            if outcome.device.startswith("cuda") and request.jobs is None:
                pool.size = min(size, _workers_per_gpu(outcome))
            try:
                _check(pool, outcome, request, err)
                if request.ranks:
                    pool.ask({"do": "end"})  # under torchrun, the other ranks would serve this one forever
            except KeyboardInterrupt:
                outcome.interrupted = True
                err.print("[yellow]Interrupted. These results were finished:[/]")
            except WorkersFailed as error:
                outcome.broken = f"A worker process {error}"
    except WorkersFailed as error:
        raise Failure(f"A worker process {error}") from error
    except KeyboardInterrupt:
        raise Interruption(f"{INTERRUPTED_EARLY}.") from None
    if outcome.broken and not any(c.reports for c in outcome.checks):
        raise Failure(outcome.broken)
    problems = [c.problem for c in outcome.checks if c.problem]
    if problems and not outcome.interrupted and not any(c.reports for c in outcome.checks):
        raise Failure(problems[0])
    outcome.remarks += _remarks(outcome, request)
    outcome.seconds = time.monotonic() - began
    return outcome


def _workers_per_gpu(outcome: VerifyOutcome) -> int:
    """How many workers may share a GPU: one per 5 GiB. A case that then lacks memory runs again alone.

    Each has to start CUDA, which takes longer than a few small cases; so there are not more than the cases pay for.
    """
    cards = outcome.machine["gpus"]
    cost = sum(job.cost for check in outcome.checks for job in check.jobs)
    fit = int(cards[0]["memory_gib"] // 5) if cards else 1
    return max(1, min(fit, round(cost / WORTH_A_WORKER)))


def _list_checks(pool: Pool, request: VerifyRequest) -> VerifyOutcome:
    from .checks import Check

    list_request: ListRequest = {
        "do": "list",
        "names": list(request.names),
        "backend": request.backend,
        "device": request.device,
        "dtype": request.dtype,
        "interpret": request.interpret,
        "size": request.size,
        "ranks": request.ranks,
    }
    try:
        reply = pool.ask(list_request)
    except StepOverdue as error:
        raise Failure(overdue_sentence(", ".join(request.names), str(error))) from error
    except WorkersFailed as error:
        names = ", ".join(request.names)
        raise Failure(f"Importing {names or 'the operators'} ended the worker process: it {error}") from error
    if "problem" in reply:
        raise Failure(reply["problem"])
    if "ended" in reply:
        raise Failure(f"Importing {', '.join(request.names)} raised {reply['ended']}, {reply['where']}.")
    if "broken" in reply:
        raise Failure(f"Listing the checks failed: {reply['broken']}")
    checks = [
        Check(
            c["operator"],
            c["backend"],
            c["device"],
            [Job.from_json(job) for job in c["jobs"]],
            c["how"],
            c["reason"],
            c["source"],
            c["index"],
            c["left_out"],
        )
        for c in reply["checks"]
    ]
    return VerifyOutcome(checks, reply["machine"], device=reply["device"], size=request.size)


def _remarks(outcome: VerifyOutcome, request: VerifyRequest) -> list[str]:
    """Sentences about the whole run: how kernels ran, and how many cases went through which probes."""
    from .checks import PROCESS

    remarks = []
    if any(c.how == INTERPRETER for c in outcome.checks):
        why = "--interpret" if request.interpret else "this machine has no CUDA device"
        remarks.append(
            f"Triton kernels ran in Triton's interpreter on the CPU ({why}), at small sizes. This checks their "
            "arithmetic and masks, not their behaviour on a GPU."
        )
    finished = not outcome.interrupted and not outcome.broken
    remarks += filter(None, [examined(job for check in outcome.checks for job in check.judged)] if finished else [])
    died = sum(any(f.probe == PROCESS for f in r.findings) for check in outcome.checks for r in check.reports)
    if finished and died:
        remarks.append(f"The process ended in {count(died, 'case')}; the remaining probes of these cases did not run.")
    return remarks


def _check(pool: Pool, outcome: VerifyOutcome, request: VerifyRequest, err: Console) -> None:
    from ...assay.report.check_report import Report
    from .checks import broken_report, crash_report, ended_report

    jobs: list[CheckRequest] = []
    for number, check in enumerate(outcome.checks):
        jobs += [_message(number, check, job, request) for job in check.jobs]
    jobs = costliest_first(jobs)
    retried: list[CheckRequest] = []
    with display.VerifyProgress(err, outcome.checks) as progress:
        for alone in (False, True):
            if alone:
                pool.size = 1  # these ran out of memory while other workers ran
            for job, reply in pool.run(retried if alone else jobs, group=_group):
                check, dtype = outcome.checks[job["check"]], job["dtype"]
                case = job["label"]
                if isinstance(reply, Died) and reply.overdue:
                    check.problem = overdue_sentence(check.source, reply.overdue)
                    pool.leave_out(partial(_of_check, job["check"]))  # they would wait as long
                elif isinstance(reply, Died):
                    check.reports.append(crash_report(check, case, dtype, reply))
                elif "problem" in reply:
                    check.problem = reply["problem"]
                elif "ended" in reply:
                    check.reports.append(ended_report(check, case, dtype, reply["ended"], reply["where"]))
                elif "broken" in reply:
                    check.reports.append(broken_report(check, case, dtype, reply["broken"]))
                elif "memory" in reply and not alone:
                    retried.append(job)
                    continue
                elif "memory" in reply and "report" not in reply:
                    check.skipped[case] = reply["memory"]
                elif "skipped" in reply:
                    check.skipped[case] = reply["skipped"]
                else:
                    check.reports.append(Report.from_json(reply["report"]))
                    check.how = INTERPRETER if reply["interpreted"] else check.how
                check.done += 1
                now = cast("CheckRequest", pool.running[0]) if pool.running else job
                progress.finished(check, job["cost"], f"{outcome.checks[now['check']].name}: {now['case']}")


def _of_check(number: int, job: CheckRequest) -> bool:
    return job["check"] == number


def _group(job: CheckRequest) -> tuple[int, str, str]:
    """Jobs of one group use the same compiled kernels. A case that takes as long as many others is a group of its own,
    so that no worker has to go through all of those of an operator.
    """
    return job["check"], job["dtype"], job["case"] if job["cost"] >= ALONE else ""


def costliest_first(jobs: Sequence[CheckRequest]) -> list[CheckRequest]:
    """Cases of groups of their own first, then the costliest groups, each from its large cases on: a long job begun
    last would run alone at the end.

    The other jobs come in an order of their group's own. Operators of one family have the same cases and share kernels;
    workers that went through them in step would wait for each other's compiles (see ../workers/compile_locks.py).
    """
    costs: dict[tuple[int, str, str], float] = {}
    for job in jobs:
        costs[_group(job)] = costs.get(_group(job), 0.0) + job["cost"]
    shuffled = {group: random.Random(str(group)) for group in costs}

    def place(job: CheckRequest) -> tuple:
        group = _group(job)
        return job["cost"] < ALONE, -costs[group], group, job["cost"] < LARGE, shuffled[group].random()

    return sorted(jobs, key=place)


def _message(number: int, check: Check, job: Job, request: VerifyRequest) -> CheckRequest:
    return {
        "do": "check",
        "check": number,
        "source": check.source,
        "index": check.index,
        "name": check.operator,
        "backend": check.backend,
        "device": check.device,
        "seed": request.seed,
        "ranks": request.ranks,
        "limit": request.limit,
        **job.to_json(),
    }


def _conditions(outcome: VerifyOutcome) -> list[str]:
    machine = outcome.machine
    gpus = [g["name"] for g in machine["gpus"]]
    lines = [gpus[0] if gpus and outcome.device.startswith("cuda") else f"{machine['cpu']}, {machine['cores']} cores"]
    lines.append(f"torch {machine['torch']}")
    if machine["triton"]:
        interpreted = any(c.how == INTERPRETER for c in outcome.checks)
        lines.append(
            f"Triton {machine['triton']}" + (", kernels in its interpreter, small sizes" if interpreted else "")
        )
    lines.append(f"goldsmith {__version__}")
    lines.append(f"took {duration(outcome.seconds)}")
    return lines
