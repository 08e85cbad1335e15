"""The tables of docs/gate.md, from `python -m benchmarks.gate.throughput` and `.score`."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from benchmarks.gate.score import right_reason

PATH = Path(__file__).resolve().parent.parent / "benchmarks" / "results" / "gate_throughput.json"
SPECIMENS = PATH.with_name("gate_specimens.json")
ON_A_GPU = PATH.with_name("gate_specimens_gpu.json")
CHECKS = {
    "the gate": lambda row: row["status"] == "accepted",
    "`torch.allclose`, 1e-2": lambda row: row["allclose"],
    "KernelBench: five seeds, 1e-2": lambda row: row["kernelbench"],
    "`torch.testing.assert_close`, with gradients": lambda row: row["assert_close"],
}
NOTHING = "No measurement is in benchmarks/results yet.\n"
Table = Callable[[list[str], list[list[str]]], str]


def throughput(table: Table) -> str:
    """What a small candidate costs."""
    row = _row("throughput")
    if row is None:
        return NOTHING
    lines = []
    for name in ("right", "wrong"):
        group = row[name]
        walls = [f"{group[key]:.2f} s" for key in ("median", "p90")]
        lines.append(
            [name, *walls, *(f"{group[key]:.2f} s" for key in ("judge_processor", "candidate_processor"))],
        )
    titles = ["candidates", "median", "90th percentile", "judge, processor time", "candidate, processor time"]
    rate = f"{row['candidates_per_second']:g} candidates a second with {row['jobs']} judges"
    text = f"\n{rate}, on a machine with a load of {row['load_before']:g}; {_conditions(row)}\n"
    return table(titles, lines) + text + _triton()


def _triton() -> str:
    """What a small Triton kernel costs on a GPU."""
    row = _row("triton")
    if row is None:
        return ""
    low, high = row["spread"]
    took = f"{row['seconds']} s ({low} to {high} s), {row['compile']} s of it to compile its kernels"
    other = row.get("without_spares")
    took += f"; without spares {other['seconds']} s" if other else ""
    return f"\nOn a GPU a softmax in Triton takes {took}. {_conditions(row)}\n"


def hostile(table: Table) -> str:
    """What a batch of hostile candidates leaves."""
    row = _row("hostile")
    if row is None:
        return NOTHING
    memory = ", ".join(f"{size} after {seen}" for seen, size in row["judges_mib"].items())
    statuses = ", ".join(
        f"{count} {status.replace('_', ' ')}" for status, count in sorted(row["statuses"].items(), key=lambda s: -s[1])
    )
    lines = [
        ["verdicts", f"{row['candidates'] - row['missing']} of {row['candidates']}: {statuses}"],
        [
            "time",
            f"{row['seconds']:.0f} s, with limits of {row['limit_seconds']:g} s; the slowest {row['slowest'][0]} s",
        ],
        ["processes and files left", f"{len(row['left_processes'])} and {len(row['left_files'])}"],
        ["memory of the two judges, MiB", memory],
    ]
    load = f"load {row['load'][0]:g} before and {row['load'][1]:g} after"
    return table([f"{row['candidates']} candidates of {row['kinds']} kinds", ""], lines) + (
        f"\n{row['jobs']} judges, {load}; {_conditions(row)}\n"
    )


def specimens(table: Table) -> str:
    """What the gate and other checks accept of candidates by unknown authors."""
    if not SPECIMENS.exists():
        return NOTHING
    data = json.loads(SPECIMENS.read_text())
    rows = data["rows"]
    right = [row for row in rows if row["right"]]
    cheats = [row for row in rows if not row["right"] and row["expected"][0] == "cheating"]
    others = [row for row in rows if not row["right"] and row not in cheats]
    lines = []
    for name, accepts in CHECKS.items():
        cheating, wrong, kept = (sum(map(bool, map(accepts, group))) for group in (cheats, others, right))
        lines.append(
            [name, f"{cheating} of {len(cheats)}", f"{wrong} of {len(others)}", f"{len(right) - kept} of {len(right)}"]
        )
    titles = ["check", "cheating ones accepted", "wrong or hostile ones accepted", "right ones refused"]
    named = sum(right_reason(row) for row in cheats)
    errors = [row["name"] for row in rows if (row["status"] == "accepted") != row["right"]]
    text = f"The reason is right for {named} of {len(cheats)} cheating candidates."
    text += f" Misjudged: {', '.join(f'`{name}`' for name in errors)}." if errors else ""
    return table(titles, lines) + f"\n{text} {_conditions(data)}\n{_on_a_gpu()}"


def _on_a_gpu() -> str:
    """What the gate says of right kernels that were compiled."""
    if not ON_A_GPU.exists():
        return ""
    data = json.loads(ON_A_GPU.read_text())
    refused = [f"`{row['name']}` is {row['status']}" for row in data["rows"] if row["status"] != "accepted"]
    accepted = len(data["rows"]) - len(refused)
    text = f"On a GPU, the gate accepts {accepted} of {len(data['rows'])} of Liger's kernels"
    text += f"; {', '.join(refused)}" if refused else ""
    return f"\n{text}. {_conditions(data)}\n"


def _row(name: str) -> dict[str, Any] | None:
    return json.loads(PATH.read_text()).get(name) if PATH.exists() else None


def _conditions(row: dict[str, Any]) -> str:
    return f"{row['machine']}; {row['versions']}; commit {row['commit']}; `{row['command']}`."
