"""What `assay.watch` costs by model size: the rows of `python -m benchmarks.assay.watch --json FILE`."""

import json
from collections.abc import Callable
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "watch.json"
Table = Callable[[list[str], list[list[str]]], str]


def by_size(table: Table) -> str:
    """One row per model size and one column per option; each cell is the ratio to the step without a watch."""
    rows = json.loads(RESULTS.read_text())
    options = [name for name in dict.fromkeys(row["watch"] for row in rows) if name != "off"]
    lines = []
    for dim in dict.fromkeys(row["dim"] for row in rows):
        of_size = {row["watch"]: row for row in rows if row["dim"] == dim}
        off = of_size["off"]
        ratios = [_ratio(of_size[name]) for name in options]
        lines.append([str(dim), str(off["operators"]), f"{off['median_ms']:.1f} ms", *ratios])
    first = rows[0]
    load = max(row["load"] for row in rows)
    other = "" if load < 3 else f" Other work was running (load up to {load:.0f})."
    conditions = (
        f"{first['machine']}, {first['threads']} thread, torch {first['torch']}, {first['date']}; "
        f"{first['layers']} layers, {first['tokens']} tokens, forward, backward and AdamW; {first['clock']} time. "
        f"A cell is the ratio of the medians of {first['rounds']} rounds of {first['steps']} steps, with the lowest "
        f"and highest ratio of a round.{other}"
    )
    return table(["width", "operators a step", "step without a watch", *options], lines) + f"\n{conditions}\n"


def _ratio(row: dict) -> str:
    return f"{row['ratio']:.2f} ({row['lowest']:.2f} to {row['highest']:.2f})"
