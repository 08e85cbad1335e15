"""Calibration: how often a rule was right at its raw score, from development faults alone."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable

import catalogue

FILE = catalogue.ROOT / "src" / "goldsmith" / "assay" / "diagnosis" / "calibration.json"
LEAST = 8  # rows that a cause needs for points of its own
_SMOOTH = 1.0  # a row right and a row wrong are added to every bin: no score is 0 or 1
Points = list[list[float]]


def write(rows: Iterable[dict]) -> str:
    """Write calibration.json; returns a sentence about it."""
    points, used = fitted(rows)
    said = {
        "about": "raw score of a rule -> how often it was right, on the development faults of benchmarks/kernelfault; "
        "written by `goldsmith bench kernelfault --fit`",
        "rows": used,
        "points": points,
    }
    FILE.write_text(json.dumps(said, indent=1) + "\n", encoding="utf-8")
    return f"{FILE.relative_to(catalogue.ROOT)}: {len(points)} causes from {used} rows of development faults"


def fitted(rows: Iterable[dict]) -> tuple[dict[str, Points], int]:
    """{cause or "all": [[raw score, share right], ...]} and the number of rows; held-out hosts are left out."""
    known = {f.key: f for f in catalogue.faults()}
    seen: dict[str, list[tuple[float, bool]]] = defaultdict(list)
    used = 0
    for row in rows:
        fault = known.get(row.get("fault", ""))
        if fault is None or fault.host.held_out or not fault.counted or not row["raw"]:
            continue
        used += 1
        for id, score in row["raw"].items():
            seen[id].append((score, id in fault.causes))
            seen["all"].append((score, id in fault.causes))
    found = {id: isotonic(pairs) for id, pairs in sorted(seen.items()) if id == "all" or len(pairs) >= LEAST}
    return found, used


def isotonic(pairs: list[tuple[float, bool]]) -> Points:
    """Shares that do not fall with the score: equal scores pooled, then neighbours that are out of order."""
    by_score: dict[float, list[bool]] = defaultdict(list)
    for score, right in pairs:
        by_score[round(score, 3)].append(right)
    blocks: list[tuple[list[float], float, float]] = []  # scores, right, of
    for score, answers in sorted(by_score.items()):
        blocks.append(([score], sum(answers) + _SMOOTH / 2, len(answers) + _SMOOTH))
        while len(blocks) > 1 and blocks[-2][1] / blocks[-2][2] >= blocks[-1][1] / blocks[-1][2]:
            scores, right, of = blocks.pop()
            before = blocks.pop()
            blocks.append((before[0] + scores, before[1] + right, before[2] + of))
    return [[score, round(right / of, 4)] for scores, right, of in blocks for score in scores]
