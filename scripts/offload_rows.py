"""Tables from rows of `python -m benchmarks.offload`: those of benchmarks/results whose op begins with offload."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

RESULTS = Path(__file__).resolve().parent.parent / "benchmarks" / "results"
OURS = "goldsmith"
RULES = ("all on the CPU", "all copied", "fixed ratio", "Fiddler's rule")
PEERS = ("transformers, CPU", "grouped_mm, CPU", "all on the GPU")
STEPS = ("goldsmith, none cached", "goldsmith, all on the CPU", "transformers, CPU", "grouped_mm, CPU", "accelerate")
HALF = "goldsmith, half cached"
NOTHING = "No measurement is in benchmarks/results yet: `python -m benchmarks.offload --json FILE` there makes one.\n"
Table = Callable[[list[str], list[list[str]]], str]
Case = dict[str, dict]  # peer -> row


def cases(op: str) -> dict[tuple, Case]:
    """(machine, shape, case, format) -> the rows of its newest run."""
    by_name: dict[tuple, Case] = {}
    for row in rows():
        if row["op"] == op:
            place = row["machine"], row["shape"], row["case"], row["format"]
            case = by_name.setdefault(place, {})
            if any(run_of(other) != run_of(row) for other in case.values()):
                case.clear()
            case[row["peer"]] = row
    return by_name


def rows() -> Iterator[dict]:
    for path in sorted(RESULTS.glob("*.jsonl")):
        for line in path.read_text().splitlines():
            row = json.loads(line)
            if row["op"].startswith("offload.") and row["device"] == "cuda":
                yield row


def run_of(row: dict) -> tuple:
    return row["date"], row["commit"], json.dumps(row["versions"])


def calls(table: Table) -> str:
    lines, shown = [], []
    for (_, shape, case, format), entry in cases("offload.calls").items():
        ours = entry.get(OURS)
        if ours is None or "median_us" not in ours:
            continue
        shown += entry.values()
        lines.append([
            f"{shape}, {case}" + ("" if format == "bf16" else f", {format}"), time(ours), split(ours),
            percent(ours.get("bound_share")), percent(ours.get("hardware_share")), percent(ours.get("overlap")),
            *(time(entry.get(peer)) for peer in (*RULES, *PEERS)), verified_text(ours),
        ])  # fmt: skip
    titles = ["", "ours", "CPU, copied, cached", "of the predicted speed", "of the hardware's speed", "overlap"]
    return whole(table, [*titles, *RULES, *PEERS, "verified"], lines, shown) + constants(shown)


def constants(shown: list[dict]) -> str:
    """The rates that the plans used, and those of the hardware, from the last run of each shape."""
    last = {row["shape"]: row["figures"] for row in shown if row["peer"] == OURS and "figures" in row}
    text = ""
    for shape, f in last.items():
        rates = ", ".join(f"{lane} {f[f'{lane}_bytes_per_s'] / 1e9:.3g}" for lane in ("cpu", "link", "dram", "device"))
        hard = {lane: f[f"hardware_{lane}_bytes_per_s"] / 1e9 for lane in ("cpu", "link", "device")}
        delays = ", ".join(f"{lane} {f[f'{lane}_latency'] * 1e6:.0f}" for lane in ("cpu", "link", "device"))
        text += (
            f"- {shape}, calibrated: GB/s {rates}; TFLOP/s CPU {f['cpu_flops'] / 1e12:.3g}, device "
            f"{f['device_flops'] / 1e12:.3g}; latencies in us: {delays}; link and CPU break even at "
            f"{f['break_even_tokens']:.0f} tokens an expert. The hardware: memory read {hard['cpu']:.0f} GB/s, link "
            f"{hard['link']:.0f}, GPU memory {hard['device']:.0f}; TFLOP/s CPU {f['hardware_cpu_flops'] / 1e12:.3g}, "
            f"device {f['hardware_device_flops'] / 1e12:.0f}.\n"
        )
    return "\n" + text if text else ""


def steps(table: Table) -> str:
    lines, shown = [], []
    for (_, shape, case, format), entry in cases("offload.step").items():
        ours = entry.get(HALF)
        if ours is None or "median_us" not in ours:
            continue
        shown += entry.values()
        layers = f"{ours['sizes']['layers']} layers"
        ratios = [against(entry.get(peer), ours) for peer in (*STEPS, "all on the GPU")]
        name = f"{shape}, {layers}, {case}" + ("" if format == "bf16" else f", {format}")
        lines.append([name, time(ours), percent(ours.get("hit_rate")), *ratios, verified_text(ours)])
    titles = ["", "ours, half cached", "hit rate", *STEPS, "all on the GPU", "verified"]
    return whole(table, titles, lines, shown)


def guard(table: Table) -> str:
    lines, shown = [], []
    for (_, shape, case, _), entry in cases("offload.guard").items():
        row = entry[OURS]
        shown.append(row)
        spread = f"{row['ratio']:.3f} ({row['ratio_p10']:.3f} to {row['ratio_p90']:.3f})"
        lines.append([f"{shape}, {case}", time(row), spread, f"{row['runs']}"])
    return whole(table, ["", "a call with the guard", "ratio to a call without it", "pairs"], lines, shown)


def memory(table: Table) -> str:
    lines, shown = [], []
    for (_, shape, _, _), entry in cases("offload.memory").items():
        row = entry[OURS]
        shown.append(row)
        f = row["figures"]
        beside = f["device_peak"] - f["callers_tensors"]
        numbers = [f"{v / 2**20:.3g}" for v in (f["store"], f["budget"], beside, f["host_anonymous"])]
        lines.append([f"{shape}, {row['sizes']['layers']} layers", *numbers, f"{f['open_s'] * 1e3:.2f}"])
    titles = ["MiB", "store", "gpu_budget", "peak on the GPU", "more host memory", "open, ms"]
    return whole(table, titles, lines, shown)


def whole(table: Table, titles: list[str], lines: list[list[str]], shown: list[dict]) -> str:
    if not lines:
        return NOTHING
    kept = [i for i in range(len(titles)) if i == 0 or any(line[i] not in ("", "-") for line in lines)]
    text = table([titles[i] for i in kept], [[line[i] for i in kept] for line in lines])
    return text + "\n" + "".join(f"{line}\n" for line in conditions(shown))


def conditions(shown: list[dict]) -> Iterator[str]:
    for machine, run in dict.fromkeys((row["machine"], run_of(row)) for row in shown):
        date, commit, versions = run
        named = ", ".join(f"{name} {version}" for name, version in json.loads(versions).items())
        threads = {row["threads"] for row in shown if run_of(row) == run and "threads" in row}
        loads = [row["load"] for row in shown if run_of(row) == run and "load" in row]
        busy = f" load {max(loads):.1f} before the run;" if loads else ""
        yield (
            f"{machine};{busy} {named}; commit {commit}; {date}; CPU lane of {', '.join(map(str, sorted(threads)))} "
            f"threads; wall time in milliseconds until the device has finished, ways in turns; "
            "median ± half of p10..p90."
        )


def time(row: dict | None) -> str:
    """The median in milliseconds, and its spread."""
    if row is None or "median_us" not in row:
        return "-"
    median = row["median_us"] / 1e3
    return f"{median:.3g} ±{50 * (row['p90'] - row['p10']) / row['median_us']:.0f} %"


def against(row: dict | None, ours: dict) -> str:
    """The median in milliseconds, and its ratio to goldsmith's."""
    if row is None or "median_us" not in row:
        return "-"
    return f"{row['median_us'] / 1e3:.3g} ({row['median_us'] / ours['median_us']:.2g}x)"


def split(row: dict) -> str:
    return f"{row['on_cpu']:.1f}, {row['copied']:.1f}, {row['cached']:.1f}"


def percent(share: float | None) -> str:
    return "-" if share is None else f"{100 * share:.0f} %"


def verified_text(row: dict) -> str:
    return {True: "yes", False: "**no**", None: "-"}[row.get("verified")]
