"""Finds another case of the target in which a rule is sure, if no rule is sure in the first one.

Small sizes hide differences: of two blocks, "the last" is also "all but the first"; of two rows, each is an end. A
cause from another case counts only if the same stage goes wrong first there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ... import probes as catalogue
from ...checks import examine
from ...declare.case import Case
from ...declare.target import Target
from ...judge.examination import Examination
from ...report.results import FAIL
from ..causes.likelihood import SURE
from ..causes.rank import Cause, rank, strength
from ..collect import Depth, begin, collect
from ..facts.evidence import Evidence

_CASES, _LOOKED_AT = 2, 6  # failing cases, and all cases


def find_sure_case(
    target: Target, examination: Examination, evidence: Evidence, least: float, seed: int, selected: frozenset[str],
    spent: Callable[[float], bool], share: float | None,
) -> tuple[Case, list[Cause]] | None:  # fmt: skip
    """A case in which a rule is sure, with its causes; None if there is none, or no time for it.

    least  the first cause must score more than this
    spent  spent(more) is True if the budget is over, or would be after `more` seconds
    share  seconds for the check of one case
    """
    quick, failed = selected & frozenset(catalogue.QUICK), 0
    others = sorted((c for c in target.cases if c.name != examination.case.name), key=_empty)
    for case in others[:_LOOKED_AT]:
        if failed == _CASES or spent(evidence.report.seconds):
            return None
        report, examinations = examine(
            target, [case], examination.dtype, examination.device, seed, quick, share, until_failing=True
        )
        first = examinations[0]._first if examinations else None
        if report.verdict != FAIL or report.partial or first is None or first.error is not None:
            continue
        failed += 1
        other = begin(examinations[0], report)
        collect(examinations[0], other, Depth(), spent=spent)
        causes = rank(other) if other.first_wrong == evidence.first_wrong and strength(other) >= SURE else []
        if causes and causes[0].score > least:
            return case, causes
    return None


def _empty(case: Case) -> bool:
    """True if a size is 0: such a case has no elements that could be wrong."""
    return any(n == 0 for n in case.sizes.values() if isinstance(n, int))


def joined(mine: Sequence[Cause], theirs: Sequence[Cause], case: Case) -> list[Cause]:
    """The best cause of the other case, with its case named in each sentence, before the causes of this case."""
    best = theirs[0]
    best_there = replace(best, evidence=[f"in {case.name}: {text}" for text in best.evidence])
    rest = [replace(c, score=min(c.score, best_there.score)) for c in mine if c.id != best.id]
    return [best_there, *rest]
