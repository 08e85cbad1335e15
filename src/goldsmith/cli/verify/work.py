"""What a worker does: lists the proofs behind names, and checks one case of one of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ...assay.checks import NO_MEMORY, check
from ...assay.declare.target import Target
from ...assay.report.check_report import Report
from ...assay.report.html.maps import shrink
from ...assay.report.html.view import NOT_JUDGED, shown_maps
from ...assay.report.results import (
    UNJUDGED,
    ErrorMap,
    Finding,
    Row,
)
from ...assay.support import memory_errors
from ...core.device import machine
from ...core.op import Op
from ...core.tracing import TargetError
from ..targets import Named, UnknownName, find, load_targets, op_target
from .select import Choice, choose, choose_own

BAD_CELLS, GOOD_CELLS, BAD_MAPS = 64, 40, 3


class Session:
    """Keeps the targets of one worker, so that each is declared once."""

    def __init__(self, tell: Callable[[dict[str, Any]], None] = lambda progress: None) -> None:
        self.tell = tell
        self.targets: dict[tuple[str, int, str], Target] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        if request["do"] == "plan":
            return self.plan(request)
        if request["do"] in ("diagnose", "replay"):
            from ..diagnose import work

            return getattr(work, request["do"])(request, self.tell)
        return self.check(request)

    def plan(self, request: dict[str, Any]) -> dict[str, Any]:
        """Every proof behind the names: operator, backend, the cases to run with their dtypes, or why there is none."""
        try:
            found = find(request["names"])
            proofs = [proof for named in found for proof in self._proofs(named, request)]
        except (UnknownName, TargetError) as error:
            return {"problem": str(error)}
        known = sorted({b for named in found if named.op for b in named.op.backends})
        if request["backend"] and known and request["backend"] not in known:
            return {"problem": f"unknown backend {request['backend']!r}; known: {', '.join(known)}"}
        return {"proofs": proofs, "machine": machine().to_json(), "device": device_of(request)}

    def _proofs(self, named: Named, request: dict[str, Any]) -> list[dict[str, Any]]:
        size, dtype = request["size"], request["dtype"]
        if named.target is not None:
            choice = choose_own(named.target, size, dtype)
            return [_proof(named.name, "", device_of(request), choice, "", "", named.source, named.index)]
        op = named.op
        if op is None:
            raise ValueError(f"{named.name} is neither operator nor target")
        proofs = []
        for backend in (b for b in op.backends if request["backend"] in (None, b)):
            device, reason = place(op, backend, request)
            interpreted = backend == "triton" and machine().interpreter
            choice = Choice([], []) if reason else choose(op, backend, device, interpreted, size, dtype)
            if not reason and not choice.jobs:
                reason = f"none of its cases applies to {dtype or 'this device'}"
            how = "interpreter" if interpreted else ""
            proofs.append(_proof(op.name, backend, device, choice, how, reason or "", op.name))
        return proofs

    def check(self, request: dict[str, Any]) -> dict[str, Any]:
        """One case on one backend: a report, or why it cannot run here."""
        device, dtype = request["device"], getattr(torch, request["dtype"])
        try:
            target = self._target(request)
            case = target.case(request["case"])
            reason = self._case_reason(request, case, dtype, device)
            if reason is not None:
                return {"skipped": reason}
            probes = request["probes"] or "default"
            report = check(target, case, dtype=dtype, device=device, seed=request["seed"], probes=probes, raises=False)
        except TargetError as error:
            return {"problem": f"{request['name']}: {error}"}
        except Exception as error:
            if not memory_errors.out_of_memory(error):
                raise
            return {"memory": memory_errors.told(error)}
        finally:
            if device.startswith("cuda"):
                torch.cuda.empty_cache()  # the other workers share the card
        short = report.environment.get(NO_MEMORY)
        if short and report.verdict == UNJUDGED:
            return {"memory": short}
        interpreted = bool(report.environment.get("interpreted"))
        reply = {"report": smaller(one_case(report, request["label"])).to_json(), "interpreted": interpreted}
        return {**reply, "memory": short} if short and report.ok else reply

    def _target(self, request: dict[str, Any]) -> Target:
        key = (request["source"], request["index"], request["backend"])
        if key not in self.targets:
            if ":" in request["source"]:
                self.targets[key] = load_targets(request["source"])[request["index"]]
            else:
                self.targets[key] = op_target(Op.get(request["source"]), request["backend"], device=request["device"])
        return self.targets[key]

    def _case_reason(self, request: dict[str, Any], case: Any, dtype: torch.dtype, device: str) -> str | None:
        if ":" in request["source"]:
            return None
        op = Op.get(request["source"])
        given = case.build(dtype, device, request["seed"])
        tensors = [given.get(name) for name in op.inputs]
        return op.why_not(request["backend"], *tensors, **{o: given[o] for o in op.options})


def _proof(
    operator: str, backend: str, device: str, choice: Choice, how: str, reason: str, source: str, index: int = 0
) -> dict[str, Any]:
    return {
        "operator": operator,
        "backend": backend,
        "device": device,
        "jobs": [job.to_json() for job in choice.jobs],
        "left_out": choice.left_out,
        "how": how,
        "reason": reason,
        "source": source,
        "index": index,
    }


def one_case(report: Report, label: str) -> Report:
    """What float32 inputs said of a 16-bit case, under that case's name: it is no case of its own."""
    if report.ok or report.verdict == UNJUDGED:
        if any(note.id in NOT_JUDGED and note.case == label for note in report.notes):
            return replace(report, cases=[label])  # what was judged beside it is not what was asked

    def mine(item: Any) -> Any:
        if item.case == label:
            return item
        told = {"text": f"{item.text} (float32 inputs)"} if isinstance(item, Finding) else {}
        return replace(item, case=label, **({"run": "float32 inputs"} if isinstance(item, Row | ErrorMap) else told))

    maps: dict[str, ErrorMap] = {}
    for m in report.maps.values():  # the plain run's first: a later one takes the place of what is right alone
        key = f"{label} {m.tensor}"
        maps[key] = mine(m) if key not in maps or (m.bad and not maps[key].bad) else maps[key]
    return replace(
        report,
        cases=[label],
        maps=maps,
        findings=[mine(f) for f in report.findings],
        notes=[mine(n) for n in report.notes],
        rows=[mine(r) for r in report.rows],
    )


def smaller(report: Report) -> Report:
    """The report with its maps reduced to what the page draws: those of its findings, or a good one."""
    most, cells = (1, GOOD_CELLS) if report.ok else (BAD_MAPS, BAD_CELLS)
    return replace(report, maps={key: _reduced(m, cells) for key, m in shown_maps(report, most).items()})


def _reduced(m: ErrorMap, cells: int) -> ErrorMap:
    def small(grid: list[list[float]]) -> list[list[float]]:
        return [[float(f"{v:.4g}") for v in row] for row in shrink(grid, cells)]

    return replace(m, golden=small(m.golden), candidate=small(m.candidate), error_over_limit=small(m.error_over_limit))


def device_of(request: dict[str, Any]) -> str:
    wanted = request["device"]
    if wanted is None:
        return "cuda" if torch.cuda.is_available() and not request["interpret"] else "cpu"
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise UnknownName(f"{wanted!r} is no device; use cpu, cuda or cuda:1") from error
    if device.type not in ("cpu", "cuda"):
        raise UnknownName(f"{wanted!r} is no device that goldsmith knows; use cpu, cuda or cuda:1.")
    if device.type == "cuda" and not torch.cuda.is_available():
        raise UnknownName(f"--device {wanted}: this machine has no CUDA device that torch can use.")
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise UnknownName(f"--device {wanted}: there are {torch.cuda.device_count()} CUDA devices, counted from 0.")
    return str(device)


def place(op: Op, backend: str, request: dict[str, Any]) -> tuple[str, str | None]:
    """Where a backend is proved, and why it cannot be: where no device was named, on the CPU what runs there alone."""
    device = device_of(request)
    reason = machine_reason(op, backend, device)
    if reason and request["device"] is None and device != "cpu" and machine_reason(op, backend, "cpu") is None:
        return "cpu", None
    return device, reason


def machine_reason(op: Op, backend: str, device: str) -> str | None:
    """Why no case at all can run, judged without inputs."""
    probe = torch.empty(1, dtype=torch.float32, device=device)
    return op.backends[backend].machine({op.inputs[0]: probe})
