"""Which strategy of router.atomic_experts is the quicker, from the rows of `goldsmith bench router.atomic_experts`."""

import json
from collections.abc import Callable
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
Table = Callable[[list[str], list[list[str]]], str]
Times = dict[str, dict[str, float]]  # by strategy, then by direction, in microseconds


def measured(path: Path = RESULTS) -> dict[tuple, Times]:
    """By (machine, date, T, D, N, k), in the order of machine and N / k: the sizes that both were timed at."""
    found: dict[tuple, Times] = {}
    for file in sorted(path.glob("*.jsonl")):
        for row in map(json.loads, file.read_text().splitlines()):
            of_ours = row["op"] == "router.atomic_experts" and row["peer"] == "goldsmith" and row["device"] == "cuda"
            kind = row["case"].partition("[")[0].partition("_")[2] or "gather"
            if of_ours and row["mode"] == "cold" and row["median_us"] is not None and kind in ("gather", "dense"):
                sizes = tuple(row["sizes"][name] for name in ("T", "D", "N", "k"))
                place = found.setdefault((row["machine"], row["date"], *sizes), {})
                place.setdefault(kind, {})[row["direction"]] = row["median_us"]
    both = {place: times for place, times in found.items() if len(times) == 2}
    return dict(sorted(both.items(), key=lambda item: (item[0][0], -item[0][4] / item[0][5], item[0][2:])))


def both_ways(times: dict[str, float]) -> float:
    return times["forward"] + times["backward"]


def gather_or_dense(table: Table) -> str:
    rows, places = [], measured()
    for (_, _, tokens, dim, experts, k), times in places.items():
        gather, dense = times["gather"], times["dense"]
        quicker = "dense" if both_ways(dense) < both_ways(gather) else "gather"
        cells = [f"{v[d] / 1e3:.3g}" for d in ("forward", "backward") for v in (gather, dense)]
        rows.append([f"{experts / k:.0f}", f"{tokens}", f"{dim}", f"{experts}", f"{k}", *cells, quicker])
    if not rows:
        return (
            "No measurement is in benchmarks/results yet; `goldsmith bench router.atomic_experts --out FILE.jsonl`.\n"
        )
    titles = [
        "N / k",
        "T",
        "D",
        "N",
        "k",
        "forward: gather, ms",
        "dense, ms",
        "backward: gather, ms",
        "dense, ms",
        "quicker",
    ]
    machines = "; ".join(dict.fromkeys(f"{machine}, {date}" for machine, date, *_ in places))
    return table(titles, rows) + f"\n{machines}; bfloat16, uniform routing, L2 flushed before each call.\n"
