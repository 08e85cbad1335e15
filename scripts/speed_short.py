"""The README's table of speed: a few rows of benchmarks/results, among them some where the other way is faster."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
Table = Callable[[list[str], list[list[str]]], str]


@dataclass(frozen=True)
class Comparison:
    work: str  # as a reader would call it
    where: str
    op: str
    case: str
    direction: str
    other: str  # the peer as a reader would call it
    peer: str
    ours: str = "goldsmith"
    machine: str = ""  # how the machine's name begins or ends; "" is any
    shape: str = ""

    def holds(self, row: dict) -> bool:
        place = {"op": self.op, "case": self.case, "direction": self.direction}
        return (
            all(row.get(key, "") == value for key, value in place.items())
            and row.get("shape", "") == self.shape
            and (not self.machine or row["machine"].endswith(self.machine))
            and row.get("dtype", "bfloat16") == "bfloat16"
            and row.get("mode", "cold") in ("cold", "wall")
            and row.get("median_us") is not None
            and (row["device"] == "cuda" or row["threads"] == 16)
        )


PACKAGES = {
    "liger": ("liger-kernel",),
    "kt-kernel": ("kt-kernel",),
    "grouped_mm": ("transformers", "peft"),
    "accelerate": ("accelerate",),
    "all on the GPU": ("transformers",),
}
HYPER = "train[T=8192,D=4096]"
COMPARISONS = (
    Comparison(
        "hyper-connections, 8,192 tokens of width 4,096: forward",
        *("H100", "mhc.connection", HYPER, "forward", "Liger-Kernel", "liger"),
    ),
    Comparison("the same: backward", "H100", "mhc.connection", HYPER, "backward", "`torch.compile`", "compile"),
    Comparison(
        "the best 64 of 1,024 x 1,024 experts, for 16,384 tokens",
        *("H100", "router.product_topk", "route[T=16384,s=1024,k=64]", "forward", "`torch.topk`", "topk"),
    ),
    Comparison(
        "one layer's experts with LoRA, in 4 bits, 2,048 tokens: forward",
        *("16 CPU cores", "experts.moe", "train[v2-lite,T=2048,int4]", "forward", "kt-kernel", "kt-kernel"),
        machine="16 cores",
    ),
    Comparison(
        "the same, one token, without LoRA",
        *("16 CPU cores", "experts.moe", "decode[v2-lite,int4]", "forward", "kt-kernel", "kt-kernel"),
        machine="16 cores",
    ),
    Comparison(
        "one layer's experts with LoRA, in 16 bits, 4,096 tokens: backward",
        *("H200", "experts.moe", "train[qwen3,T=4096,plain]", "backward", "`grouped_mm` with peft", "grouped_mm"),
    ),
    Comparison(
        "three layers, one token, half of the experts on the GPU",
        *("H100 and 16 cores", "offload.step", "decode T=1", "", "accelerate's offload", "accelerate"),
        ours="goldsmith, half cached",
        shape="qwen3",
    ),
    Comparison(
        "the same, compared with all experts on the GPU",
        *("H100 and 16 cores", "offload.step", "decode T=1", "", "transformers", "all on the GPU"),
        ours="goldsmith, half cached",
        shape="qwen3",
    ),
)


def speed(table: Table) -> str:
    lines: list[list[str]] = []
    runs: dict[tuple[str, str, str], dict[str, str]] = {}
    rows = [json.loads(line) for path in sorted(RESULTS.glob("*.jsonl")) for line in path.read_text().splitlines()]
    for comparison in COMPARISONS:
        pair = newest(comparison, rows)
        if pair is None:
            continue
        ours, theirs = pair
        ratio = theirs["median_us"] / ours["median_us"]
        times = [milliseconds(row) for row in pair]
        lines.append([comparison.work, comparison.where, times[0], f"{comparison.other} {times[1]}", f"{ratio:.2g}"])
        names = runs.setdefault((ours["machine"], ours["date"], ours["commit"]), {})
        names |= {name: ours["versions"][name] for name in ("torch", *PACKAGES.get(comparison.peer, ()))}
    titles = ["work", "on", "ours, ms", "the other way, ms", "times as fast"]
    conditions = [
        f"{machine}: {date}, commit {commit}, {', '.join(f'{name} {number}' for name, number in names.items())}."
        for (machine, date, commit), names in runs.items()
    ]
    return table(titles, lines) + "\n" + "<br>\n".join(conditions) + "\n"


def newest(comparison: Comparison, rows: list[dict]) -> tuple[dict, dict] | None:
    """Ours and the peer's rows from the last run that has both."""
    pair: tuple[dict, dict] | None = None
    run: dict[str, dict] = {}
    last: tuple[str, str] = ("", "")
    for row in rows:
        if comparison.holds(row):
            if (row["date"], row["commit"]) != last:
                run, last = {}, (row["date"], row["commit"])
            run[row["peer"]] = row
            if {comparison.ours, comparison.peer} <= run.keys() and (pair is None or last >= run_of(pair[0])):
                pair = run[comparison.ours], run[comparison.peer]
    return pair


def run_of(row: dict) -> tuple[str, str]:
    return row["date"], ""  # of one day, later lines count


def milliseconds(row: dict) -> str:
    return f"{row['median_us'] / 1e3:#.3g}".rstrip(".")
