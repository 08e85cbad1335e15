"""A watch as one HTML page: no script, no network, the style of the assay's reports."""

from __future__ import annotations

from html import escape
from pathlib import Path

from .interfaces import WatchRecord
from .norms import Norm
from .text import figures, headline, last_rows

POLICY = "default-src 'none'; style-src 'unsafe-inline'"
EXTRA = "pre { white-space: pre-wrap; font: 13.5px/1.5 var(--mono); } .wide { overflow-x: auto; }"
MOST_ROWS = 4000


def write(watch: WatchRecord, path: str) -> None:
    """Write the page to `path`."""
    Path(path).write_text(page(watch), encoding="utf-8")


def page(watch: WatchRecord) -> str:
    """The page as text."""
    style = (Path(__file__).parents[1] / "report" / "html" / "style.css").read_text(encoding="utf-8")
    events = "".join(f'<div class="finding"><pre>{escape(str(event))}</pre></div>' for event in watch.events)
    if watch.more:
        events += f"<p>and {watch.more} more</p>"
    verdict = "fail" if watch.events else "pass"
    steps = sorted({row.step for row in watch.rows})
    counted = f"{len(watch.events) + watch.more} events, {len(steps)} steps with norms, {len(watch.rows)} rows"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="viewport" content="width=device-width, initial-scale=1"><title>assay.watch</title>'
        f"<style>{style}{EXTRA}</style></head><body>"
        f'<div class="top"><p class="brand">goldsmith <span>assay.watch</span></p></div><main>'
        f'<section class="{verdict}"><h1>{escape(headline(watch))}</h1><p class="lede">{counted}</p></section>'
        f"{'<h2>Events</h2>' + events if events else ''}"
        f"{_norms('Norms of the last step', last_rows(watch))}"
        f"{_all(watch.rows)}</main></body></html>\n"
    )


def _all(rows: list[Norm]) -> str:
    if not rows:
        return ""
    shown = rows[-MOST_ROWS:]
    more = f"<p>The last {len(shown)} of {len(rows)} rows.</p>" if len(shown) < len(rows) else ""
    return f'<details class="more"><summary>Every step</summary>{more}{_table(shown)}</details>'


def _norms(title: str, rows: list[Norm]) -> str:
    return f"<h2>{title}</h2>{_table(rows)}" if rows else ""


def _table(rows: list[Norm]) -> str:
    names = ("step", "name", "what", "norm", "absmax", "zeros", "to the step before", "remark")
    head = "".join(f'<th scope="col">{name}</th>' for name in names)
    lines = []
    for row in rows:
        cells = [str(row.step), row.name, row.what, *figures(row), row.remark]
        lines.append("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>")
    return f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{"".join(lines)}</tbody></table></div>'
