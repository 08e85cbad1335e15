"""Error maps as the page draws them: golden, candidate and error / bound, reduced to a number of cells."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ..results import ErrorMap
from . import svg


def map_view(m: ErrorMap, cells: int) -> dict[str, object]:
    golden, candidate, error = (shrink(g, cells) for g in (m.golden, m.candidate, m.error_over_limit))
    finite = [abs(v) for row in golden for v in row if math.isfinite(v)]
    scale = max(finite, default=0.0)
    height = len(error)
    width = max((len(row) for row in error), default=0)
    rows, cols = m.shape
    borders = [hi / cols * width for _, hi in m.segments.values() if 0 < hi < cols] if cols else []
    shape = f"{rows} × {cols}"
    return {
        "m": m,
        "shape": shape,
        "scale": scale,
        "blocks": ""
        if (height, width) == (rows, cols)
        else f"each cell the largest of its block, {height} × {width} cells",
        "golden": svg.value_map(golden, scale, f"{m.tensor}: golden, {shape}", columns=borders),
        "candidate": svg.value_map(candidate, scale, f"{m.tensor}: candidate, {shape}", columns=borders),
        "error": svg.error_map(error, f"{m.tensor}: error / bound, {shape}", columns=borders),
        "segments": [name for name, _ in sorted(m.segments.items(), key=lambda item: item[1])],
    }


def shrink(grid: Sequence[Sequence[float]], cells: int) -> list[list[float]]:
    """The grid in at most cells x cells blocks, each with its value of largest magnitude; NaN counts as the largest."""
    height, width = len(grid), max((len(row) for row in grid), default=0)
    tall, wide = min(cells, height), min(cells, width)
    if (tall, wide) == (height, width):
        return [list(row) for row in grid]
    out = []
    for i in range(tall):
        block = grid[i * height // tall : (i + 1) * height // tall]
        line = []
        for j in range(wide):
            lo, hi = j * width // wide, (j + 1) * width // wide
            line.append(max((v for row in block for v in row[lo:hi]), key=_magnitude, default=0.0))
        out.append(line)
    return out


def _magnitude(value: float) -> float:
    return math.inf if math.isnan(value) else abs(value)
