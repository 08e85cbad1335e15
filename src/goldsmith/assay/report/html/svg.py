"""Small inline drawings: the seal, error maps, headroom dots, case squares.

Every drawing escapes its text, carries a <title>, and takes its colours by class from the page's style, so that one
drawing serves light and dark. Stretching drawings use widths in percent, so that dots keep their size on a phone.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from markupsafe import Markup, escape

SQUARE, GAP, PER_LINE = 10, 2, 28

Span = tuple[int, int]  # the first and the last index

ERROR_STEPS = (1e-3, 1e-2, 1e-1, 0.5, 1.0, 10.0, 1e3)
ERROR_LEGEND = ("≤ 0.001", "≤ 0.01", "≤ 0.1", "≤ 0.5", "≤ 1", "≤ 10", "≤ 1000", "beyond")
FIRST_BAD = 5  # the first step above the bound


@dataclass(frozen=True)
class Square:
    """One case in the matrix; its state sets colour and shape, its title names the case."""

    state: str
    title: str
    href: str = ""


def seal(verdict: str) -> Markup:
    """A hallmark: an octagonal punch with a tick, a cross, or a question mark."""
    title = {"pass": "holds", "fail": "rejected", "partial": "not finished"}.get(verdict, "the reference is at fault")
    outer = _octagon(36, 34)
    inner = _octagon(36, 28.5)
    mark = {
        "pass": '<path class="mark" d="M24 37l8.5 8.5L49 27.5"/>',
        "fail": '<path class="mark" d="M26 26l20 20M46 26L26 46"/>',
        "partial": '<path class="mark" d="M28 25v22M44 25v22"/>',
    }.get(verdict, '<path class="mark" d="M29 30a7 7 0 1 1 10 6.4q-3 1.6-3 5.6M36 47.5v.5"/>')
    return Markup(
        f'<svg class="seal" viewBox="0 0 72 72" width="72" height="72" role="img"><title>{title}</title>'
        f'<path class="rim" d="{outer}"/><path class="rim thin" d="{inner}"/>{mark}</svg>'
    )


def _octagon(centre: float, radius: float) -> str:
    points = []
    for k in range(8):
        angle = math.pi / 8 + k * math.pi / 4
        points.append(f"{centre + radius * math.cos(angle):.2f} {centre + radius * math.sin(angle):.2f}")
    return "M" + "L".join(points) + "Z"


def glyph(state: str) -> Markup:
    """A 12-pixel sign that distinguishes the states without colour."""
    drawing = {
        "ok": '<path d="M2.5 6.5l2.6 2.6L9.8 3.6"/>',
        "bad": '<path d="M3 3l6 6M9 3l-6 6"/>',
        "quality": '<path d="M6 2.2v5M6 9.4v.4"/>',
        "note": '<circle cx="6" cy="6" r="3.4"/>',
        "culprit": '<path d="M3 3l6 6M9 3l-6 6"/>',
        "observed": '<path d="M6 2.2v5M6 9.4v.4"/>',
        "inherited": '<path d="M2.5 9.5c0-4 2-5.500 6.500-5.500M6.800 1.800L9.300 4 6.800 6.200"/>',
    }.get(state, '<path d="M3 6h6"/>')
    words = {"ok": "right", "bad": "wrong", "quality": "right, but poor", "inherited": "wrong by inheritance"}.get(
        state, state
    )
    return Markup(
        f'<svg class="g {_class(state)}" viewBox="0 0 12 12" width="12" height="12" role="img">'
        f"<title>{escape(words)}</title>{drawing}</svg>"
    )


def squares(cases: Sequence[Square], label: str) -> Markup:
    """A square for every case, with a fixed number per line, so that one size fits phone and desktop."""
    if not cases:
        return Markup("")
    step = SQUARE + GAP
    lines = -(-len(cases) // PER_LINE)
    width, height = min(len(cases), PER_LINE) * step - GAP, lines * step - GAP
    box = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    out = [f'<svg class="squares" {box} role="img"><title>{escape(label)}</title>']
    for k, case in enumerate(cases):
        x, y = k % PER_LINE * step, k // PER_LINE * step
        body = f'<rect class="s {_class(case.state)}" x="{x}" y="{y}" width="{SQUARE}" height="{SQUARE}" rx="2">'
        body += f"<title>{escape(case.title)}</title></rect>"
        if case.state == "bad":
            body += f'<path class="x" d="M{x + 3} {y + 3}l4 4m0-4l-4 4"/>'
        if case.href:
            body = f'<a href="{escape(case.href)}">{body}</a>'
        out.append(body)
    out.append("</svg>")
    return Markup("".join(out))


CELL = 36  # pixels, at most, of the height of a cell: a few numbers need no large picture


def error_map(grid: Sequence[Sequence[float]], title: str, columns: Iterable[float] = ()) -> Markup:
    """Error over bound in eight steps; the last three are beyond the bound."""
    return _cells(grid, _error_step, "e", title, columns)


def value_map(grid: Sequence[Sequence[float]], scale: float, title: str, columns: Iterable[float] = ()) -> Markup:
    """Signed values in eleven steps between -scale and scale."""

    def step(value: float) -> str:
        if math.isnan(value):
            return "n"
        if math.isinf(value):
            return "i"
        return str(round(5 + 5 * max(-1.0, min(1.0, value / scale if scale else 0.0))))

    return _cells(grid, step, "v", title, columns)


def _error_step(value: float) -> str:
    if math.isnan(value):
        return "n"
    return str(next((k for k, edge in enumerate(ERROR_STEPS) if value <= edge), len(ERROR_STEPS)))


def _cells(
    grid: Sequence[Sequence[float]],
    step: Callable[[float], str],
    prefix: str,
    title: str,
    columns: Iterable[float] = (),
    flat: bool = False,
) -> Markup:
    """One path per colour, made of horizontal runs; a map of 4,096 random cells takes about 25 kB."""
    height, width = len(grid), max((len(row) for row in grid), default=0)
    if not height or not width:
        return Markup("")
    paths: dict[str, list[str]] = {}
    for y, row in enumerate(grid):
        x = 0
        while x < len(row):
            name, start = step(row[x]), x
            while x < len(row) and step(row[x]) == name:
                x += 1
            paths.setdefault(name, []).append(f"M{start} {y}h{x - start}")
    aspect = min(max(width / height, 0.8), 3.2)
    box = f'viewBox="0 -.5 {width} {height}" preserveAspectRatio="none"'
    box += f' style="aspect-ratio:{aspect:.3f};max-height:{min(340, CELL * height)}px"'
    if flat:
        box = f'viewBox="0 -.5 {width} {height}" preserveAspectRatio="none" height="14"'
    out = [f'<svg class="map" {box} role="img"><title>{escape(title)}</title>']
    out += [f'<path class="{prefix}{name}" d="{"".join(runs)}"/>' for name, runs in sorted(paths.items())]
    borders = "".join(f"M{x:g} -.5v{height}" for x in columns)
    if borders:
        out.append(f'<path class="border" d="{borders}"/>')
    out.append("</svg>")
    return Markup("".join(out))


def headroom(values: Sequence[float], title: str, *, low: float = 1e-6, high: float = 1e2) -> Markup:
    """Dots at measured / limit, one for each run, on a logarithmic axis from `low` to `high`; 1 is the limit."""
    places = sorted({min(high, max(low, v)) if not math.isnan(v) else high for v in values})
    dots, last = [], -1.0
    for value in places:
        at = 100 * math.log(value / low) / math.log(high / low)
        if at - last < 0.6 and value != places[-1]:
            continue
        last = at
        at = min(max(at, 0.8), 99.2)
        dots.append(f'<circle class="{"over" if value > 1 else "under"}" cx="{at:.1f}%" cy="9" r="3.5"/>')
    limit = 100 * math.log(1 / low) / math.log(high / low)
    return Markup(
        f'<svg class="headroom" width="100%" height="18" role="img"><title>{escape(title)}</title>'
        f'<line class="axis" x1="0" x2="100%" y1="9" y2="9"/>'
        f'<line class="limit" x1="{limit:.1f}%" x2="{limit:.1f}%" y1="0" y2="18"/>{"".join(dots)}</svg>'
    )


def excess(measured: float, limit: float, title: str) -> Markup:
    """Two bars on one linear scale, the measured and the allowed value, each wide enough to be visible."""
    if not limit > 0 or math.isnan(measured) or math.isinf(measured):
        return Markup("")
    largest = max(abs(measured), limit)
    a, b = (max(0.7, 100 * v / largest) for v in (abs(measured), limit))
    return Markup(
        f'<svg class="excess" width="100%" height="14" role="img"><title>{escape(title)}</title>'
        f'<rect class="measured" x="0" y="0" width="{a:.1f}%" height="6" rx="1"/>'
        f'<rect class="allowed" x="0" y="8" width="{b:.1f}%" height="6" rx="1"/></svg>'
    )


def depends(length: int, missing: Sequence[Span], extra: Sequence[Span], title: str) -> Markup:
    """The indices of an axis: filled if they have influence, hollow if they lack it, marked if they leak."""
    parts = ['<rect class="d-on" x="0" y="0" width="100%" height="14"/>']
    for name, spans in (("d-off", missing), ("d-leak", extra)):
        for lo, hi in spans:
            x = 100 * lo / max(length, 1)
            wide = min(max(100 * (hi - lo + 1) / max(length, 1), 0.8), 100 - x)
            parts.append(f'<rect class="{name}" x="{x:.2f}%" y="0" width="{wide:.2f}%" height="14"/>')
    return Markup(
        f'<svg class="depends" width="100%" height="14" role="img"><title>{escape(title)}</title>{"".join(parts)}</svg>'
    )


def score(value: float, title: str) -> Markup:
    """A bar between 0 and 1."""
    wide = 100 * min(max(value, 0.0), 1.0)
    return Markup(
        f'<svg class="score" width="100%" height="6" role="img"><title>{escape(title)}</title>'
        f'<rect class="ground" x="0" y="0" width="100%" height="6" rx="3"/>'
        f'<rect class="filled" x="0" y="0" width="{wide:.1f}%" height="6" rx="3"/></svg>'
    )


def _class(state: str) -> str:
    return "".join(c for c in state if c.isalnum()) or "unknown"
