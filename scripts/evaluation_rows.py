"""lm-eval's figures in docs/evaluate.md: the rows that `python -m benchmarks.evaluation --write` has recorded."""

import json
from collections.abc import Callable
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "evaluation.json"
Table = Callable[[list[str], list[list[str]]], str]


def parity(table: Table) -> str:
    """One row for each task and metric."""
    content = json.loads(RESULTS.read_text())
    rows = [
        [
            f"`{r['task']}`", r["metric"], str(r["documents"]), f"{r['plain']:.6g}", f"{r['goldsmith']:.6g}",
            "" if r["same_answers"] is None else f"{r['same_answers']} of {r['documents']}",
        ]
        for r in content["rows"]
    ]  # fmt: skip
    stamp = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    titles = ["task", "metric", "documents", "transformers", "goldsmith", "same answers"]
    return table(titles, rows) + f"\nexamples/shakespeare-moe in {content['dtype']} on a CPU; {stamp}.\n"
