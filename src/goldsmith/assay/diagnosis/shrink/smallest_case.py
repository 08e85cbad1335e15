"""Makes the failing case small: checks every trial and compares its stage and best cause with the known ones.

A trial runs only what the cause rests on: if terms or ratios name the cause, no other run is repeated.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from ... import probes as catalogue
from ...checks import examine
from ...declare.binding import parameters
from ...declare.case import Case
from ...judge.examination import Examination
from ...report.check_report import Report
from ...report.results import FAIL, Finding
from ..causes.rank import by_rules, rank
from ..collect import Depth, begin, collect, surest
from ..crash_safety import crash_count
from ..facts.evidence import NO_TIME, Evidence
from .steps import Shrunk, Trial, shrink

_CHECKS = 2.0  # cost of a trial (check and cause), in units of the first probe's time
_AGAIN, _LEAST = 2.0, 1.0  # limits of a repeated check: factor of the first one's time, and seconds at least
_ALWAYS = ("values", "decisions", "poison", "guard", "alias")
_GROUPS = (
    ("zeroed memory",), ("second call", "other inputs", "back"), ("repeat",), ("1 thread", "2 threads"),
    ("golden saved",), ("layout",), ("scale", "offset", "flat"),
)  # fmt: skip


def smallest_case(
    examination: Examination, evidence: Evidence, stage: str | None, cause: str, *, spent: Callable[[float], bool],
    cause_shown: str = "", over: Callable[[float], bool] = lambda more: False,
) -> tuple[Shrunk, Examination]:  # fmt: skip
    """The smallest case with the same stage and the same best cause by rules; at worst the examined case.

    While shrinking, only the rules decide, because the learned ranking depends on what the case looks like. At the end
    the ranking counts too: a full diagnosis of the small case must give `cause_shown`. Otherwise the case is too small
    to tell causes apart. over: True if there is no time for that diagnosis.
    """
    same = _Same(examination, evidence, stage, cause, spent)
    predict = _Costs(examination, _CHECKS * examination.seconds.get("values", 0.0))
    shrunk = shrink(
        examination.case, same, least=_least(examination), dtype=examination.dtype, seed=examination.seed, spent=spent,
        predict=predict, shows_cause=_ShowsCause(same, cause_shown, over),
    )  # fmt: skip
    small = same.examination(shrunk.trial)
    return (
        (shrunk, small)
        if small is not None
        else (replace(shrunk, trial=Trial(examination.case), steps=()), examination)
    )


def _least(examination: Examination) -> dict[str, int]:
    """Lower limits: 0 only for sizes that are 0 in some case, otherwise 1; axes of given tensors never become empty."""
    if examination.case.given:
        return {str(n): 1 for t in examination.material.inputs.values() for n in t.shape}
    declared = [c.sizes for c in examination.target.cases]
    whole = [n for n in examination.case.sizes if all(isinstance(s.get(n, 1), int) for s in declared)]
    return {n: min(1, *(s.get(n, 1) for s in declared), 1) for n in whole}


class _Same:
    """Tests whether a trial fails at the same stage for the same reason; keeps the last such examination.

    An examination of a large case takes many times the memory of its inputs. So only the trial of an earlier
    examination is kept, from which it can be drawn again.
    """

    def __init__(
        self,
        examination: Examination,
        evidence: Evidence,
        stage: str | None,
        cause: str,
        spent: Callable[[float], bool],
    ):
        self.whole, self.stage, self.cause, self.spent = examination, stage, cause, spent
        self.last: tuple[Trial, Examination] | None = None
        first = surest(evidence.report)
        self.probes = frozenset(_ALWAYS) | _owner(first)
        self.depth = depth(evidence, cause)

    def __call__(self, trial: Trial) -> bool:
        failing = self._examined(trial)
        if failing is None:
            return False
        examination, report = failing
        evidence = begin(examination, report)
        collect(examination, evidence, self.depth, spent=self.spent, wanted=self.stage)
        if evidence.first_wrong != self.stage:
            return False
        if by_rules(evidence) != self.cause:
            return False
        self.last = trial, examination
        return True

    def _examined(self, trial: Trial) -> tuple[Examination, Report] | None:
        """A trial's examination and report, if it fails."""
        s = self.whole
        crashes = crash_count(s.target)
        try:
            report, examinations = examine(
                s.target, [trial.case], s.dtype, s.device, s.seed, self.probes, None, until_failing=True
            )
        except Exception:  # noqa: BLE001 - segments, scalars or shapes that do not go with these sizes
            return None
        if crash_count(s.target) > crashes:
            return None
        if report.partial:
            raise KeyboardInterrupt
        return (examinations[0], report) if examinations and report.verdict == FAIL else None

    def examination(self, trial: Trial) -> Examination | None:
        """The examination of a trial that failed before; None if it does not fail again."""
        if trial.case is self.whole.case:
            return self.whole
        if self.last is not None and self.last[0] is trial:
            return self.last[1]
        again = self._examined(trial)
        return None if again is None else again[0]


class _ShowsCause:
    """Tests whether the diagnosis of a case, as given tensors, has the same cause and stage; True if there is no time.

    cause_shown  the cause; "" skips the test
    """

    def __init__(self, same: _Same, cause_shown: str, over: Callable[[float], bool]):
        self.same, self.cause_shown, self.over, self.whole = same, cause_shown, over, same.whole
        self.probes = frozenset(catalogue.QUICK) | same.probes
        self.costs = _Costs(self.whole, _AGAIN * sum(self.whole.seconds.get(p, 0.0) for p in self.probes))

    def __call__(self, trial: Trial) -> bool:
        most = max(_LEAST, self.costs(trial))
        if not self.cause_shown or self.over(most):
            return True
        s = self.whole
        try:
            supply = s.draw(trial.case).supply
            where = partial(trial.case.where, **_taken(trial.case)) if trial.case.where is not None else None
            case = Case(trial.case.name, lambda make: dict(supply), given=True, where=where)
            report, examinations = examine(
                s.target, [case], s.dtype, s.device, s.seed, self.probes, most, until_failing=True
            )
            if report.partial:
                raise KeyboardInterrupt
            if any(n.id == "budget" for n in report.notes):
                return True
            if not examinations or report.verdict != FAIL:
                return False
            evidence = begin(examinations[0], report)
            collect(examinations[0], evidence, Depth(sent=True), spent=self.over)
        except Exception:  # noqa: BLE001 - as in a trial: a mistake at these sizes does not show the cause
            return False
        causes = rank(evidence)
        hurried = NO_TIME in evidence.left_out.values()
        return hurried or bool(causes) and (evidence.first_wrong, causes[0].id) == (self.same.stage, self.cause_shown)


def _taken(case: Case) -> dict[str, object]:
    """The sizes that the case's `where` takes, which a case of given tensors lacks."""
    return {n: v for n, v in case.sizes.items() if case.where is not None and n in parameters(case.where)}


class _Costs:
    """Predicts the seconds of a trial: those of the whole case, scaled by the time of one golden run."""

    def __init__(self, examination: Examination, whole: float):
        self.examination, self.whole = examination, whole
        self.golden = self._golden(examination.case)

    def __call__(self, trial: Trial) -> float:
        return self.whole * min(1.0, self._golden(trial.case) / self.golden) if self.golden else 0.0

    def _golden(self, case: Case) -> float:
        try:
            supply = self.examination.draw(case).supply
            with torch.no_grad():
                began = time.perf_counter()
                self.examination.target.bound("golden", supply)(supply)
                return time.perf_counter() - began
        except Exception:  # noqa: BLE001 - sizes that do not go together, numbers narrower than it takes: for the trial
            return 0.0


def _owner(finding: Finding | None) -> frozenset[str]:
    """The probe that found the failure, and those that it needs."""
    if finding is None or finding.probe == "float32":
        return frozenset()
    return frozenset([finding.probe, "ensemble"] if finding.probe == "statistics" else [finding.probe])


def depth(evidence: Evidence, cause: str) -> Depth:
    """The least evidence that still gives this cause."""

    def enough(**less: object) -> bool:
        return by_rules(replace(evidence, **less)) == cause  # type: ignore[arg-type]

    moved, causes = tuple(evidence.influence), frozenset([cause])
    if enough(runs={}, influence={}, whatif=[]):
        return Depth(runs=(), influence=(), whatif=frozenset())
    if enough(runs={}, influence={}):
        return Depth(runs=(), influence=(), whatif=causes)
    if enough(runs={}, whatif=[]):
        return Depth(runs=(), influence=moved, whatif=frozenset())
    for group in _GROUPS:
        some = {n: f for n, f in evidence.runs.items() if n.startswith(group)}
        if some and enough(runs=some, influence={}, whatif=[]):
            return Depth(runs=group, influence=(), whatif=frozenset())
    if enough(influence={}, whatif=[]):
        return Depth(influence=(), whatif=frozenset())
    return Depth(influence=moved, whatif=causes)
