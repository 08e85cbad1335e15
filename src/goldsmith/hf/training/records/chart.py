"""A line chart that stretches with its page: the curves are SVG, while numbers and dots keep their size."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

MOST = 600  # points of a curve; longer ones show means of neighbours

Point = tuple[int, float]


@dataclass(frozen=True)
class Line:
    """A curve; `kind` is its CSS class."""

    kind: str
    points: Sequence[Point]
    dots: bool = False


def smooth(points: Sequence[Point]) -> list[Point]:
    """A running mean over a twentieth of the steps, at least five; shorter at the ends."""
    sums, reach = [0.0, *itertools.accumulate(value for _, value in points)], max(2, len(points) // 40)
    means = []
    for k, (step, _) in enumerate(points):
        first, end = max(0, k - reach), min(len(points), k + reach + 1)
        means.append((step, (sums[end] - sums[first]) / (end - first)))
    return means


def chart(size: str, title: str, lines: Sequence[Line], *, zero: bool = False, unit: str = "") -> str:
    """A figure as HTML; the value axis covers every point, and starts at zero if `zero`. unit: of the values."""
    lines = [Line(line.kind, thinned(line.points), line.dots) for line in lines if line.points]
    values = [v for line in lines for _, v in line.points]
    places = [x for line in lines for x, _ in line.points]
    low, high = (0.0 if zero else min(values)), max(values)
    margin = 0.06 * (high - low) or 0.05 * abs(high) or 1.0
    low, high = (0.0 if zero else low - margin), high + margin
    left, right = min(places), max(places)
    width = max(1, right - left)

    def at(point: Point) -> tuple[float, float]:
        return 100 * (point[0] - left) / width, 100 * (point[1] - low) / (high - low)

    marks = [(value, 100 * (value - low) / (high - low)) for value in ticks(low, high, 5 if size == "tall" else 3)]
    grid = "".join(f"M0 {100 - y:.2f}H100" for _, y in marks)
    body = f'<path class="grid" d="{grid}"/>'
    spans = "".join(f'<span class="y" style="bottom:{y:.2f}%">{number(value)}</span>' for value, y in marks)
    for step in ticks(left, right, 6 if size == "tall" else 3):
        if step == int(step):
            spans += f'<span class="x" style="left:{100 * (step - left) / width:.2f}%">{step:,.0f}</span>'
    for line in lines:
        path = "L".join(f"{x:.2f} {100 - y:.2f}" for x, y in map(at, line.points))
        body += f'<path class="{line.kind}" d="M{path}"/>'
        for point in line.points if line.dots else ():
            x, y = at(point)
            label = f"step {point[0]:,}: {point[1]:.4f}"
            spans += f'<i style="left:{x:.2f}%;bottom:{y:.2f}%" title="{label}"></i>'
    spans += f'<span class="unit">{escape(unit)}</span>' if unit else ""
    spans += '<span class="unit-x">step</span>'
    caption = f"<figcaption>{escape(title)}</figcaption>" if title else ""
    drawing = f"<title>{escape(title or 'loss by step')}</title>{body}"
    return (
        f'<figure class="chart {size}">{caption}<div class="plot">'
        f'<svg viewBox="0 0 100 100" preserveAspectRatio="none" role="img">{drawing}</svg>{spans}</div></figure>'
    )


def thinned(points: Sequence[Point]) -> Sequence[Point]:
    """At most MOST points: means of groups of neighbours, and the last point unchanged."""
    if len(points) <= MOST:
        return points
    size = -(-len(points) // MOST)
    groups = [points[k : k + size] for k in range(0, len(points), size)]
    return [*((g[len(g) // 2][0], sum(v for _, v in g) / len(g)) for g in groups[:-1]), points[-1]]


def ticks(low: float, high: float, about: int) -> list[float]:
    """About `about` round numbers between low and high."""
    raw = (high - low) / max(1, about)
    if not raw > 0:
        return [low]
    unit = 10.0 ** math.floor(math.log10(raw))
    step = next(k * unit for k in (1, 2, 2.5, 5, 10) if k * unit >= raw * 0.999)
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 12) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    """The shortest text of a number."""
    if value and (abs(value) < 1e-3 or abs(value) >= 1e5):
        return f"{value:.2g}".replace("e-0", "e-").replace("e+0", "e")
    return f"{value:,.0f}" if value == int(value) and abs(value) >= 1000 else f"{value:.4g}"
