"""Makes the failing case small: checks every trial and compares its stage and best cause with the known ones.

A trial runs only what the cause rests on: if terms or ratios name the cause, no other run is repeated.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from ...checks import examine
from ...declare.case import Case
from ...judge.examination import Examination
from ...report.check_report import Report
from ...report.results import FAIL, Finding
from ..causes.rank import by_rules
from ..collect import Depth, begin, collect, surest
from ..crash_safety import crash_count
from ..facts.evidence import Evidence
from .steps import Shrunk, shrink

_CHECKS = 2.0  # cost of a trial (check and cause) at most, in units of the first probe's time
_ALWAYS = ("values", "decisions", "poison", "guard", "alias")
_GROUPS = (
    ("zeroed memory",), ("second call", "other inputs", "back"), ("repeat",), ("1 thread", "2 threads"),
    ("golden saved",), ("layout",), ("scale", "offset", "flat"),
)  # fmt: skip


def smallest_case(
    examination: Examination, evidence: Evidence, stage: str | None, spent: Callable[[float], bool]
) -> tuple[Shrunk, Examination]:
    """The smallest case with the same stage and the same best cause by rules; at worst the examined case.

    Only the rules decide, because the learned ranking depends on what the case looks like.
    """
    same = _Same(examination, evidence, stage, spent)
    cost = _CHECKS * examination.seconds.get("values", 0.0)
    shrunk = shrink(
        examination.case, same, least=_least(examination), dtype=examination.dtype, seed=examination.seed,
        spent=lambda: spent(cost),
    )  # fmt: skip
    small = same.examination(shrunk.case)
    return (shrunk, small) if small is not None else (replace(shrunk, case=examination.case, steps=()), examination)


def _least(examination: Examination) -> dict[str, int]:
    """Lower limits: 0 only for sizes that are 0 in some case, otherwise 1; axes of given tensors never become empty."""
    if examination.case.given:
        return {str(n): 1 for t in examination.material.inputs.values() for n in t.shape}
    declared = [c.sizes for c in examination.target.cases]
    whole = [n for n in examination.case.sizes if all(isinstance(s.get(n, 1), int) for s in declared)]
    return {n: min(1, *(s.get(n, 1) for s in declared), 1) for n in whole}


class _Same:
    """Tests whether a case fails at the same stage for the same reason; keeps the last such examination.

    An examination of a large case takes many times the memory of its inputs, so only the last one is kept.
    """

    def __init__(self, examination: Examination, evidence: Evidence, stage: str | None, spent: Callable[[float], bool]):
        self.whole, self.stage, self.cause, self.spent = examination, stage, by_rules(evidence), spent
        self.last: tuple[Case, Examination] | None = None
        self.probes = frozenset(_ALWAYS) | _owner(surest(evidence.report))
        self.depth = depth(evidence, self.cause)

    def __call__(self, case: Case) -> bool:
        failing = self._examined(case)
        if failing is None:
            return False
        examination, report = failing
        evidence = begin(examination, report)
        collect(examination, evidence, self.depth, spent=self.spent, wanted=self.stage)
        if evidence.first_wrong != self.stage or by_rules(evidence) != self.cause:
            return False
        self.last = case, examination
        return True

    def _examined(self, case: Case) -> tuple[Examination, Report] | None:
        """The examination and report of a case, if it fails."""
        s = self.whole
        crashes = crash_count(s.target)
        try:
            report, examinations = examine(
                s.target, [case], s.dtype, s.device, s.seed, self.probes, None, until_failing=True
            )
        except Exception:  # noqa: BLE001 - segments, scalars or shapes that do not go with these sizes
            return None
        if crash_count(s.target) > crashes:
            return None
        if report.partial:
            raise KeyboardInterrupt
        return (examinations[0], report) if examinations and report.verdict == FAIL else None

    def examination(self, case: Case) -> Examination | None:
        """The examination of a case that failed before; None if it does not fail again."""
        if case is self.whole.case:
            return self.whole
        if self.last is not None and self.last[0] is case:
            return self.last[1]
        again = self._examined(case)
        return None if again is None else again[0]


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
