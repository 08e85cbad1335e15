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
        ratios = [f"{of_size[name]['ratio']:.2f}" for name in options]
        lines.append([str(dim), str(off["operators"]), f"{off['median_ms']:.1f} ms", *ratios])
    first = rows[0]
    spread = max(row["highest"] / row["lowest"] for row in rows)
    conditions = (
        f"{first['machine']}, {first['threads']} thread, torch {first['torch']}, {first['date']}; "
        f"{first['layers']} layers, {first['tokens']} tokens, forward, backward and AdamW; {first['clock']} time, "
        f"medians of {first['rounds']} rounds of {first['steps']} steps. Other work was running "
        f"(load {first['load']:.0f}): the ratios of a variant's rounds differ by a factor of up to {spread:.1f}, and a "
        "ratio below 1 is noise."
    )
    return table(["width", "operators a step", "step without a watch", *options], lines) + f"\n{conditions}\n"
