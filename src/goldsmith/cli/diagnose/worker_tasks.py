"""Tasks of a worker process of `goldsmith diagnose` and `goldsmith replay`: load the target, run it, write the page."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

import torch

from ... import __version__, assay
from ...assay.diagnosis.driver import PAGE
from ...assay.diagnosis.report import page as diagnosis_page
from ...assay.diagnosis.report.bundle_read import JSON as BUNDLE_FILE
from ...assay.diagnosis.report.text import render
from ...assay.execute import hooks, interpreter
from ...assay.gate.isolation.candidate_process import CandidateProcess
from ...assay.report import text as report_text
from ...assay.report.html import page
from ...assay.support.printable import visible
from ...core.device import machine
from ...core.op import Op
from ...core.tracing import TargetError
from ..output_files import write_or_explain
from ..placement import device_of, place
from ..targets import find, op_target
from ..user_targets import UnknownName, missing_module, names_a_target, numbered, one_target
from ..verify.selection import choose
from ..workers.candidates import in_its_own_process
from . import deadlines

if TYPE_CHECKING:
    from ..workers.messages import DiagnosisReply, DiagnosisRequest, ProgressMessage, RunMessage

_LONGEST = 24 * 3600.0  # seconds of one call without --limit: the budget ends a run long before
Send = Callable[["ProgressMessage"], None]


def diagnose(request: DiagnosisRequest, send: Send) -> DiagnosisReply:
    """Diagnose a target; the worker also writes the page and the bundle, because it has the tensors."""
    try:
        send({"importing": request["name"]})
        with closing(_Subject(request)) as subject:
            send({"over": 0})
            bundle = None if request["bundle"] is None else _bundle(request["bundle"])
            case = request["case"] if bundle is None else _case_of(bundle)
            dtype = subject.dtype if bundle is None else getattr(torch, bundle.meta["dtype"], None)
            seed = request["seed"] if bundle is None else bundle.meta["seed"]
            _import_triton()
            with _threads(bundle):
                with _reporting_runs(send) as ended:
                    diagnosis = assay.diagnose(
                        subject.target, case, dtype=dtype, device=subject.device, seed=seed, budget_s=request["budget"],
                        patch=request["patch"], propose=request["propose"],
                        progress=lambda text: send({"searching": text}),
                    )  # fmt: skip
                if ended:
                    deadlines.add_timeout(diagnosis, ended[0][0]["case"], deadlines.timeout_sentence(*ended[0]))
                lost = _write_bundle(diagnosis, request["out"]) + _write_patched(diagnosis, request["apply"])
    except (UnknownName, TargetError) as error:
        return {"problem": str(error)}
    except ModuleNotFoundError as error:
        return {"problem": missing_module(error)}
    command = (
        f"goldsmith diagnose {subject.words} --replay {shlex.quote(str(diagnosis.bundle))}" if diagnosis.bundle else ""
    )
    pages = []
    for path in [request["html"], diagnosis.bundle and diagnosis.bundle / PAGE]:
        if path:
            write = partial(diagnosis_page.write, diagnosis, path, command=command, conditions=subject.conditions)
            failed = write_or_explain(path, write)
            lost += failed
            pages += [] if failed else [str(path)]
    return {
        "text": render(diagnosis, command),
        "lost": lost,
        "verdict": diagnosis.verdict,
        "partial": diagnosis.partial,
        "interrupted": diagnosis.partial == "interrupted",
        "pages": pages,
        "json": diagnosis.to_json() if request["json"] else None,
    }


def _write_bundle(diagnosis: assay.Diagnosis, folder: str | None) -> list[str]:
    """Write the bundle if there is one; returns sentences about failed writes."""
    write = diagnosis.write_bundle
    if folder is None or write is None:
        return []

    def keep() -> None:
        diagnosis.bundle = write(diagnosis, Path(folder))

    return write_or_explain(f"a bundle into {folder}", keep)


def _write_patched(diagnosis: assay.Diagnosis, path: str | None) -> list[str]:
    """Write the patched copy of the candidate's file; returns sentences about what was not written."""
    if path is None:
        return []
    if diagnosis.patch is None:
        return [f"{path} was not written: there is no patch."]
    try:
        return write_or_explain(path, partial(diagnosis.patch.save, path))
    except ValueError as error:
        return [f"{error}."]


def replay(request: DiagnosisRequest, send: Send) -> DiagnosisReply:
    """Run a bundle's inputs through the target again: the report, and whether the outcome is the same."""
    try:
        path = request["bundle"] or ""
        bundle = _bundle(path)
        send({"importing": request["name"]})
        asked = request if request["name"] else {**request, **_operator_of(bundle)}
        with closing(_Subject(asked)) as subject:
            send({"over": 0})
            _import_triton()
            with _reporting_runs(send) as ended:
                try:
                    report = assay.replay(path, subject.target)
                except TargetError as error:
                    raise UnknownName(f"{path} does not fit {subject.words}: {error}") from error
                except hooks.TakesTooLong as error:
                    report = deadlines.timed_out_replay(error, bundle.meta["verdict"], *ended[0])
    except (UnknownName, TargetError) as error:
        return {"problem": str(error)}
    except ModuleNotFoundError as error:
        return {"problem": missing_module(error)}
    html = request["html"]
    lost = write_or_explain(html, partial(page.write, [report], html, conditions=subject.conditions)) if html else []
    answer = report.environment["replay"]["answer"]
    result = report.to_json() if request["json"] else None
    (noted,) = (note for note in report.notes if note.id == "replay")
    report.notes.remove(noted)  # the text begins with it
    return {
        "text": visible(f"{noted.text}\n\n{report_text.render(report, rest='--html and --json have all')}"),
        "answer": answer,
        "verdict": report.verdict,
        "partial": report.partial,
        "lost": lost,
        "interrupted": False,
        "pages": [html] if html and not lost else [],
        "json": result,
    }


def _import_triton() -> None:
    """Import Triton now, so that its import is not part of the first run's time."""
    with interpreter.watching():
        pass


class _OperatorOnBackend(TypedDict):
    name: str
    backend: str


class _Subject:
    """The requested target with its device, dtype and the words that name it on the command line."""

    def __init__(self, request: DiagnosisRequest) -> None:
        name, self.device = request["name"], device_of(request)
        dtype = getattr(torch, request["dtype"]) if request["dtype"] else None
        named = [] if names_a_target(name) else find([numbered(name)[0]])
        if not named or named[0].target is not None:
            if request["backend"]:
                raise UnknownName(
                    f"--backend {request['backend']}: only operators have backends, not targets of your own."
                )
            limit = _LONGEST if request["limit"] is None else request["limit"]
            target = in_its_own_process(one_target(name), name, None, self.device, limit)
            self.target, self.dtype, self.how = target, dtype, ""
            self.words = shlex.quote(name)
            return
        if len(named) > 1 or named[0].op is None:
            members = ", ".join(n.name for n in named)
            raise UnknownName(f"{name!r} is a family; name one of its operators: {members}.")
        op = named[0].op
        backend, self.device = _backend(op, request)
        interpreted = backend == "triton" and machine().interpreter
        self.target = _narrowed(op, backend, self.device, interpreted, request)
        self.dtype = dtype or self.target.dtypes[0]
        self.how = ", kernels in Triton's interpreter" if interpreted else ""
        self.words = f"{op.name} --backend {backend}"

    def close(self) -> None:
        """Ends the candidate's own process, if it has one."""
        if isinstance(self.target.runner, CandidateProcess):
            self.target.runner.close()

    @property
    def conditions(self) -> list[str]:
        known = machine()
        where = torch.cuda.get_device_name(self.device) if self.device.startswith("cuda") else known.cpu
        return [where, f"torch {known.torch}{self.how}", f"goldsmith {__version__}"]


def _backend(op: Op, request: DiagnosisRequest) -> tuple[str, str]:
    """(backend, device): the requested backend, or the first that can run; raises UnknownName with the reasons."""
    wanted = request["backend"]
    if wanted is not None and wanted not in op.backends:
        raise UnknownName(f"unknown backend {wanted!r}; {op.name} has: {', '.join(op.backends)}")
    places = {b: place(op, b, request) for b in op.backends if wanted in (None, b)}
    able = [(b, device) for b, (device, reason) in places.items() if not reason]
    if not able:
        why = "; ".join(f"{b}: {reason}" for b, (_, reason) in places.items())
        raise UnknownName(f"{op.name} has no backend that can run here: {why}")
    return min(able, key=lambda pair: pair[1] != device_of(request))


def _narrowed(op: Op, backend: str, device: str, interpreted: bool, request: DiagnosisRequest) -> assay.Target:
    """The operator with the cases that `goldsmith verify` checks on this backend; with all cases if one is named."""
    jobs = choose(op, backend, device, interpreted, "default", request["dtype"]).jobs
    target = op_target(op, backend, device=device, dtype=getattr(torch, jobs[0].dtype) if jobs else None)
    if request["case"] or not jobs:
        return target
    dtype = target.dtypes[0]
    chosen = {job.case for job in jobs}
    cases = [case for case in target.cases if case.name in chosen and _accepts(op, backend, case, dtype, device)]
    return replace(target, cases=cases) if cases else target


def _accepts(op: Op, backend: str, case: assay.Case, dtype: torch.dtype, device: str) -> bool:
    arguments = case.build(dtype, device, 0)
    tensors = [arguments.get(name) for name in op.inputs]
    return op.why_not(backend, *tensors, **{o: arguments[o] for o in op.options}) is None


# bundles


def _bundle(path: str) -> assay.Bundle:
    try:
        return assay.load_bundle(path)
    except (ValueError, OSError) as error:
        reason = str(error).removeprefix(f"bundle {Path(path).name}: ")
        inner = sorted(folder.name for folder in Path(path).glob("*/") if (folder / BUNDLE_FILE).is_file())
        hint = f"; did you mean {Path(path) / inner[0]}?" if inner else ""
        raise UnknownName(f"{path} is not a readable bundle: {reason}{hint}") from error


def _case_of(bundle: assay.Bundle) -> assay.Case:
    """The bundle's inputs as a case."""
    supply = bundle.supply
    return assay.Case(bundle.meta["case"], lambda make: dict(supply), given=True)


def _operator_of(bundle: assay.Bundle) -> _OperatorOnBackend:
    """The operator and backend that a bundle names; a user's target is never imported on a bundle's word."""
    name, _, backend = bundle.meta["target"].partition(" on ")
    if name not in Op.all() or backend not in Op.get(name).backends:
        raise UnknownName(
            f"the bundle is of {bundle.meta['target']!r}, which is not an operator of goldsmith. For safety, a target "
            "that only the bundle names is not imported: goldsmith replay BUNDLE module:target."
        )
    return {"name": name, "backend": backend}


@contextmanager
def _threads(bundle: assay.Bundle | None) -> Iterator[None]:
    before = torch.get_num_threads()
    if bundle is not None:
        torch.set_num_threads(bundle.meta["threads"])
    try:
        yield
    finally:
        torch.set_num_threads(before)


@contextmanager
def _reporting_runs(send: Send) -> Iterator[list[tuple[RunMessage, str]]]:
    """Report every run before it begins and when it is over (20 us each), so that the parent can place a crash.

    Yields the list of runs that were ended because their time was up, each with the line where it stood.
    """
    runs = 0
    ended: list[tuple[RunMessage, str]] = []

    def begun(case: str, probe: str, run: str) -> None:
        nonlocal runs
        runs += 1
        now = hooks.RUNNING[-1]
        message: ProgressMessage = {"case": case, "probe": probe, "run": run, "runs": runs, "seed": now.seed}
        if now.findings:
            message["findings"] = [asdict(f) for f in now.findings]
        send(message)

    def over() -> None:
        send({"over": runs})

    def stopped(now: hooks.RunInProgress, where: str) -> None:
        ended.append(
            ({"case": now.case, "probe": now.probe, "run": now.run, "seed": now.seed, "seconds": now.seconds}, where)
        )

    hooks.RUNS.append(begun)
    hooks.ENDED.append(over)
    hooks.STOPPED.append(stopped)
    try:
        yield ended
    finally:
        hooks.RUNS.remove(begun)
        hooks.ENDED.remove(over)
        hooks.STOPPED.remove(stopped)
