"""Which strategy of router.atomic_experts is faster, from rows of `goldsmith bench router.atomic_experts`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from goldsmith.router._common import FLOATS, dtype_name
from goldsmith.router._strategy import DENSE

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
Table = Callable[[list[str], list[list[str]]], str]
Times = dict[str, dict[str, float]]  # by strategy, then by direction, in microseconds
HOW = {"cuda": "L2 flushed before each call", "cpu": "wall time of single calls"}
NAMES = {"cpu": "CPU", "cuda": "CUDA"}


class Place(NamedTuple):
    """The size and machine at which two strategies were timed."""

    device: str
    machine: str
    date: str
    dtype: str
    tokens: int
    hidden: int
    num_experts: int
    k: int


def measured(path: Path = RESULTS) -> dict[Place, Times]:
    """The sizes at which both were timed, by machine, N / k and tokens."""
    by_name: dict[Place, Times] = {}
    for file in sorted(path.glob("*.jsonl")):
        for row in map(json.loads, file.read_text().splitlines()):
            if row["op"] != "router.atomic_experts" or row["peer"] != "goldsmith":
                continue
            kind = row["case"].partition("[")[0].partition("_")[2] or "gather"
            if kind in ("gather", "dense") and row["mode"] in ("cold", "wall") and row["median_us"] is not None:
                sizes = (row["sizes"][name] for name in ("T", "D", "N", "k"))
                place = Place(row["device"], row["machine"], row["date"], row["dtype"], *sizes)
                by_name.setdefault(place, {}).setdefault(kind, {})[row["direction"]] = row["median_us"]
    both = {place: times for place, times in by_name.items() if len(times) == 2}
    return dict(sorted(both.items(), key=lambda item: order(item[0])))


def order(place: Place) -> tuple:
    return place.device, place.machine, -place.num_experts / place.k, place.tokens, place


def both_ways(times: dict[str, float]) -> float:
    return times["forward"] + times["backward"]


def milliseconds(microseconds: float) -> str:
    return f"{microseconds / 1e3:,.0f}" if microseconds >= 1e5 else f"{microseconds / 1e3:.3g}"


def gather_or_dense(table: Table) -> str:
    """The rule, and a table per machine of the rows that it comes from."""
    rule = [[NAMES[d], f"{at.tokens:,}", f"N / {at.one_in}", every(at.dtypes)] for d, at in DENSE.items()]
    text = table(["device", "dense from as many tokens", "and from k =", "in"], rule)
    machines: dict[tuple, list[tuple[Place, Times]]] = {}
    for place, times in measured().items():
        machines.setdefault((place.device, place.machine), []).append((place, times))
    for (device, machine), timed in machines.items():
        dates = ", ".join(dict.fromkeys(place.date for place, _ in timed))
        kinds = ", ".join(dict.fromkeys(place.dtype for place, _ in timed))
        text += "\n" + one_machine(table, timed)
        text += f"\n{machine}, {dates}; {kinds}, uniform routing, {HOW[device]}.\n"
    return text


def every(dtypes: tuple) -> str:
    return "every dtype" if dtypes == FLOATS else ", ".join(dtype_name(dtype) for dtype in dtypes)


def one_machine(table: Table, timed: list[tuple[Place, Times]]) -> str:
    rows = []
    for place, times in timed:
        gather, dense = times["gather"], times["dense"]
        quicker = "dense" if both_ways(dense) < both_ways(gather) else "gather"
        sizes = (place.num_experts / place.k, place.tokens, place.hidden, place.num_experts, place.k)
        cells = [milliseconds(v[d]) for d in ("forward", "backward") for v in (gather, dense)]
        rows.append([*(f"{size:.0f}" for size in sizes), *cells, quicker])
    ways = ["forward: gather, ms", "dense, ms", "backward: gather, ms", "dense, ms"]
    return table(["N / k", "T", "D", "N", "k", *ways, "quicker"], rows)
