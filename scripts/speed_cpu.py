"""Tables of the experts' times and memory on CPUs, from benchmarks/results."""

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path

from recorded_commands import today

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
PEERS = {
    "kt-kernel": "kt-kernel",
    "transformers": "transformers eager + peft",
    "grouped_mm": "transformers grouped_mm + peft",
    "product": "one torch product",
}
Table = Callable[[list[str], list[list[str]]], str]
NOTHING = "No measurement is in benchmarks/results yet.\n"


def speed(table: Table) -> str:
    """A table per machine: the newest timing of each case, direction and thread count, with the peers of its run."""
    machines: dict[str, dict[tuple, dict[str, dict]]] = {}
    for row in rows():
        places = machines.setdefault(row["machine"], {})
        place = tuple(row[key] for key in ("op", "case", "threads", "direction"))
        if row["peer"] == "goldsmith":
            places[place] = {}  # a later run replaces an earlier one, with its peers
        if place in places:
            places[place][row["peer"]] = row
    return "\n".join(of_machine(table, name, places) for name, places in machines.items()) or NOTHING


ASKED = {  # milliseconds for DeepSeek-V2-Lite's layer on 16 cores: the targets set before any code was written
    ("train[v2-lite,T=2048,bf16]", "forward"): "14",
    ("train[v2-lite,T=2048,bf16]", "backward"): "22",
    ("train[v2-lite,T=256,bf16]", "forward"): "9",
    ("decode[v2-lite,bf16]", "forward"): "0.79",
    ("train[v2-lite,T=256,int4]", "forward"): "6",
    ("train[v2-lite,T=256,int4]", "backward"): "9",
}
RUNS_OF, LAST_RUNS = "16 cores", 4


def runs(table: Table) -> str:
    """goldsmith and kt-kernel in every one of the last runs that have both."""
    result, commits = _beside_kt_kernel()
    wanted = list(commits)[-LAST_RUNS:]
    lines = [
        [case, direction, ASKED.get((case, direction), "-"), *(_beside(by.get(commit, {})) for commit in wanted)]
        for (case, direction), by in result.items()
        if any(len(by.get(commit, {})) == 2 for commit in wanted)
    ]
    return table(["case", "", "asked, ms", *(f"{commit}, {commits[commit]}" for commit in wanted)], lines)


def short(table: Table) -> str:
    """The last of those runs, only training."""
    result, commits = _beside_kt_kernel()
    last = list(commits)[-1]
    lines = [
        [f"`experts.moe` {case}", direction, *_pair(by[last])]
        for (case, direction), by in result.items()
        if len(by.get(last, {})) == 2 and case.startswith("train")
    ]
    ours = next(row for row in rows() if row["commit"] == last and row["machine"].endswith(RUNS_OF))
    where = conditions(ours["machine"], [ours])[0].split("; ceilings")[0]
    return table(["case", "", "ours, ms", "kt-kernel, ms", "times as fast"], lines) + f"\n{where}; 16 threads.\n"


def _pair(times: dict[str, float]) -> list[str]:
    ours, theirs = times["goldsmith"], times["kt-kernel"]
    return [f"{ours:.3g}", f"{theirs:.3g}", f"{theirs / ours:.2f}"]


def _beside_kt_kernel() -> tuple[dict[tuple[str, str], dict[str, dict[str, float]]], dict[str, str]]:
    """Medians of DeepSeek-V2-Lite's layer: (case, direction) -> commit -> peer; and the date of each commit."""
    by_name: dict[tuple[str, str], dict[str, dict[str, float]]] = {}
    commits: dict[str, str] = {}
    for row in rows():
        kind = "v2-lite" in row["case"] and "r=" not in row["case"] and row["peer"] in ("goldsmith", "kt-kernel")
        if kind and row["threads"] == 16 and row["machine"].endswith(RUNS_OF) and row["median_us"]:
            place = by_name.setdefault((row["case"], row["direction"]), {}).setdefault(row["commit"], {})
            place[row["peer"]] = row["median_us"] / 1e3
            commits[row["commit"]] = row["date"]
    return by_name, commits


def _beside(times: dict[str, float]) -> str:
    """goldsmith's time, kt-kernel's, and their ratio."""
    if len(times) < 2:
        return "-"
    ours, theirs, ratio = _pair(times)
    return f"{ours} beside {theirs} ({ratio})"


def rows() -> list[dict]:
    lines = [line for path in sorted(RESULTS.glob("*.jsonl")) for line in path.read_text().splitlines()]
    items = [json.loads(line) for line in lines]
    return [row for row in items if row["device"] == "cpu" and row["op"].startswith("experts.")]


def of_machine(table: Table, machine: str, places: dict[tuple, dict[str, dict]]) -> str:
    peers = [peer for peer in PEERS if any(peer in entry for entry in places.values())]
    lines = []
    for (op, case, threads, direction), entry in places.items():
        ours = entry["goldsmith"]
        share = f"{100 * ours['share_of_ceiling']:.0f} % of {ours['ceiling']}"
        others = [milliseconds(entry.get(peer)) for peer in peers]
        lines.append([f"`{op}`", case, direction, str(threads), milliseconds(ours), share, *others, checked(ours)])
    titles = ["", "case", "", "threads", "ours, ms", "ceiling", *(f"{PEERS[p]}, ms" for p in peers), "verified"]
    shown = [row for entry in places.values() for row in entry.values()]
    return table(titles, lines) + "\n" + "".join(f"{line}\n" for line in conditions(machine, shown))


def milliseconds(row: dict | None) -> str:
    """The median, the spread (half the distance from the 10th to the 90th percentile) and the error."""
    if row is None or row["median_us"] is None:
        return "-"
    median = row["median_us"] / 1e3
    spread = 50 * (row["p90"] - row["p10"]) / row["median_us"]
    error = "" if row["error"] is None else f", error {row['error']:.1e}"
    return f"{median:.3g} ±{spread:.0f} %{error}"


def checked(row: dict) -> str:
    """ "yes" where the check has all cases, otherwise the number of its cases.

    `goldsmith verify` on a CPU takes every case in one dtype, and one case in the others. Until 23 November 2026 `bench
    --proof` accepted that one case, and did not write how many there are (since then: "49 of 49 cases").
    """
    if row["verified"] and re.search(r", 1 cases, .*\(", row.get("verified_by", "")):
        return "1 case"
    return {True: "yes", False: "**no**", None: "-"}[row["verified"]]


def conditions(machine: str, shown: list[dict]) -> list[str]:
    """A line per run: its versions, date and measured ceilings."""
    runs: dict[tuple, list[dict]] = {}
    for row in shown:
        runs.setdefault((row["date"], row["commit"], json.dumps(row["versions"])), []).append(row)
    lines = []
    for (date, commit, versions), entry in runs.items():
        named = ", ".join(f"{name} {version}" for name, version in json.loads(versions).items())
        rates = {}
        for row in entry:
            if row["read_gb_s"]:
                rates[f"reading {row['threads']}"] = f"{row['read_gb_s']:.0f} GB/s"
            if row["gflop_s"] and row["ceiling"] not in ("read", "copy"):
                rates[f"{row['ceiling']} {row['threads']}"] = f"{row['gflop_s']:,.0f} GFLOP/s"
        reached = ", ".join(f"{what} {rate}" for what, rate in sorted(rates.items()))
        loads = [row["load"] for row in entry if row.get("load") is not None]
        busy = f" Load of the machine, our threads among it: {min(loads):.1f} to {max(loads):.1f}." if loads else ""
        lines.append(
            f"{machine}; {named}; commit {commit}; {date}; wall time of single calls, median ± half of p10..p90; "
            f"ceilings by number of threads: {reached}.{busy}"
        )
    return lines


def memory(table: Table) -> str:
    """Memory of a layer's forward and backward, and of its weights."""
    path = RESULTS / "experts_memory.json"
    if not path.exists():
        return NOTHING
    content = json.loads(path.read_text())
    lines = [
        [
            row["who"],
            row["format"],
            *(f"{row[key] / 2**20:,.0f}" for key in ("weights", "held", "peak")),
        ]
        for row in content["rows"]
    ]
    titles = ["", "format", "weights, MiB", "held, MiB", "peak beside it, MiB"]
    message = f"{content['machine']}; {content['versions']}; commit {content['commit']}; {content['case']}"
    return table(titles, lines) + f"\n{message}; `{today(content['command'])}`.\n"


def decode(table: Table) -> str:
    """One layer's experts for one token, beside ggml: microseconds, GB/s, and the share of the read bandwidth."""
    path = RESULTS / "experts_decode.json"
    if not path.exists():
        return NOTHING
    content = json.loads(path.read_text())
    cells: dict[tuple[str, ...], dict[int, dict]] = {}
    for row in content["rows"]:
        cells.setdefault((row["format"], row["who"], row["level"], row["compute"]), {})[row["threads"]] = row
    teams = sorted({row["threads"] for row in content["rows"]})
    lines = []
    for key, by in cells.items():
        times = [_decoded(by[team]) if team in by else "-" for team in teams]
        python = by[teams[-1]].get("python") if teams[-1] in by else None
        lines.append([*key, *times, f"{python['us']:,.0f}" if python else "-"])
    titles = ["format", "", "level", "compute", *(f"{team} threads, us (GB/s, share)" for team in teams), "with Python"]
    message = f"{content['machine']}; {content['versions']}; commit {content['commit']}; {content['case']}"
    return table(titles, lines) + f"\n{message}; `{content['command']}`.\n"


def int8(table: Table) -> str:
    """The error of products in 8 bits against float64, a row for each format, beside float."""
    path = RESULTS / "experts_int8.json"
    if not path.exists():
        return NOTHING
    content = json.loads(path.read_text())
    layers = [row for row in content["rows"] if "relative" in row]
    texts = {(row["format"], row["compute"]): row for row in content["rows"] if "perplexity" in row}
    lines = []
    for format, compute in dict.fromkeys((row["format"], row["compute"]) for row in layers):
        mine = [row for row in layers if (row["format"], row["compute"]) == (format, compute)]
        text = texts.get((format, "exact" if compute == "float" else compute))
        figures = [_span(f"{row[name]:.2g}" for row in mine) for name in ("relative", "max_error", "rms_over_noise")]
        lines.append([format, compute, *figures, f"{text['perplexity']:.3f}" if text else "-"])
    levels = ", ".join(dict.fromkeys(row["level"] for row in layers))
    trained = texts["as trained", "exact"]
    titles = ["format", "compute", "error of y", "largest error of an element", "rms error over noise", "perplexity"]
    versions = ", ".join(f"{name} {version}" for name, version in content["versions"].items())
    conditions = f"Layer {content['layer']}; levels {levels}. Perplexity of {trained['tokens']:,} tokens"
    return (
        f"{table(titles, lines)}\n{conditions}; {trained['perplexity']:.3f} with the weights as trained. "
        f"{content['machine']}; {versions}; commit {content['commit']}; `python -m benchmarks.experts.int8 --write`.\n"
    )


def _span(values: Iterable[str]) -> str:
    """One value, or the smallest and the largest of several."""
    ordered = sorted(set(values), key=float)
    return ordered[0] if len(ordered) == 1 else f"{ordered[0]} to {ordered[-1]}"


def _decoded(row: dict) -> str:
    time = row["native"]
    rate, spread = row["bytes"] / time["us"] * 1e6, (time["p90"] - time["p10"]) / 2 / time["us"]
    return f"{time['us']:,.0f} ±{spread:.0%} ({rate / 1e9:.0f}, {rate / row['read']:.0%})"
