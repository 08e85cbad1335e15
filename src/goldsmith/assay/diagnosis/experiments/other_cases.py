"""Finds another case of the target in which a rule is sure, if no rule is sure in the first one.

Small sizes hide differences: of two blocks, "the last" is also "all but the first"; of two rows, each is an end. A
cause from another case counts only if the same stage goes wrong first there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ...declare.case import Case
from ...judge.examination import Examination
from ...report.results import FAIL
from ..causes.likelihood import SURE
from ..causes.rank import Cause, rank, strength
from ..clock import COLLECTING
from ..collect import Depth, begin, collect
from ..facts.evidence import Evidence
from ..request import Request

_CASES, _LOOKED_AT = 2, 6  # failing cases, and all cases


def find_sure_case(
    request: Request, examination: Examination, evidence: Evidence, least: float
) -> tuple[Case, list[Cause]] | None:
    """A case in which a rule is sure, with its causes; None if there is none, or no time for it.

    least  the first cause must score more than this
    """

    def spent(more: float) -> bool:
        return request.clock.lacks("other cases, in which a rule may be sure", COLLECTING, more)

    others = sorted((c for c in request.target.cases if c.name != examination.case.name), key=_empty)
    failed = 0
    for case in others[:_LOOKED_AT]:
        if failed == _CASES or spent(evidence.report.seconds):
            return None
        report, examinations = request.check([case], examination.dtype)
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
