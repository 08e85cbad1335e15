"""Tasks of a worker process of `goldsmith verify`: list the checks that names stand for; check one case."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, cast

import torch

from ...assay.checks import NO_MEMORY, check
from ...assay.declare.case import Case
from ...assay.declare.target import Target
from ...assay.report.check_report import Report
from ...assay.report.html.maps import shrink
from ...assay.report.html.view import NOT_JUDGED, shown_maps
from ...assay.report.results import UNJUDGED, ErrorMap
from ...assay.support import memory_errors
from ...core.device import machine
from ...core.op import Op
from ...core.tracing import TargetError
from ..placement import device_of, place
from ..targets import ResolvedName, find, op_target
from ..user_targets import UnknownName, load_targets, missing_module
from ..workers.candidates import add_replaced, in_its_own_process
from ..workers.compile_locks import share_compiles
from .selection import Choice, choose, choose_own

if TYPE_CHECKING:
    from ..json_types import MachineFacts
    from ..workers.messages import CheckReply, CheckRequest, EndRequest, ListedCheck, ListReply, ListRequest
    from .rank_tasks import RankTasks

TWIN = "float32 inputs"  # name of the run that repeats a 16-bit case with float32 inputs
BAD_CELLS, GOOD_CELLS, BAD_MAPS = 64, 40, 3


def no_backend(backend: str, name: str) -> str:
    return (
        f"--backend {backend} selects a backend of goldsmith's operators, but {name} is a target of your own. Leave "
        "the option out."
    )


class VerifyTasks:
    """Answers requests; keeps the targets of its worker, so that each is declared once."""

    def __init__(self) -> None:
        self.targets: dict[tuple[str, int, str], Target] = {}
        self._ranks: RankTasks | None = None

    def answer(self, request: ListRequest | CheckRequest | EndRequest) -> ListReply | CheckReply:
        if request["do"] == "end":
            self.ranks.end()
            return {}
        return self.list_checks(request) if request["do"] == "list" else self.check(request)

    def close(self) -> None:
        """Ends the ranks, if there are any."""
        if self._ranks is not None:
            self._ranks.close()

    @property
    def ranks(self) -> RankTasks:
        """What --ranks needs; imports torch.distributed, for which nothing else has to wait."""
        if self._ranks is None:
            from .rank_tasks import RankTasks

            self._ranks = RankTasks()
        return self._ranks

    def list_checks(self, request: ListRequest) -> ListReply:
        """Every check that the names stand for: operator, backend, and its jobs or the reason why it cannot run."""
        try:
            resolved = find(request["names"])
            checks = [check for named in resolved for check in self._checks(named, request)]
        except (UnknownName, TargetError) as error:
            return {"problem": str(error)}
        own = next((named for named in resolved if named.target is not None), None)
        if request["backend"] and own is not None:
            return {"problem": no_backend(request["backend"], own.source)}
        known = sorted({b for named in resolved if named.op for b in named.op.backends})
        if request["backend"] and known and request["backend"] not in known:
            return {"problem": f"unknown backend {request['backend']!r}; known: {', '.join(known)}"}
        return {"checks": checks, "machine": cast("MachineFacts", machine().to_json()), "device": device_of(request)}

    def _checks(self, named: ResolvedName, request: ListRequest) -> list[ListedCheck]:
        size, dtype = request["size"], request["dtype"]
        on_ranks = request.get("ranks") is not None
        alone = "" if getattr(named.target, "placements", None) is None else "it runs on several ranks; add --ranks 2"
        refusal = self.ranks.refusal(named) if on_ranks else alone
        if refusal:
            return [_listed(named.name, "", device_of(request), Choice([], []), "", refusal, named.source, named.index)]
        if on_ranks:
            device, choice = self.ranks.choose(named, request)
            backend = "" if named.target is not None else f"{request['ranks']} ranks"
            return [_listed(named.name, backend, device, choice, "", "", named.source, named.index)]
        if named.target is not None:
            choice = choose_own(named.target, size, dtype)
            return [_listed(named.name, "", device_of(request), choice, "", "", named.source, named.index)]
        op = named.op
        if op is None:
            raise ValueError(f"{named.name} is neither an operator nor a target")
        checks = []
        for backend in (b for b in op.backends if request["backend"] in (None, b)):
            device, reason = place(op, backend, request)
            interpreted = backend == "triton" and machine().interpreter
            choice = Choice([], []) if reason else choose(op, backend, device, interpreted, size, dtype)
            if not reason and not choice.jobs:
                reason = f"none of its cases applies to {dtype or 'this device'}"
            how = "interpreter" if interpreted else ""
            checks.append(_listed(op.name, backend, device, choice, how, reason or "", op.name))
        return checks

    def check(self, request: CheckRequest) -> CheckReply:
        """Check one case on one backend: a report, or the reason why it cannot run."""
        device, dtype = request["device"], getattr(torch, request["dtype"])
        if device.startswith("cuda") and request["backend"] == "triton":
            share_compiles()
        try:
            if request.get("ranks") is not None:
                report = self.ranks.check(request)
                return {"report": with_small_maps(one_case(report, request["label"])).to_json(), "interpreted": False}
            target = self._target(request)
            case = target.case(request["case"])
            reason = self._case_reason(request, case, dtype, device)
            if reason is not None:
                return {"skipped": reason}
            probes = request["probes"] or "default"
            report = check(target, case, dtype=dtype, device=device, seed=request["seed"], probes=probes, raises=False)
        except TargetError as error:
            return {"problem": f"{request['name']}: {error}"}
        except ModuleNotFoundError as error:
            return {"problem": f"{request['name']}: {missing_module(error)}"}
        except Exception as error:
            if not memory_errors.out_of_memory(error):
                raise
            return {"memory": memory_errors.out_of_memory_text(error)}
        finally:
            memory_errors.release(device)  # other workers share the GPU
        add_replaced(report, target)
        shortage = report.environment.get(NO_MEMORY)
        if shortage and report.verdict == UNJUDGED:
            return {"memory": shortage}
        interpreted = bool(report.environment.get("interpreted"))
        shown = with_small_maps(one_case(report, request["label"]))
        reply: CheckReply = {"report": shown.to_json(), "interpreted": interpreted}
        if shortage and report.ok:
            reply["memory"] = shortage
        return reply

    def _target(self, request: CheckRequest) -> Target:
        key = (request["source"], request["index"], request["backend"])
        if key not in self.targets:
            if ":" in request["source"]:
                target = load_targets(request["source"])[request["index"]]
                self.targets[key] = in_its_own_process(
                    target, request["source"], request["index"], request["device"], request.get("limit")
                )
            else:
                self.targets[key] = op_target(Op.get(request["source"]), request["backend"], device=request["device"])
        return self.targets[key]

    def _case_reason(self, request: CheckRequest, case: Case, dtype: torch.dtype, device: str) -> str | None:
        if ":" in request["source"]:
            return None
        op = Op.get(request["source"])
        arguments = case.build(dtype, device, request["seed"])
        tensors = [arguments.get(name) for name in op.inputs]
        return op.why_not(request["backend"], *tensors, **{o: arguments[o] for o in op.options})


def _listed(
    operator: str, backend: str, device: str, choice: Choice, how: str, reason: str, source: str, index: int = 0
) -> ListedCheck:
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
    """The report under one case name: results of the float32 run of a 16-bit case are marked as such."""
    if report.ok or report.verdict == UNJUDGED:
        if any(note.id in NOT_JUDGED and note.case == label for note in report.notes):
            return replace(report, cases=[label])  # only its float32 run was judged, which was not requested

    maps: dict[str, ErrorMap] = {}
    for m in report.maps.values():  # the plain run comes first; a later map replaces only one without errors
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


def with_small_maps(report: Report) -> Report:
    """The report with only the maps that the page draws, at the resolution that it draws."""
    count, cells = (1, GOOD_CELLS) if report.ok else (BAD_MAPS, BAD_CELLS)
    return replace(report, maps={key: _reduced_map(m, cells) for key, m in shown_maps(report, count).items()})


def _reduced_map(m: ErrorMap, cells: int) -> ErrorMap:
    def coarse(grid: list[list[float]]) -> list[list[float]]:
        return [[float(f"{v:.4g}") for v in row] for row in shrink(grid, cells)]

    return replace(
        m, golden=coarse(m.golden), candidate=coarse(m.candidate), error_over_limit=coarse(m.error_over_limit)
    )
