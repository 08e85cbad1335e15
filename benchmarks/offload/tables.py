"""The tables that `python -m benchmarks.offload` prints; they keep rows where goldsmith is slower than a peer."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape
from rich.table import Table

from goldsmith.cli.generate.display import size

from .rows import OffloadRow

LEGEND = (
    "[dim]Wall time in microseconds until the device has finished, ways taking turns: one call of the experts (calls, "
    "guard) or a forward of all layers (steps). split: experts of a call on the CPU, copied, cached. predicted: the "
    "time that the plan predicts over the median; hardware: the same at this machine's own rates. overlap: the busiest "
    "lane's share of the time. Routing is uniform: hit rates say nothing about a trained router.[/]"
)


def table(rows: Sequence[OffloadRow]) -> Table:
    if not rows:
        return Table(box=None)
    first = rows[0]
    title = f"\n{first.op}  {first.shape}  {first.case}  [dim]{first.format}[/]"
    rich_table = Table(title=title, title_justify="left", title_style="bold", box=None, padding=(0, 2, 0, 0))
    rich_table.add_column("", no_wrap=True)
    for name in ("median", "split", "predicted", "hardware", "overlap", "error"):
        rich_table.add_column(name, justify="right", no_wrap=True)
    rich_table.add_column("", no_wrap=True)
    for row in rows:
        if row.median_us is None:
            for name, value in row.figures.items():
                rich_table.add_row(
                    name.removesuffix("_s"), f"{value:.3g} s" if name.endswith("_s") else size(int(value))
                )
            if not row.figures:
                rich_table.add_row(row.peer, escape((row.note or row.verified_by)[:60]))
            continue
        split = "" if row.on_cpu is None else f"{row.on_cpu:.1f} {row.copied:.1f} {row.cached:.1f}"
        spread = 50 * ((row.p90 or 0.0) - (row.p10 or 0.0)) / row.median_us
        if row.ratio is not None:
            split = f"ratio {row.ratio:.3f} ({row.ratio_p10:.3f}-{row.ratio_p90:.3f})"
        rich_table.add_row(
            row.peer, f"{row.median_us:,.0f} ±{spread:.0f} %", split, _percent(row.bound_share),
            _percent(row.hardware_share), _percent(row.overlap), "" if row.error is None else f"{row.error:.1e}",
            {True: "[green]verified[/]", False: "[red]WRONG[/]", None: ""}[row.verified],
        )  # fmt: skip
    return rich_table


def _percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
