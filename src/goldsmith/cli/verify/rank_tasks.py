"""The part of `goldsmith verify --ranks` in a worker: which jobs there are, and the check of one on a pool of ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ...assay.checks import check as check_in_one_process
from ...assay.declare.case import Case
from ...assay.ranks import RankTarget
from ...assay.ranks import check as check_on_ranks
from ...assay.ranks.launched import LaunchedRanks, end_without_a_run
from ...assay.ranks.pool import RankError, RankGroup, RankPool
from ...assay.report.check_report import Report
from ...assay.report.results import CERTAIN, FAIL, REFERENCE_FAULT, Finding
from ...core.op import Op
from ...core.tracing import TargetError
from ..placement import device_of
from ..targets import ResolvedName
from ..user_targets import UnknownName, load_targets
from .launcher import LaunchedRank
from .rank_targets import RankLayout, explained_target, layouts, loadable, operator_target, rank_cases
from .selection import ON_RANKS, Choice, Job, elements

if TYPE_CHECKING:
    from ..workers.messages import CheckRequest, ListRequest

CASES = 3  # of an operator, in an ordinary run


class RankTasks:
    """Chooses jobs and checks; keeps one pool of ranks, which it starts again after a rank was lost."""

    def __init__(self) -> None:
        self.pool: RankGroup | None = None

    def refusal(self, named: ResolvedName) -> str:
        """Why this cannot run on ranks, or ""."""
        if named.target is not None and not isinstance(named.target, RankTarget):
            return "it does not say how its tensors lie on ranks; declare it as assay.ranks.RankTarget(placements=...)"
        if named.op is not None and not named.op.axes:
            return "its Op(...) does not name its axes, so it takes no DTensors"
        return ""

    def choose(self, named: ResolvedName, request: ListRequest) -> tuple[str, Choice]:
        """The device, and the jobs: a user's target in every case, an operator in some cases and several layouts."""
        world = request["ranks"] or 1
        device = _device(request, world)
        quick, thorough = request["size"] == "quick", request["size"] == "thorough"
        if isinstance(named.target, RankTarget):
            named.target.sizes(world)
            dtypes = [_name(d) for d in named.target.dtypes] if request["dtype"] is None else [request["dtype"]]
            pairs = [(c, d) for c in named.target.cases for d in (dtypes[:1] if c.given else dtypes)]
            jobs = [_job(c, d, c.name if len(dtypes) == 1 or c.given else f"{c.name} {d}") for c, d in pairs]
            return device, Choice(jobs[:1] if quick else jobs, _rest(len(jobs) - 1, quick))
        op = named.op
        if op is None:
            raise ValueError(f"{named.name} is neither an operator nor a target on ranks")
        cases = rank_cases(op, world)
        chosen = cases if thorough else cases[: 1 if quick else CASES]
        jobs = []
        for case in chosen:
            tried = layouts(op, case, world)
            for layout in tried[:1] if quick else tried:
                jobs.append(_job(case, request["dtype"] or "float32", f"{case.name} {layout.name}", layout.name))
        return device, Choice(jobs, _rest(len(op.cases) - len(chosen), True))

    def check(self, request: CheckRequest) -> Report:
        """The report of one job."""
        dtype, seed, pool = getattr(torch, request["dtype"]), request["seed"], self._ready(request)
        if ":" in request["source"]:
            target = loadable(load_targets(request["source"])[request["index"]], request["source"], request["index"])
            case = target.case(request["case"])
            return check_on_ranks(target, pool, case, dtype=None if case.given else dtype, seed=seed, raises=False)
        op = Op.get(request["source"])
        case = next(c for c in op.cases if c.name == request["case"])
        layout = next(x for x in layouts(op, case, pool.world) if x.name == request["layout"])
        return self._operator(op, case, layout, dtype, seed, pool)

    def _operator(
        self, op: Op, case: Case, layout: RankLayout, dtype: torch.dtype, seed: int, pool: RankGroup
    ) -> Report:
        try:
            target = operator_target(op, layout, pool)
            report = check_in_one_process(target, case, dtype=dtype, seed=seed, probes=ON_RANKS, raises=False)
        except RankError as error:
            finding = Finding(CERTAIN, "ranks", "", None, None, None, str(error), case.name)
            return Report(op.name, FAIL, findings=[finding], cases=[case.name], dtypes=[_name(dtype)])
        if report.verdict in (FAIL, REFERENCE_FAULT) and pool.alive:
            more = check_on_ranks(explained_target(op, layout), pool, case, dtype=dtype, seed=seed, raises=False)
            report.findings = [f for f in more.findings if f.probe == "ranks"] + report.findings
            report.environment["ranks"] = more.environment["ranks"]
        return report

    def _ready(self, request: CheckRequest) -> RankGroup:
        world, device = request["ranks"] or 1, request["device"].partition(":")[0]
        if self.pool is None or not self.pool.alive:
            launch = LaunchedRank.of()
            if launch is not None:
                if self.pool is not None:
                    raise TargetError("the launcher's ranks ended in an earlier case; start the command again")
                try:
                    self.pool = LaunchedRanks(device=device, local_rank=launch.local_rank, limit_s=request["limit"])
                except RankError as error:  # a rank that did not start
                    raise TargetError(f"{error}; start all of them") from error
            else:
                self.pool = RankPool(world, device=device, limit_s=request["limit"])
        return self.pool

    def close(self) -> None:
        if self.pool is not None:
            self.pool.close()

    def end(self) -> None:
        """Ends the ranks, also those of a launcher for which there was nothing to run."""
        self.close()
        if self.pool is None and LaunchedRank.of() is not None:
            end_without_a_run()


def _device(request: ListRequest, world: int) -> str:
    """The device named, otherwise GPUs if every rank of this host gets one."""
    if request["device"] is not None:
        device = device_of(request).partition(":")[0]
        if device == "cuda" and LaunchedRank.of() is None and torch.cuda.device_count() < world:
            raise UnknownName(
                f"--ranks {world} on GPUs needs as many; this machine has {torch.cuda.device_count()}. "
                "Use --device cpu, or start the command with torchrun on several hosts."
            )
        return device
    launch = LaunchedRank.of()
    local = launch.local_world if launch is not None else world
    return "cuda" if torch.cuda.device_count() >= local and not request["interpret"] else "cpu"


def _job(case: Case, dtype: str, label: str, layout: str = "") -> Job:
    return Job(case.name, dtype, label, ON_RANKS, 0.5 + elements(case) / 2e4, layout)


def _rest(number: int, some: bool) -> list[tuple[int, str]]:
    return [(number, "cases on ranks (run with --thorough)")] if some and number > 0 else []


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
