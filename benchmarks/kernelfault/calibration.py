"""Calibration: how often a cause was right at its raw score, ranked first or later, on development faults.

The order of causes follows their raw scores and is not fitted: a curve per cause could change the order because of a
few rows.
"""

from __future__ import annotations

import json
from collections.abc import Iterable

from . import catalogue

FILE = catalogue.ROOT / "src" / "goldsmith" / "assay" / "diagnosis" / "causes" / "calibration.json"
FIRST, OTHER = "first", "other"  # as goldsmith.assay.diagnosis.causes.rank has them
_SMOOTH = 1.0  # add half a right and half a wrong row to every point, so that no score is 0 or 1
Points = list[list[float]]


def write(rows: Iterable[dict]) -> str:
    """Write calibration.json; returns a line for the terminal."""
    points, used = fitted(rows)
    content = {
        "about": "raw score of a cause -> how often it was right, in the first place and in others, on the development "
        "faults of benchmarks/kernelfault; written by `python -m benchmarks.kernelfault --fit`",
        "rows": used,
        "points": points,
    }
    FILE.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    return f"{FILE.relative_to(catalogue.ROOT)}: from {used} rows of development faults"


def fitted(rows: Iterable[dict]) -> tuple[dict[str, Points], int]:
    """({FIRST or OTHER: [[raw score, share right], ...]}, number of rows), without held-out hosts."""
    known = {f.key: f for f in catalogue.faults()}
    seen: dict[str, list[tuple[float, bool]]] = {FIRST: [], OTHER: []}
    used = 0
    for row in rows:
        fault = known.get(row.get("fault", ""))
        if fault is None or fault.host.held_out or not fault.counted or not row["raw"]:
            continue
        used += 1
        for place, (id, score) in enumerate(sorted(row["raw"].items(), key=lambda item: -item[1])):
            seen[OTHER if place else FIRST].append((score, id in fault.causes))
    return {place: isotonic(pairs) for place, pairs in seen.items() if pairs}, used


def isotonic(pairs: list[tuple[float, bool]]) -> Points:
    """Isotonic regression: the share of right rows by score, never falling; equal scores are pooled first."""
    by_score: dict[float, list[bool]] = {}
    for score, right in pairs:
        by_score.setdefault(round(score, 3), []).append(right)
    blocks: list[tuple[list[float], float, float]] = []  # scores, right, of
    for score, answers in sorted(by_score.items()):
        blocks.append(([score], sum(answers) + _SMOOTH / 2, len(answers) + _SMOOTH))
        while len(blocks) > 1 and blocks[-2][1] / blocks[-2][2] >= blocks[-1][1] / blocks[-1][2]:
            scores, right, of = blocks.pop()
            before = blocks.pop()
            blocks.append((before[0] + scores, before[1] + right, before[2] + of))
    return [[score, round(right / of, 4)] for scores, right, of in blocks for score in scores]
