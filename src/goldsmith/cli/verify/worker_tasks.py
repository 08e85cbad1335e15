"""What a worker does: lists the proofs behind names, and checks one case of one of them."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from ...assay import limits
from ...assay.case import Case
from ...assay.check import NO_MEMORY, check
from ...assay.html.maps import shrink
from ...assay.html.view import NOT_JUDGED, shown_maps
from ...assay.results import UNJUDGED, ErrorMap, Report, TargetError
from ...assay.target import Target
from ...core.device import machine
from ...core.op import Op
from ..placement import device_of, place
from ..targets import ResolvedName, UnknownName, find, load_targets, op_target
from .selection import Choice, choose, choose_own

if TYPE_CHECKING:
    from ..json_types import MachineFacts
    from ..workers.messages import CheckReply, CheckRequest, PlanReply, PlanRequest, ProofMessage

TWIN = "float32 inputs"  # name of the run that holds a 16-bit case to its float32 inputs
BAD_CELLS, GOOD_CELLS, BAD_MAPS = 64, 40, 3


class VerifyTasks:
    """Keeps the targets of one worker, so that each is declared once."""

    def __init__(self) -> None:
        self.targets: dict[tuple[str, int, str], Target] = {}

    def answer(self, request: PlanRequest | CheckRequest) -> PlanReply | CheckReply:
        return self.plan(request) if request["do"] == "plan" else self.check(request)

    def plan(self, request: PlanRequest) -> PlanReply:
        """Every proof behind the names: operator, backend, the cases to run with their dtypes, or why there is none."""
        try:
            found = find(request["names"])
            proofs = [proof for named in found for proof in self._proofs(named, request)]
        except (UnknownName, TargetError) as error:
            return {"problem": str(error)}
        known = sorted({b for named in found if named.op for b in named.op.backends})
        if request["backend"] and known and request["backend"] not in known:
            return {"problem": f"unknown backend {request['backend']!r}; known: {', '.join(known)}"}
        return {"proofs": proofs, "machine": cast("MachineFacts", machine().to_json()), "device": device_of(request)}

    def _proofs(self, named: ResolvedName, request: PlanRequest) -> list[ProofMessage]:
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

    def check(self, request: CheckRequest) -> CheckReply:
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
            if not limits.out_of_memory(error):
                raise
            return {"memory": limits.told(error)}
        finally:
            if device.startswith("cuda"):
                torch.cuda.empty_cache()  # the other workers share the card
        short = report.environment.get(NO_MEMORY)
        if short and report.verdict == UNJUDGED:
            return {"memory": short}
        interpreted = bool(report.environment.get("interpreted"))
        shown = smaller(one_case(report, request["label"]))
        reply: CheckReply = {"report": shown.to_json(), "interpreted": interpreted}
        if short and report.ok:
            reply["memory"] = short
        return reply

    def _target(self, request: CheckRequest) -> Target:
        key = (request["source"], request["index"], request["backend"])
        if key not in self.targets:
            if ":" in request["source"]:
                self.targets[key] = load_targets(request["source"])[request["index"]]
            else:
                self.targets[key] = op_target(Op.get(request["source"]), request["backend"], device=request["device"])
        return self.targets[key]

    def _case_reason(self, request: CheckRequest, case: Case, dtype: torch.dtype, device: str) -> str | None:
        if ":" in request["source"]:
            return None
        op = Op.get(request["source"])
        given = case.build(dtype, device, request["seed"])
        tensors = [given.get(name) for name in op.inputs]
        return op.why_not(request["backend"], *tensors, **{o: given[o] for o in op.options})


def _proof(
    operator: str, backend: str, device: str, choice: Choice, how: str, reason: str, source: str, index: int = 0
) -> ProofMessage:
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

    maps: dict[str, ErrorMap] = {}
    for m in report.maps.values():  # the plain run's first: a later one takes the place of what is right alone
        key = f"{label} {m.tensor}"
        if key not in maps or (m.bad and not maps[key].bad):
            maps[key] = m if m.case == label else replace(m, case=label, run=TWIN)
    return replace(
        report,
        cases=[label],
        maps=maps,
        findings=[f if f.case == label else replace(f, case=label, text=f"{f.text} ({TWIN})") for f in report.findings],
        notes=[replace(n, case=label) for n in report.notes],
        rows=[r if r.case == label else replace(r, case=label, run=TWIN) for r in report.rows],
    )


def smaller(report: Report) -> Report:
    """The report with its maps reduced to what the page draws: those of its findings, or a good one."""
    most, cells = (1, GOOD_CELLS) if report.ok else (BAD_MAPS, BAD_CELLS)
    return replace(report, maps={key: _reduced(m, cells) for key, m in shown_maps(report, most).items()})


def _reduced(m: ErrorMap, cells: int) -> ErrorMap:
    def small(grid: list[list[float]]) -> list[list[float]]:
        return [[float(f"{v:.4g}") for v in row] for row in shrink(grid, cells)]

    return replace(m, golden=small(m.golden), candidate=small(m.candidate), error_over_limit=small(m.error_over_limit))
