"""Confidence intervals of measured shares."""

from __future__ import annotations

import math


def wilson(hits: int, n: int, z: float = 1.96) -> tuple[float, float] | None:
    """The 95 % Wilson interval of hits / n; None for n = 0."""
    if n == 0:
        return None
    share = hits / n
    centre = share + z * z / (2 * n)
    half = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n))
    return max(0.0, (centre - half) / (1 + z * z / n)), min(1.0, (centre + half) / (1 + z * z / n))
