"""What a worker does for `goldsmith diagnose` and `goldsmith replay`: finds the target, runs it, writes the page."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ... import __version__, assay
from ...assay.diagnosis import diagnosis_page
from ...assay.diagnosis.diagnosis import PAGE
from ...assay.diagnosis.text import render
from ...assay.execute import hooks, interpreter
from ...assay.report.html import page
from ...assay.support.printable import visible
from ...core.device import machine
from ...core.op import Op
from ...core.tracing import TargetError
from ..targets import UnknownName, find, load_targets, op_target
from ..verify.select import choose
from ..verify.work import device_of, place
from . import keeping, unending

Tell = Callable[[dict[str, Any]], None]


def diagnose(request: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """A diagnosis as text and JSON; the page and the bundle are written here, where the tensors are."""
    try:
        tell({"importing": request["name"]})
        subject = _Subject(request)
        tell({"over": 0})
        bundle = None if request["bundle"] is None else _bundle(request["bundle"])
        case = request["case"] if bundle is None else _case_of(bundle)
        dtype = subject.dtype if bundle is None else getattr(torch, bundle.meta["dtype"], None)
        seed = request["seed"] if bundle is None else bundle.meta["seed"]
        _import_triton()
        with _threads(bundle):
            with _telling(tell) as ended:
                found = assay.diagnose(
                    subject.target, case, dtype=dtype, device=subject.device, seed=seed, budget_s=request["budget"]
                )
            if ended:
                unending.into(found, *ended[0])
            lost = _keep(found, request["out"])
    except (UnknownName, TargetError) as error:
        return {"problem": str(error)}
    command = f"goldsmith diagnose {subject.words} --replay {shlex.quote(str(found.bundle))}" if found.bundle else ""
    pages = []
    for path in [request["html"], found.bundle and found.bundle / PAGE]:
        if path:
            write = partial(diagnosis_page.write, found, path, command=command, conditions=subject.conditions)
            failed = keeping.lost(path, write)
            lost += failed
            pages += [] if failed else [str(path)]
    return {
        "text": render(found, command),
        "lost": lost,
        "verdict": found.verdict,
        "partial": found.partial,
        "interrupted": found.partial == "interrupted",
        "pages": pages,
        "json": found.to_json() if request["json"] else None,
    }


def _keep(found: assay.Diagnosis, folder: str | None) -> list[str]:
    """The bundle, where there is something to keep; gives what could not be written."""
    write = found.write_bundle
    if folder is None or write is None:
        return []

    def keep() -> None:
        found.bundle = write(found, Path(folder))

    return keeping.lost(f"a bundle into {folder}", keep)


def replay(request: dict[str, Any], tell: Tell) -> dict[str, Any]:
    """A bundle's inputs through the target once more: the report, and whether it came out as it did."""
    try:
        bundle = _bundle(request["bundle"])
        tell({"importing": request["name"]})
        subject = _Subject(request if request["name"] else {**request, **_of_ours(bundle)})
        tell({"over": 0})
        _import_triton()
        with _telling(tell) as ended:
            try:
                report = assay.replay(request["bundle"], subject.target)
            except hooks.TakesTooLong as error:
                report = unending.replayed(error, bundle.meta["verdict"], *ended[0])
    except (UnknownName, TargetError) as error:
        return {"problem": str(error)}
    html = request["html"]
    lost = keeping.lost(html, partial(page.write, [report], html, conditions=subject.conditions)) if html else []
    answer = report.environment["replay"]["answer"]
    said = next(note.text for note in report.notes if note.id == "replay")
    return {
        "text": visible(f"{said}\n\n{report}"),
        "answer": answer,
        "verdict": report.verdict,
        "partial": report.partial,
        "lost": lost,
        "interrupted": False,
        "pages": [html] if html and not lost else [],
        "json": report.to_json() if request["json"] else None,
    }


def _import_triton() -> None:
    """Its seconds are none of the first run."""
    with interpreter.watching():
        pass


class _Subject:
    """The target that was asked for, where and in which dtype it runs, and how the command line calls it."""

    def __init__(self, request: dict[str, Any]) -> None:
        name, self.device = request["name"], device_of(request)
        dtype = getattr(torch, request["dtype"]) if request["dtype"] else None
        if ":" in name:
            if request["backend"]:
                raise UnknownName(f"--backend {request['backend']}: a target of your own has no backends.")
            self.target, self.dtype, self.how = _own(name), dtype, ""
            self.words = shlex.quote(name)
            return
        named = find([name])
        if len(named) > 1 or named[0].op is None:
            members = ", ".join(n.name for n in named)
            raise UnknownName(f"{name!r} is a family; one operator is diagnosed at a time: {members}.")
        op = named[0].op
        backend, self.device = _backend(op, request)
        interpreted = backend == "triton" and machine().interpreter
        self.target = _narrowed(op, backend, self.device, interpreted, request)
        self.dtype = dtype or self.target.dtypes[0]
        self.how = ", kernels through Triton's interpreter" if interpreted else ""
        self.words = f"{op.name} --backend {backend}"

    @property
    def conditions(self) -> list[str]:
        known = machine()
        where = torch.cuda.get_device_name(self.device) if self.device.startswith("cuda") else known.cpu
        return [where, f"torch {known.torch}{self.how}", f"goldsmith {__version__}"]


def _own(name: str) -> assay.Target:
    """A target of the user's; `package.module:targets#2` is the second of a list."""
    source, _, number = name.partition("#")
    targets = load_targets(source)
    if number.isdecimal() and 1 <= int(number) <= len(targets):
        return targets[int(number) - 1]
    if number or len(targets) > 1:
        listed = ", ".join(f"{source}#{k} ({t.name})" for k, t in enumerate(targets, 1))
        raise UnknownName(f"{name}: one target is diagnosed at a time; there are: {listed}.")
    return targets[0]


def _backend(op: Op, request: dict[str, Any]) -> tuple[str, str]:
    """The backend asked for, if it can run here; else the first that can; and on which device."""
    wanted = request["backend"]
    if wanted is not None and wanted not in op.backends:
        raise UnknownName(f"unknown backend {wanted!r}; {op.name} has: {', '.join(op.backends)}")
    places = {b: place(op, b, request) for b in op.backends if wanted in (None, b)}
    able = [(b, device) for b, (device, reason) in places.items() if not reason]
    if not able:
        why = "; ".join(f"{b}: {reason}" for b, (_, reason) in places.items())
        raise UnknownName(f"{op.name} cannot run here: {why}")
    return min(able, key=lambda found: found[1] != device_of(request))


def _narrowed(op: Op, backend: str, device: str, interpreted: bool, request: dict[str, Any]) -> assay.Target:
    """The operator with the cases of an ordinary proof, as far as this backend takes them; all when one is named."""
    jobs = choose(op, backend, device, interpreted, "default", request["dtype"]).jobs
    target = op_target(op, backend, device=device, dtype=getattr(torch, jobs[0].dtype) if jobs else None)
    if request["case"] or not jobs:
        return target
    dtype = target.dtypes[0]
    chosen = {job.case for job in jobs}
    cases = [case for case in target.cases if case.name in chosen and _takes(op, backend, case, dtype, device)]
    return replace(target, cases=cases) if cases else target


def _takes(op: Op, backend: str, case: Any, dtype: torch.dtype, device: str) -> bool:
    given = case.build(dtype, device, 0)
    tensors = [given.get(name) for name in op.inputs]
    return op.why_not(backend, *tensors, **{o: given[o] for o in op.options}) is None


# bundles


def _bundle(path: str) -> assay.Bundle:
    try:
        return assay.load_bundle(path)
    except (ValueError, OSError) as error:
        raise UnknownName(f"{path} is no bundle that can be read: {error}") from error


def _case_of(bundle: assay.Bundle) -> assay.Case:
    """The bundle's inputs as a case."""
    supply = bundle.supply
    return assay.Case(bundle.meta["case"], lambda make: dict(supply), given=True)


def _of_ours(bundle: assay.Bundle) -> dict[str, Any]:
    """The operator and backend that a bundle names: ours alone, since a stranger's would have to be imported."""
    name, _, backend = bundle.meta["target"].partition(" on ")
    if name not in Op.all() or backend not in Op.get(name).backends:
        raise UnknownName(
            f"the bundle is of {bundle.meta['target']!r}, which is no operator of goldsmith's. Nothing that a bundle "
            "names is imported: say whose it is, goldsmith replay BUNDLE package.module:target."
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
def _telling(tell: Tell) -> Iterator[list[tuple[dict[str, Any], str]]]:
    """Inside, every run is told before it begins and when it is over (20 us each), so that a crash has a place.

    Gives the runs that were ended because they took too long, and where they stood.
    """
    runs, ended = 0, []

    def told(case: str, probe: str, run: str) -> None:
        nonlocal runs
        runs += 1
        now = hooks.RUNNING[-1]
        said = {"case": case, "probe": probe, "run": run, "runs": runs, "seed": now.seed}
        tell(said | ({"found": [asdict(f) for f in now.findings]} if now.findings else {}))

    def over() -> None:
        tell({"over": runs})

    def stopped(now: hooks.RunInProgress, where: str) -> None:
        ended.append(
            ({"case": now.case, "probe": now.probe, "run": now.run, "seed": now.seed, "seconds": now.seconds}, where)
        )

    hooks.RUNS.append(told)
    hooks.ENDED.append(over)
    hooks.STOPPED.append(stopped)
    try:
        yield ended
    finally:
        hooks.RUNS.remove(told)
        hooks.ENDED.remove(over)
        hooks.STOPPED.remove(stopped)
