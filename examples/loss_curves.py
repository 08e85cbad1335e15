"""Draws the JSON of mhc_lm.py as SVG, without any package: `python examples/loss_curves.py lm.json lm.svg`.

Several results of one size share a picture: `python examples/loss_curves.py build/mhc_lm/*.json lm.svg`.

A line is the mean over the seeds; its band goes from the lowest to the highest seed. Left: training loss, a running
mean over a twentieth of the steps. Right: validation loss. Both leave out the first tenth of the training, where all
curves fall alike.
"""

import json
import math
import sys
from html import escape
from pathlib import Path

WIDTH, HEIGHT, MARGIN, GAP = 960, 380, 56, 64
COLOURS = ("#1f6fb4", "#c4540b", "#2f8045", "#8a4fb0", "#a8304f")
STYLE = """
svg { font: 13px system-ui, sans-serif; } text { fill: #24292f; } .ground { fill: #ffffff; }
.grid { stroke: #d0d7de; } .note { fill: #57606a; } .line { fill: none; stroke-width: 2; } .band { opacity: 0.18; }
@media (prefers-color-scheme: dark) {
  text { fill: #e6edf3; } .ground { fill: #0d1117; } .grid { stroke: #30363d; } .note { fill: #9aa4ae; }
  .band { opacity: 0.3; }
}
"""

Points = list[tuple[int, float]]
SIZE = (
    "dim",
    "layers",
    "heads",
    "n",
    "seq",
    "batch",
    "steps",
    "lr",
    "bytes",
)  # conditions that all results of a picture share


def merged(results: list[dict]) -> dict:
    """One result with the runs of all; they must have one size and one text."""
    sizes = [{name: result["conditions"][name] for name in SIZE} for result in results]
    differing = [name for name in SIZE if len({size[name] for size in sizes}) > 1]
    if differing:
        raise ValueError(f"the results differ in {', '.join(differing)}: one picture cannot show them")
    return results[0] | {"runs": [run for result in results for run in result["runs"]]}


def by_model(runs: list[dict]) -> dict[str, list[dict]]:
    """Runs by model, "plain" last, in the order of seeds."""
    names = {id(run): f"mhc ({run['init']})" if run["residual"] == "mhc" else "plain" for run in runs}
    order = sorted(runs, key=lambda run: (run["residual"] == "plain", run["seed"]))
    return {name: [r for r in order if names[id(r)] == name] for name in dict.fromkeys(names[id(r)] for r in order)}


def smooth(loss: list[float]) -> Points:
    """The mean of the last twentieth of all steps, at every step from the first tenth on."""
    window = max(1, len(loss) // 20)
    means = [(i, sum(loss[i - window : i]) / window) for i in range(max(window, len(loss) // 10), len(loss) + 1)]
    return means[:: max(1, len(means) // 200)]


def ticks(low: float, high: float) -> list[float]:
    """Four to nine round numbers."""
    step = next(s for e in range(-6, 300) for s in (1 * 10.0**e, 2 * 10.0**e, 5 * 10.0**e) if (high - low) / s <= 8)
    return [i * step for i in range(round(low / step), round(high / step) + 1) if low <= i * step <= high]


def panel(title: str, curves: dict[str, list[Points]], left: float, width: float, unigram: float) -> list[str]:
    """One plot; curves[name] has a list of points per seed."""
    # a training that diverged ends the curve at its last finite loss
    curves = {name: [[p for p in seed if math.isfinite(p[1])] for seed in seeds] for name, seeds in curves.items()}
    every = [p for seeds in curves.values() for points in seeds for p in points] or [(0, 0.0)]
    (x0, x1), (low, high) = ([f(p[i] for p in every) for f in (min, max)] for i in (0, 1))
    low, high = low - 0.04 * (high - low) - 1e-3, high + 0.04 * (high - low) + 1e-3
    bottom, top = HEIGHT - MARGIN, 32

    def at(step: float, value: float) -> str:
        x = left + width * (step - x0) / max(1, x1 - x0)
        return f"{x:.1f},{bottom - (bottom - top) * (value - low) / (high - low):.1f}"

    parts = [f'<text x="{left}" y="{top - 14}">{escape(title)}</text>']
    for value in ticks(low, high):
        y = at(x0, value).split(",")[1]
        parts.append(f'<line class="grid" x1="{left}" x2="{left + width}" y1="{y}" y2="{y}"/>')
        parts.append(f'<text class="note" x="{left - 6}" y="{y}" dy="4" text-anchor="end">{value:.4g}</text>')
    for step in ticks(x0, x1):
        x = at(step, low).split(",")[0]
        parts.append(f'<text class="note" x="{x}" y="{bottom + 18}" text-anchor="middle">{step:g}</text>')
    parts.append(f'<text class="note" x="{left + width}" y="{bottom + 36}" text-anchor="end">steps</text>')
    if low < unigram < high:
        a, b = at(x0, unigram).split(","), at(x1, unigram).split(",")
        parts.append(f'<path class="line grid" stroke-dasharray="5 4" d="M{a[0]} {a[1]}H{b[0]}"/>')
        parts.append(
            f'<text class="note" x="{b[0]}" y="{a[1]}" dy="-5" text-anchor="end">byte frequencies alone</text>'
        )
    for colour, seeds in zip(COLOURS * len(curves), curves.values(), strict=False):
        rows = list(zip(*seeds, strict=False))  # the shortest run ends the band and the mean
        lower = [at(row[0][0], min(v for _, v in row)) for row in rows]
        upper = [at(row[0][0], max(v for _, v in row)) for row in rows]
        mean = [at(row[0][0], sum(v for _, v in row) / len(row)) for row in rows]
        if len(seeds) > 1:
            parts.append(f'<polygon class="band" fill="{colour}" points="{" ".join(lower + upper[::-1])}"/>')
        parts.append(f'<polyline class="line" stroke="{colour}" points="{" ".join(mean)}"/>')
    return parts


def svg(result: dict) -> str:
    """The picture of one result of mhc_lm.py (a dict as in its JSON)."""
    groups = by_model(result["runs"])
    train = {name: [run.get("train_curve") or smooth(run["loss"]) for run in runs] for name, runs in groups.items()}
    held_out = {
        name: [[(s, v) for s, v in run["val_curve"] if 10 * s >= run["val_curve"][-1][0]] for run in runs]
        for name, runs in groups.items()
    }
    width = (WIDTH - 2 * MARGIN - GAP) / 2
    conditions, seeds = result["conditions"], max(len(runs) for runs in groups.values())
    size = f"dim {conditions['dim']}, {conditions['layers']} blocks, {conditions['batch']} x {conditions['seq']} bytes"
    title = f"{size} a step, {seeds} seed{'s' * (seeds > 1)}, {conditions['device']}, torch {conditions['torch']}"
    height = HEIGHT + 22 * len(groups) + 24
    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" role="img">']
    parts += [
        f"<title>Loss of {escape(' and '.join(groups))}</title><desc>{escape(title)}</desc><style>{STYLE}</style>"
    ]
    parts += [f'<rect class="ground" width="{WIDTH}" height="{height}"/>']
    parts += panel("training loss, nats per byte", train, MARGIN, width, result["unigram_nats"])
    parts += panel("validation loss, nats per byte", held_out, MARGIN + width + GAP, width, result["unigram_nats"])
    y = HEIGHT + 8
    for colour, (name, runs) in zip(COLOURS * len(groups), groups.items(), strict=False):
        values = [run["val_loss"] for run in runs]
        spread = f" ({min(values):.3f} to {max(values):.3f})" if len(runs) > 1 else ""
        parts.append(
            f'<rect x="{MARGIN}" y="{y - 8}" width="16" height="6" fill="{colour}"/><text x="{MARGIN + 24}" y="{y}">'
        )
        parts.append(f"{escape(name)}: validation {sum(values) / len(values):.3f}{spread}</text>")
        y += 22
    parts.append(f'<text class="note" x="{MARGIN}" y="{y + 4}">{escape(title)}</text></svg>\n')
    return "\n".join(parts)


if __name__ == "__main__":
    if len(sys.argv) < 3 or not sys.argv[-1].endswith(".svg"):
        sys.exit("usage: python loss_curves.py RESULT.json ... PICTURE.svg")
    try:
        picture = svg(merged([json.loads(Path(name).read_text()) for name in sys.argv[1:-1]]))
    except (OSError, ValueError) as error:
        sys.exit(f"loss_curves: {error}")
    Path(sys.argv[-1]).write_text(picture)
