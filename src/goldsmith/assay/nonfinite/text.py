"""A watch as plain text of 80 columns: its events, then the norms of the last step."""

from __future__ import annotations

from collections.abc import Sequence

from . import events as facts
from .interfaces import WatchRecord
from .norms import Norm

SHOWN_ROWS, SHOWN_EVENTS = 40, 8
WIDTH = 80


def headline(watch: WatchRecord) -> str:
    """The first event in one sentence, or that there is none."""
    first = watch.first
    if first is None:
        return "All values seen were finite."
    name = {facts.NAN: "NaN", facts.INF: "Inf"}[first.kind]
    where = f" in {first.module}" if first.module else ""
    how = "born in" if first.born else "carried into"
    source = "" if first.born else f", from {first.source}"
    cause = "" if first.likely.id == facts.UNKNOWN else f"; {first.likely.title}"
    return f"First {name}: step {first.step}, {first.phase}, {how} {first.op}{where}{source}{cause}."


def last_rows(rows: Sequence[Norm]) -> list[Norm]:
    """The rows of the last recorded step, those with a remark first."""
    last = [r for r in rows if r.step == rows[-1].step] if rows else []
    return sorted(last, key=lambda r: not r.remark)


def table(watch: WatchRecord) -> str:
    """Events and the norms of the last step in 80 columns."""
    parts = [headline(watch)]
    parts += [str(event) for event in watch.events[:SHOWN_EVENTS]]
    hidden = len(watch.events) - SHOWN_EVENTS
    if hidden + watch.more > 0:
        parts.append(f"... and {max(hidden, 0) + watch.more} more events")
    rows = last_rows(watch.rows)
    if rows:
        parts.append(_norms(rows))
    return "\n\n".join(parts) + "\n"


def _norms(rows: list[Norm]) -> str:
    head = ("name", "what", "norm", "absmax", "zeros", "ratio", "")
    cells = [(r.name, r.what, *figures(r), r.remark) for r in rows[:SHOWN_ROWS]]
    widths = [max(len(c[i]) for c in [head, *cells]) for i in range(len(head))]
    widths[0] = max(8, min(widths[0], WIDTH - sum(widths[1:]) - 2 * (len(head) - 1)))
    lines = [f"Norms of step {rows[0].step}"]
    for row in (head, *cells):
        name = row[0] if len(row[0]) <= widths[0] else "…" + row[0][1 - widths[0] :]
        left = [name.ljust(widths[0]), row[1].ljust(widths[1])]
        right = [c.rjust(w) for c, w in zip(row[2:6], widths[2:6], strict=True)]
        lines.append("  ".join([*left, *right, row[6]]).rstrip())
    if len(rows) > SHOWN_ROWS:
        lines.append(f"... and {len(rows) - SHOWN_ROWS} more")
    return "\n".join(lines)


def figures(row: Norm) -> tuple[str, str, str, str]:
    """Norm, absmax, share of zeros and ratio, formatted."""
    ratio = "-" if row.ratio is None else f"{row.ratio:.3g}"
    return f"{row.norm:.3g}", f"{row.absmax:.3g}", f"{100 * row.zeros:.3g} %", ratio
