"""What an error map shows where there are infinities and NaN, on the page and in text."""

from __future__ import annotations

import math

from .results import ErrorMap


def error_of(m: ErrorMap) -> list[list[float]]:
    """error / limit, 0 where golden and candidate are the same infinity or both NaN: there is nothing between them.

    A block of a tensor that is wrong keeps its worst: what else it holds is not known here.
    """
    height, width = len(m.golden), max((len(row) for row in m.golden), default=0)
    if m.bad and (height, width) != tuple(m.shape):
        return [list(row) for row in m.error_over_limit]
    rows = zip(m.error_over_limit, m.golden, m.candidate, strict=True)
    return [[0.0 if _same(g, c) else e for e, g, c in zip(*row, strict=True)] for row in rows]


def _same(golden: float, candidate: float) -> bool:
    return not math.isfinite(golden) and (golden == candidate or math.isnan(golden) and math.isnan(candidate))
