"""Collects the evidence of a failing case: the stage table, an analysis of the first wrong tensor, and other runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from ...core.tracing import TargetError
from ..bounds.bounded import SLACK
from ..execute.records import CandidateRun
from ..golden.golden_tensor import GoldenTensor
from ..judge import ladder
from ..judge.examination import Examination
from ..probes.maps import CELLS_BAD, error_map
from ..report.check_report import Report
from ..report.results import CERTAIN, QUALITY, REFERENCE_FAULT, RUNGS, Finding, Location
from ..support.deadline import Pace
from .causes.likelihood import SURE
from .causes.rank import strength
from .causes.rules.reading import Reading
from .experiments.cotangents import carriers
from .experiments.decision_check import examine_decision
from .experiments.empty_groups import filled_groups
from .experiments.influence import influence
from .experiments.isolate import Isolation, handed_in, isolate, named, order
from .experiments.nan_leaks import first_nan_leak
from .experiments.provenance import provenance
from .experiments.runs import facts
from .experiments.tensor_operators import tensor_operators
from .facts.arithmetic import arithmetic
from .facts.evidence import CULPRIT, INHERITED, NO_TIME, NOT_TRIED, OBSERVED, OK, Evidence, StageState
from .search import Search, search
from .search.engine import seconds

_LATER = ("second_call", "repeats", "layouts", "scaling")  # probes of runs other than the first
Result = TypeVar("Result")
_WHAT_IF, _MORE = 12.0, 36.0  # processor seconds at most for changed goldens, and for more of them at the end
# least cost of a step, as a share of the time of the check's first probe, which runs all references
_ISOLATION, _GOLDEN, _RUN = 0.5, 0.1, 0.2


def begin(examination: Examination, report: Report) -> Evidence:
    """The evidence that the check alone gives."""
    evidence = Evidence(
        report,
        scalars={n: v for n, v in examination.material.scalars.items()},
        sizes=dict(examination.material.sizes),
        dtype=str(examination.dtype).removeprefix("torch."),
        unused=_unused(examination),
        grouped=any(not t.is_floating_point() for t in examination.material.inputs.values()),
    )
    first = surest(report)
    if first is not None:
        evidence.tensor, evidence.location = first.tensor, first.location
        evidence.first_wrong = first.tensor
    run = examination._first
    if report.verdict != REFERENCE_FAULT and run is not None and run.error is not None:
        message = (str(run.error).strip().splitlines() or [""])[0]
        evidence.fail(f"{type(run.error).__name__}: {message}"[:300])
        evidence.first_wrong = evidence.tensor = run.phase
    return evidence


def _unused(examination: Examination) -> dict[str, list[int]]:
    """Integer inputs -> groups that have no members, as far as a size gives the number of groups."""
    unused = {}
    for name, t in examination.material.inputs.items():
        if t.is_floating_point() or t.dtype == torch.bool or not t.numel() or int(t.min()) < 0:
            continue
        top = int(t.max())
        sizes = [n for n in examination.material.sizes.values() if isinstance(n, int) and top < n <= 2 * top + 2]
        known = set(t.flatten().tolist())
        groups = min(sizes, default=top + 1)
        if len(known) < groups < 2 * len(known) + 2:  # otherwise they number no groups: identifiers, seeds, hashes
            unused[name] = [i for i in range(groups) if i not in known]
    return unused


@dataclass(frozen=True)
class Depth:
    """How much evidence to collect.

    repeats    of the same call
    runs       prefixes of the names of other runs; None: all of them; (): none
    influence  "input[axis]" to examine; None: all of them; (): none
    sent       send output gradients one at a time
    whatif     causes whose changed goldens are tried; None: all
    """

    repeats: int = 3
    runs: tuple[str, ...] | None = None
    influence: tuple[str, ...] | None = None
    whatif: frozenset[str] | None = None
    sent: bool = False


def collect(
    examination: Examination, evidence: Evidence, depth: Depth = Depth(), *,
    spent: Callable[[float], bool] = lambda more: False, wanted: str | None = None,
) -> Isolation:  # fmt: skip
    """Collect all evidence of an examination whose check has failed; returns its stage table.

    The steps that usually tell most come first. spent(more) is True if the budget is over, or would be after `more`
    seconds. A step without enough time, or one that raises, is left out, and `evidence.left_out` says why; the other
    steps still run. With `wanted`, collecting stops once another stage is certainly the first wrong one.
    """
    first = surest(evidence.report)
    unjudged = examination._first is None or examination._first.error is not None or examination._ref is None
    if evidence.report.verdict == REFERENCE_FAULT or first is None or unjudged:
        if evidence.error and not spent(0.0):
            evidence.filled = _step(evidence, "filled groups", lambda: filled_groups(examination)) or ""
        return Isolation()
    time = _Time(examination, evidence, spent)
    isolated = (
        _step(evidence, "isolation", lambda: isolate(examination)) if time.for_("isolation", _ISOLATION) else None
    )
    table = isolated or _as_checked(examination)
    evidence.stages, evidence.first_wrong = table.stages, table.first_wrong or first.tensor
    _written_over(evidence, table)
    _chosen(evidence, table)
    if wanted not in (None, table.first_wrong, evidence.first_wrong) and _certain(evidence, table.first_wrong):
        return table
    if table.first_wrong is not None:
        _step(evidence, "patterns", lambda: _first_wrong(examination, evidence, table))
    own = table.own or examination.first
    evidence.other, evidence.reused = _others(examination, own, evidence.tensor), own.reused
    if time.for_("where NaN begins", 0.0):
        evidence.nonfinite_origin = _step(evidence, "provenance", lambda: provenance(examination, own))
    changed = None
    if depth.whatif != frozenset() and table.first_wrong in named(own) and time.for_("changed goldens", _GOLDEN):
        changed = _step(evidence, "whatif", lambda: _what_if(examination, evidence, own, depth.whatif, time))
    if depth.runs != () and time.for_("other runs", _RUN):
        spent_on_runs = time.pace("other runs")
        _step(evidence, "runs", lambda: facts(
            examination, repeats=depth.repeats, only=depth.runs, into=evidence.runs, spent=spent_on_runs
        ))  # fmt: skip
    if time.for_("the choice", 0.0):
        _step(evidence, "the choice", lambda: examine_decision(examination, evidence))
        evidence.operators |= _step(evidence, "operators", lambda: tensor_operators(examination, evidence)) or set()
    if table.first_wrong is None and first.probe in _LATER:
        evidence.first_wrong = _first_in_other_runs(evidence) or first.tensor
    if table.first_wrong is None and not _first_in_other_runs(evidence) and time.for_("leaks", 0.0):
        evidence.first_wrong = _step(evidence, "leaks", lambda: first_nan_leak(examination)) or evidence.first_wrong
    _before_what_inherits(evidence)
    if depth.influence != () and table.first_wrong is not None and time.for_("influence", _RUN):
        known = table.first_wrong in named(examination.first) and not table.suspects
        looked = {table.first_wrong} if known else examination.bad | {table.first_wrong}
        only, pace = depth.influence, time.pace("influence")
        influences = _step(evidence, "influence", lambda: influence(examination, looked, only=only, spent=pace))
        evidence.influence = influences or {}
    if depth.sent and table.first_wrong is not None and time.for_("output gradients", _RUN):
        first_wrong, pace = table.first_wrong, time.pace("output gradients")
        evidence.carriers = _step(evidence, "cotangents", lambda: carriers(examination, own, first_wrong, spent=pace))
    nothing = not (evidence.whatif or evidence.memory or depth.whatif)
    more = changed is not None and changed.left and nothing and strength(evidence) < SURE
    if changed is not None and more and time.for_("changed goldens", 0.0):
        _step(evidence, "whatif", lambda: _search_within(evidence, changed, _MORE, time))
    return table


class _Time:
    """Decides whether a step has time, and records in `evidence.left_out` the steps that have none."""

    def __init__(self, examination: Examination, evidence: Evidence, spent: Callable[[float], bool]) -> None:
        self.evidence, self.spent, self.checked = evidence, spent, examination.seconds.get("values", 0.0)

    def for_(self, step: str, share: float) -> bool:
        """True if a step may begin that takes this share of the time of the check's first probe."""
        return not self._lacks(step, share * self.checked)

    def pace(self, step: str) -> Pace:
        """The pace for the loop of such a step."""
        return Pace(lambda more: self._lacks(step, more))

    def _lacks(self, step: str, more: float) -> bool:
        lacks = self.spent(more)
        if lacks:
            self.evidence.left_out[step] = NO_TIME
        return lacks


def _as_checked(examination: Examination) -> Isolation:
    """The stage table of the check's own rows, which cannot tell a wrong stage from one that inherits an error."""
    table = Isolation(own=examination.first)
    rows = {row.tensor: row for row in examination.rows if row.run == "values"}
    for name in order(examination.ref, examination.first):
        row = rows.get(name)
        if row is not None:
            state, text = (NOT_TRIED, "wrong; it was not isolated") if row.state == "bad" else (OK, "")
            kind = named(examination.first)[name][0] if name in named(examination.first) else "stage"
            table.stages.append(StageState(name, kind, row.max_over_bound, None, state, text))
    table.first_wrong = next((s.name for s in table.stages if s.state == NOT_TRIED), None)
    return table


def _certain(evidence: Evidence, first: str | None) -> bool:
    """True if no later step can name another stage."""
    state = None if first is None else evidence.stage(first)
    return state is not None and state.state in (CULPRIT, OBSERVED, NOT_TRIED)


def _written_over(evidence: Evidence, table: Isolation) -> None:
    """Put a result first that overwrites an input in place: everything else that reads this input inherits the error.

    Without such a result the stage table stays as it is.
    """
    modified = [m.tensor for m in evidence.memory if m.kind == "input_modified"]
    for fact in evidence.memory:
        overwritten = next((n for n in modified if fact.kind == "aliased" and fact.values["with"] == n), None)
        if overwritten is None or evidence.stage(fact.tensor) is None:
            continue
        wrong = dict.fromkeys((CULPRIT, OBSERVED, NOT_TRIED), INHERITED)
        reason = f"{fact.tensor} overwrites {overwritten}, which it may read"
        evidence.stages = table.stages = [
            replace(s, state=CULPRIT, text=f"written over {overwritten}") if s.name == fact.tensor
            else replace(s, state=wrong[s.state], text=reason) if s.state in wrong and s.name.endswith(".grad") else s
            for s in table.stages
        ]  # fmt: skip
        evidence.first_wrong, table.first_wrong, table.suspects = fact.tensor, fact.tensor, []
        return


def _chosen(evidence: Evidence, table: Isolation) -> None:
    """Make an illegal decision the first wrong stage if everything before it is right."""
    illegal = {f.tensor for f in evidence.report.findings if f.probe == "decisions" and f.rung == CERTAIN}
    for i, s in enumerate(table.stages):
        if s.state in (CULPRIT, OBSERVED, NOT_TRIED, INHERITED) or (s.propagated or 0.0) > SLACK:
            return
        if s.name in illegal:
            table.stages[i] = replace(s, state=CULPRIT, text="an illegal choice, made from right values")
            evidence.stages, evidence.first_wrong = table.stages, s.name
            return


def _before_what_inherits(evidence: Evidence) -> None:
    """If the first wrong stage only inherits, use the earlier stage that goes wrong in another run.

    The error that it inherits is too small to be seen in the first run.
    """
    first, later = evidence.stage(evidence.first_wrong or ""), evidence.stage(_first_in_other_runs(evidence))
    if first is None or later is None or first.state != INHERITED:
        return
    if evidence.stages.index(later) < evidence.stages.index(first):
        evidence.first_wrong = later.name


def _first_in_other_runs(evidence: Evidence) -> str:
    """The first wrong stage of the first other run that fails."""
    return next((fact.first for fact in evidence.runs.values() if fact.first), "")


def _step(evidence: Evidence, name: str, run: Callable[[], Result]) -> Result | None:
    try:
        return run()
    except TargetError:
        raise
    except Exception as error:  # noqa: BLE001 - a diagnosis never raises for what a wrong kernel makes of its numbers
        evidence.left_out[name] = f"{type(error).__name__}: {str(error).strip()[:200]}"
        return None


def surest(report: Report) -> Finding | None:
    """The surest finding; findings about the golden come before all others."""
    failing = [f for f in report.findings if f.rung != QUALITY]
    return min(failing, key=lambda f: (f.probe != "golden", RUNGS.index(f.rung)), default=None)


def _first_wrong(examination: Examination, evidence: Evidence, table: Isolation) -> None:
    """Analyse the first wrong tensor: from right inputs if it could be isolated, else from the candidate's own run."""
    name = table.first_wrong or ""
    state = evidence.stage(name)
    own = table.own or examination.first
    isolated = table.run is not None and name in named(table.run) and state is not None and state.isolated is not None
    run = table.run if isolated and table.run is not None and state is not None and state.state == "culprit" else own
    kind, got = (named(run) if run is own else handed_in(run)).get(name, ("stage", None))
    against = examination.ref.reference(name, kind, noise=False)
    evidence.tensor, evidence.location = name, None
    if against is None:
        return
    evidence.golden = against.bounded.value
    if got is None:
        return
    evidence.got, evidence.stored = got.detach().double(), str(got.dtype).removeprefix("torch.")
    evidence.location = _location(evidence.got, against)
    if got.is_floating_point() and got.numel() and got.shape == against.bounded.value.shape:
        evidence.map = error_map(
            examination.label, "isolated" if run is table.run else "values", got, against, CELLS_BAD, True
        )
    evidence.ratios, evidence.permutations = arithmetic(examination, name, got, against)


def _what_if(
    examination: Examination, evidence: Evidence, own: CandidateRun, causes: frozenset[str] | None, time: _Time
) -> Search | None:
    got = named(own)[evidence.tensor][1]
    if got is not None and _all_poison(evidence, got):
        return None
    changed = None if got is None else search(examination, evidence.tensor, got, own, causes=causes)
    if changed is not None:
        _search_within(evidence, changed, _WHAT_IF, time)
        evidence.operators = changed.operators
        evidence.alike = changed.alike
    return changed


def _all_poison(evidence: Evidence, got: Tensor) -> bool:
    """True if all wrong elements are unwritten memory, whose NaN no formula makes."""
    left = any(m.kind == "never_written" and m.tensor == evidence.tensor for m in evidence.memory)
    if not left or evidence.golden is None or evidence.golden.shape != got.shape:
        return False
    r = Reading(evidence)
    return r.wrong is not None and r.wrong_count > 0 and bool(torch.isnan(got.double()[r.wrong]).all())


def _search_within(evidence: Evidence, changed: Search, limit: float, time: _Time) -> None:
    over, spent = seconds(limit), time.pace("changed goldens")
    evidence.whatif = changed.run(lambda: spent() or over())
    evidence.left_out |= {f"changed goldens, {kind}": why for kind, why in changed.left_out.items()}


def _location(got: Tensor, against: GoldenTensor) -> Location | None:
    bounded = against.bounded
    if got.shape != bounded.value.shape:
        return None
    same = torch.isnan(got) & torch.isnan(bounded.value) | (got == bounded.value)
    wrong = ~((got - bounded.value).abs() <= SLACK * bounded.bound) & ~same
    return ladder.locate(against.name, wrong, against) if bool(wrong.any()) else None


def _others(examination: Examination, own: CandidateRun, tensor: str) -> dict[str, tuple[Tensor, Tensor]]:
    """The other results and stages: (candidate, golden) by name."""
    others: dict[str, tuple[Tensor, Tensor]] = {}
    for name, (_, got) in named(own).items():
        golden = examination.ref.values.get(name)
        if name != tensor and got is not None and golden is not None and golden.shape == got.shape:
            others[name] = got.detach().double(), golden.double()
    return others


def described(examination: Examination) -> dict[str, Any]:
    """The data that reproduce the case: name, sizes, seed, dtype, device, threads and layouts of the inputs."""
    inputs = examination.material.inputs
    return {
        "name": examination.case.name,
        "sizes": dict(examination.material.sizes),
        "shapes": {n: list(t.shape) for n, t in inputs.items()},
        "seed": examination.seed,
        "dtype": str(examination.dtype).removeprefix("torch."),
        "device": str(examination.device),
        "threads": torch.get_num_threads(),
        "strides": {n: list(t.stride()) for n, t in inputs.items()},
    }
