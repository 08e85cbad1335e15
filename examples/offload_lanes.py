"""Draws the work of the lanes from a trace of goldsmith.offload: python examples/offload_lanes.py t.json lanes.svg

A trace comes from `with held.trace("t.json"):` or `goldsmith generate --trace t.json`. It draws one
forward of the model (--forward 0 is the prompt, 1 the first token after it) with a row per lane, and prints how long
each lane was busy.
"""

import argparse
import json
from pathlib import Path

ROWS = ("cpu", "link", "device", "merge")
COLOURS = {"cpu": "#0072b2", "link": "#e69f00", "device": "#009e73", "merge": "#cc79a7", "call": "#eeeeee"}
LEFT, WIDTH, HEIGHT, TOP = 70, 900, 30, 34


def forwards(path: Path) -> list[list[dict]]:
    """The spans of each forward; a new forward begins where the layer number does not rise."""
    events = json.loads(path.read_text())["traceEvents"]
    lanes = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M"}
    spans = [{**e, "lane": lanes[e["tid"]]} for e in events if e["ph"] == "X"]
    calls = sorted((e for e in spans if e["lane"] == "call"), key=lambda e: e["ts"])
    starts = [c["ts"] for a, c in zip([None, *calls], calls) if a is None or c["args"]["layer"] <= a["args"]["layer"]]
    ends = [*starts[1:], float("inf")]
    return [[e for e in spans if begin <= e["ts"] < end] for begin, end in zip(starts, ends)]


def drawing(spans: list[dict], title: str) -> str:
    begin, end = min(e["ts"] for e in spans), max(e["ts"] + e["dur"] for e in spans)
    scale = WIDTH / (end - begin)
    height = TOP + HEIGHT * len(ROWS) + 30

    def box(e: dict, y: float, tall: float) -> str:
        x, wide = LEFT + (e["ts"] - begin) * scale, max(0.8, e["dur"] * scale)
        details = ", ".join(f"{k} {v}" for k, v in e["args"].items())
        return (
            f'<rect x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{tall:.1f}" fill="{COLOURS[e["lane"]]}">'
            f"<title>{e['name']}: {e['dur']:.0f} us; {details}</title></rect>"
        )

    parts = [f'<text x="{LEFT}" y="14">{title}</text>']
    for e in spans:
        if e["lane"] == "call":
            parts.append(box(e, TOP - 4, HEIGHT * len(ROWS) + 4))
            parts.append(f'<text x="{LEFT + (e["ts"] - begin) * scale:.1f}" y="{TOP - 8}">{e["name"]}</text>')
    for row, lane in enumerate(ROWS):
        y = TOP + row * HEIGHT
        parts.append(f'<text x="{LEFT - 8}" y="{y + 18}" text-anchor="end">{lane}</text>')
        parts += [box(e, y + 5, HEIGHT - 10) for e in spans if e["lane"] == lane]
    for tenth in range(0, 11, 2):
        x = LEFT + WIDTH * tenth / 10
        parts.append(
            f'<text x="{x:.0f}" y="{height - 8}" text-anchor="middle">{(end - begin) * tenth / 1e4:.2f} ms</text>'
        )
    view = f'viewBox="0 0 {LEFT + WIDTH + 40} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {view} font-family="sans-serif" font-size="11" fill="#222">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>"]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--forward", type=int, default=1, help="0 is the prompt; default: 1, the first token after it")
    parser.add_argument("--title", default="")
    given = parser.parse_args()
    result = forwards(given.trace)
    if not 0 <= given.forward < len(result):
        raise SystemExit(f"--forward {given.forward}: the trace has {len(result)} forwards, 0 to {len(result) - 1}")
    spans = result[given.forward]
    given.picture.write_text(drawing(spans, given.title))
    wall = sum(e["dur"] for e in spans if e["lane"] == "call")
    print(f"{sum(e['lane'] == 'call' for e in spans)} experts calls, {wall:.0f} us")
    for lane in ROWS:
        mine = [e for e in spans if e["lane"] == lane]
        print(f"{lane:7}{len(mine):4} spans, {sum(e['dur'] for e in mine):8.0f} us")


if __name__ == "__main__":
    main()
