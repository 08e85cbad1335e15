"""A watch as one HTML page, on the template of the assay's reports: the events, then norms of the steps around them."""

from __future__ import annotations

import platform
from collections.abc import Sequence
from pathlib import Path

import torch

from ..support.output_file import write_whole
from . import events as facts
from .events import Event
from .interfaces import WatchRecord
from .norms import Norm
from .text import headline, last_rows

MOST_ROWS = 4000
NAMES = {facts.NAN: "NaN", facts.INF: "Inf"}


def write(watch: WatchRecord, path: str) -> None:
    """Write the page to `path`."""
    write_whole(path, page(watch))


def page(watch: WatchRecord) -> str:
    """The page as text."""
    from ..report.html.page import now, style, template  # jinja2 takes 30 ms to load

    rows = watch.rows
    first = watch.first
    steps = sorted({row.step for row in rows})
    around, title = _around(rows, first)
    context: dict[str, object] = {
        "style": style(),
        "title": "assay.watch",
        "made": now(),
        "verdict": "fail" if watch.events else "pass",
        "headline": headline(watch),
        "first": first,
        "events": [_event(event) for event in watch.events],
        "more": watch.more,
        "facts": _facts(watch, steps),
        "around": around,
        "around_title": title,
        "every": rows[-MOST_ROWS:],
        "every_total": len(rows),
        "environment": {"torch": torch.__version__, "python": platform.python_version(), "machine": platform.machine()},
    }
    return template("watch.html.j2").render(context)


def _facts(watch: WatchRecord, steps: Sequence[int]) -> list[str]:
    events = len(watch.events) + watch.more
    lines = [f"{events:,} event{'' if events == 1 else 's'}"]
    if len(steps) == 1:
        lines.append(f"norms of step {steps[0]}")
    elif steps:
        lines.append(f"norms of {len(steps):,} steps ({steps[0]} to {steps[-1]})")
    return lines


def _event(event: Event) -> dict[str, object]:
    where = f" in {event.module}" if event.module else ""
    inputs = (
        "all inputs were finite" if all(i.finite for i in event.inputs) else "it read infinities written on purpose"
    )
    how = f"born here: {inputs}" if event.born else f"carried, from {event.source}"
    total = f"{event.total:,} element{'' if event.total == 1 else 's'}"
    share = f"{event.count:,} of {total}" if event.count is not None else f"among {total}"
    at = f", first at {list(event.index)}" if event.index else ""
    return {
        "name": NAMES[event.kind],
        "what": f"Step {event.step}, {event.phase}: {event.op}{where}",
        "where": f"{event.tensor}: {share}{at}; {how}",
        "likely": event.likely,
        "inputs": event.inputs,
        "stack": [frame.removeprefix(f"{Path.cwd()}/") for frame in event.stack],
    }


def _around(rows: Sequence[Norm], first: Event | None) -> tuple[list[dict[str, object]], str]:
    """The norms of the first event's step beside the recorded step before it, those with a remark first.

    Without an event, or if its step has no norms, the last recorded step takes its place.
    """
    steps = sorted({row.step for row in rows})
    if not steps:
        return [], ""
    step = first.step if first is not None and first.step in steps else steps[-1]
    before = max((s for s in steps if s < step), default=None)
    earlier = {(row.name, row.what): row for row in rows if row.step == before}
    which = "Norms at the first event" if first is not None and step == first.step else "Norms of the last step"
    title = f"{which}: step {step}" + (f", compared with step {before}" if before is not None else "")
    chosen = last_rows([row for row in rows if row.step == step])
    return [{"row": row, "before": earlier.get((row.name, row.what))} for row in chosen], title
