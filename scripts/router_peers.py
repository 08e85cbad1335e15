"""The router's operators and their peers, from the newest run of `python -m benchmarks.bench` that timed both."""

import json
from collections.abc import Callable
from pathlib import Path

from strategies import milliseconds

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
OPS = ("router.product_topk", "router.atomic_experts")
STRATEGIES = ("dense",)  # forced strategies have a table of their own
NOTHING = "No measurement is in benchmarks/results yet; `python -m benchmarks.bench router --out FILE.jsonl`.\n"
Table = Callable[[list[str], list[list[str]]], str]


def beside_peers(table: Table, device: str) -> str:
    """A table per machine of this kind."""
    runs: dict[tuple, dict[str, dict]] = {}
    for row in (json.loads(line) for path in sorted(RESULTS.glob("*.jsonl")) for line in path.read_text().splitlines()):
        if row["op"] in OPS and row["device"] == device and row["mode"] in ("cold", "wall") and row["median_us"]:
            if row["case"].partition("[")[0].partition("_")[2] not in STRATEGIES:
                run = row["machine"], row["date"], row["commit"], row["threads"]
                place = row["op"], row["case"], row["dtype"], row["direction"]
                runs.setdefault((run, place), {})[row["peer"]] = row
    newest: dict[str, dict[tuple, tuple[dict, dict]]] = {}
    for ((machine, *_), place), rows in runs.items():  # a later run replaces an earlier one
        for peer in [name for name in rows if name != "goldsmith" and "goldsmith" in rows]:
            newest.setdefault(machine, {})[(*place, peer)] = rows["goldsmith"], rows[peer]
    text = [one_machine(table, machine, pairs) for machine, pairs in newest.items()]
    return "\n".join(text) or NOTHING


def order(item: tuple[tuple, tuple[dict, dict]]) -> tuple:
    (op, case, dtype, direction, peer), _ = item
    return op, case, dtype, direction != "forward", peer


def one_machine(table: Table, machine: str, pairs: dict[tuple, tuple[dict, dict]]) -> str:
    lines, conditions = [], {}
    for (op, case, dtype, direction, peer), (ours, theirs) in sorted(pairs.items(), key=order):
        ratio = theirs["median_us"] / ours["median_us"]
        where = f"`{op.partition('.')[2]}` {case}, {dtype}"
        times = [
            f"{milliseconds(row['median_us'])} ±{50 * (row['p90'] - row['p10']) / row['median_us']:.0f} %"
            for row in (ours, theirs)
        ]
        lines.append([where, direction, peer, *times, f"{ratio:.2g}", ours["commit"]])
        threads = f", {ours['threads']} thread" + "s" * (ours["threads"] != 1) if ours["threads"] else ""
        conditions[f"{machine}{threads}; torch {ours['versions']['torch']}; {ours['date']}"] = None
    titles = ["", "", "peer", "ours, ms", "peer, ms", "peer / ours", "commit"]
    return table(titles, lines) + "\n" + "".join(f"{line}; median ± half of p10..p90.\n" for line in conditions)
