"""`goldsmith verify`: plans in a worker, checks in workers, and shows what came out."""

from __future__ import annotations

import json
import os
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.markup import escape

from ... import __version__
from ...core import native
from ..say import Problem, console, count, duration, ends_like_ctrl_c, put_json
from ..source import digest
from . import show
from .pool import Died, Pool, WorkersFailed
from .select import Job, examined

INTERRUPTED = 130
INTERPRETER = "interpreter"  # how kernels ran that did not run on their device


@dataclass(frozen=True)
class Request:
    """What was asked for on the command line."""

    names: tuple[str, ...] = ()
    backend: str | None = None
    device: str | None = None
    dtype: str | None = None
    interpret: bool = False
    size: str = "default"
    jobs: int | None = None
    seed: int = 0


@dataclass
class Outcome:
    """Everything that a run of verify found."""

    proofs: list[Any]
    machine: dict[str, Any]
    seconds: float = 0.0
    interrupted: bool = False
    device: str = "cpu"
    remarks: list[str] = field(default_factory=list)
    broken: str = ""  # why no worker was left to go on with
    size: str = "default"

    @property
    def entries(self) -> list[Any]:
        return [p.entry() for p in self.proofs]

    @property
    def isa(self) -> str | None:
        """The level that native kernels ran at: a proof is of that level's."""
        return native.isa() if any(p.backend == "native" and p.reports for p in self.proofs) else None

    @property
    def status(self) -> int:
        entries = self.entries
        if any(e.failed for e in entries):
            return 1
        if self.broken or any(p.problem for p in self.proofs):
            return 2
        if self.interrupted:
            return INTERRUPTED
        return 0 if any(e.report is not None for e in entries) else 2

    def to_json(self) -> dict[str, Any]:
        entries = self.entries
        return {
            "schema": 1,
            "goldsmith": __version__,
            "source": digest(),
            "size": self.size,
            "isa": self.isa,
            "ok": self.status == 0,
            "interrupted": self.interrupted,
            "remarks": self.remarks,
            "seconds": round(self.seconds, 3),
            "machine": self.machine,
            "proofs": [
                {
                    "operator": e.operator,
                    "backend": e.backend,
                    "how": p.how,
                    "verdict": e.verdict,
                    "reason": e.reason,
                    "left_out": p.left_out,
                    "report": e.report.to_json() if e.report else None,
                }
                for p, e in zip(self.proofs, entries, strict=True)
            ],
        }


def run(request: Request, *, html: Path | None = None, json_to: str | None = None) -> int:
    """The whole command; returns the exit status."""
    err = console(stderr=True)
    out = err if json_to == "-" else console()
    for path in (html, Path(json_to) if json_to not in (None, "-") else None):
        writable(path)
    own = [name for name in request.names if ":" in name]
    if request.backend and own:
        raise Problem(
            f"--backend {request.backend} chooses among the backends of our operators, and {own[0]} is a kernel of its "
            "own. Leave the option out."
        )
    outcome = verify(request, err)
    entries = outcome.entries
    remarks = [*outcome.remarks, *show.left_out(outcome.proofs), *show.remarks(entries)]
    if html is not None:  # files before anything is printed: who reads it may close the pipe
        from ...assay.report.html import page

        page.write(entries, html, title="goldsmith verify", conditions=_conditions(outcome), remarks=remarks)
    if json_to not in (None, "-"):
        Path(json_to).write_text(json.dumps(outcome.to_json()) + "\n", encoding="utf-8")
    hows = {p.name: p.how for p in outcome.proofs}
    out.print(show.matrix(entries, hows))
    for line in remarks:
        out.print(f"\n[dim]{escape(line)}[/]")
    show.failures(out, entries)
    show.problems(out, outcome)
    out.print()
    if html is not None:
        out.print(f"Report: {html}", soft_wrap=True)
    if json_to not in (None, "-"):
        out.print(f"JSON: {json_to}", soft_wrap=True)
    out.print(show.conclusion(outcome))
    if json_to == "-":
        put_json(outcome.to_json())
    return outcome.status


def verify(request: Request, err: Any) -> Outcome:
    """Plan and check. Ctrl-C ends it early, with what was finished; so does being told to terminate."""
    began = time.monotonic()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    size = request.jobs or max(1, min(cores, 8))
    arguments = ("--interpret",) if request.interpret else ()
    try:
        with ends_like_ctrl_c(), Pool(size, arguments=arguments, threads=max(1, cores // size)) as pool:
            with err.status("[dim]loading operators[/]"):
                outcome = _plan(pool, request)
            if outcome.device.startswith("cuda") and request.jobs is None:
                pool.size = min(size, _sharing(outcome))
            try:
                _check(pool, outcome, request, err)
            except KeyboardInterrupt:
                outcome.interrupted = True
                err.print("[yellow]Interrupted: what follows is what was finished.[/]")
            except WorkersFailed as error:
                outcome.broken = f"A worker process {error}"
    except WorkersFailed as error:
        raise Problem(f"A worker process {error}") from error
    except KeyboardInterrupt:
        raise Problem("Interrupted before anything was tried.") from None
    if outcome.broken and not any(p.reports for p in outcome.proofs):
        raise Problem(outcome.broken)
    problems = [p.problem for p in outcome.proofs if p.problem]
    if problems and not any(p.reports for p in outcome.proofs):
        raise Problem(problems[0])
    outcome.remarks += _remarks(outcome, request)
    outcome.seconds = time.monotonic() - began
    return outcome


def _sharing(outcome: Outcome) -> int:
    """How many workers one card's memory has room for: a case of many tokens takes some GiB in float64."""
    cards = outcome.machine.get("gpus") or [{"memory_gib": 0}]
    return max(1, int(cards[0]["memory_gib"] // 10))


def _plan(pool: Pool, request: Request) -> Outcome:
    from .merge import Proof

    asked = {
        "do": "plan",
        "names": list(request.names),
        "backend": request.backend,
        "device": request.device,
        "dtype": request.dtype,
        "interpret": request.interpret,
        "size": request.size,
    }
    try:
        reply = pool.ask(asked)
    except WorkersFailed as error:
        names = ", ".join(request.names)
        raise Problem(f"Importing {names or 'the operators'} ended the process: a worker {error}") from error
    if "problem" in reply:
        raise Problem(reply["problem"])
    if "ended" in reply:
        raise Problem(f"Importing {', '.join(request.names)} raised {reply['ended']}, {reply['where']}.")
    if "broken" in reply:
        raise Problem(f"Planning failed: {reply['broken']}")
    proofs = [
        Proof(
            p["operator"],
            p["backend"],
            p["device"],
            [Job.from_json(job) for job in p["jobs"]],
            p["how"],
            p["reason"],
            p["source"],
            p["index"],
            p["left_out"],
        )
        for p in reply["proofs"]
    ]
    return Outcome(proofs, reply["machine"], device=reply["device"], size=request.size)


def _remarks(outcome: Outcome, request: Request) -> list[str]:
    """What is to be said of the whole run: how kernels ran, and which cases went through which probes."""
    from .merge import PROCESS

    said = []
    if any(p.how == INTERPRETER for p in outcome.proofs):
        why = "as asked" if request.interpret else "there is no CUDA device here"
        said.append(
            f"Triton kernels ran through Triton's interpreter on the CPU ({why}), at small sizes: this proves their "
            "arithmetic and masks, not their behaviour on a GPU."
        )
    finished = not outcome.interrupted and not outcome.broken
    said += filter(None, [examined(job for proof in outcome.proofs for job in proof.judged)] if finished else [])
    died = sum(any(f.probe == PROCESS for f in r.findings) for proof in outcome.proofs for r in proof.reports)
    if finished and died:
        said.append(f"The process ended in {count(died, 'case')}: what was left of the probes there did not run.")
    return said


def _check(pool: Pool, outcome: Outcome, request: Request, err: Any) -> None:
    from ...assay.report.check_report import Report
    from .merge import broken_report, crash_report, ended_report

    jobs: list[dict[str, Any]] = []
    for number, proof in enumerate(outcome.proofs):
        jobs += [_message(number, proof, job, request) for job in proof.jobs]
    retried: list[dict[str, Any]] = []
    with show.Watcher(err, outcome.proofs) as watcher:
        for alone in (False, True):
            if alone:
                pool.size = 1  # these ran out of memory beside others
            for job, reply in pool.run(retried if alone else jobs):
                proof, dtype = outcome.proofs[job["proof"]], job["dtype"]
                case = job["label"]
                if isinstance(reply, Died):
                    proof.reports.append(crash_report(proof, case, dtype, reply))
                elif "problem" in reply:
                    proof.problem = reply["problem"]
                elif "ended" in reply:
                    proof.reports.append(ended_report(proof, case, dtype, reply["ended"], reply["where"]))
                elif "broken" in reply:
                    proof.reports.append(broken_report(proof, case, dtype, reply["broken"]))
                elif "memory" in reply and not alone:
                    retried.append(job)
                    continue
                elif "memory" in reply and "report" not in reply:
                    proof.skipped[case] = reply["memory"]
                elif "skipped" in reply:
                    proof.skipped[case] = reply["skipped"]
                else:
                    proof.reports.append(Report.from_json(reply["report"]))
                    proof.how = INTERPRETER if reply["interpreted"] else proof.how
                proof.done += 1
                now = pool.running[0] if pool.running else job
                watcher.finished(proof, job["cost"], f"{outcome.proofs[now['proof']].name}: {now['case']}")


def _message(number: int, proof: Any, job: Job, request: Request) -> dict[str, Any]:
    return {
        "do": "check",
        "proof": number,
        "source": proof.source,
        "index": proof.index,
        "name": proof.operator,
        "backend": proof.backend,
        "device": proof.device,
        "seed": request.seed,
        **job.to_json(),
    }


def _conditions(outcome: Outcome) -> list[str]:
    machine = outcome.machine
    gpus = [g["name"] for g in machine.get("gpus", ())]
    lines = [gpus[0] if gpus and outcome.device.startswith("cuda") else f"{machine['cpu']}, {machine['cores']} cores"]
    lines.append(f"torch {machine['torch']}")
    if machine.get("triton"):
        interpreted = any(p.how == INTERPRETER for p in outcome.proofs)
        lines.append(
            f"Triton {machine['triton']}" + (", kernels through its interpreter, small sizes" if interpreted else "")
        )
    lines.append(f"goldsmith {__version__}")
    lines.append(f"took {duration(outcome.seconds)}")
    return lines


def writable(path: Path | None) -> None:
    """Say now, not after two minutes, that a result cannot be written."""
    if path is None:
        return
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, "a", encoding="utf-8"):
            pass
    except OSError as error:
        raise Problem(f"cannot write {path}: {error.strerror or error}.") from error
