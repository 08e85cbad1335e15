"""The tables that `goldsmith bench` prints; they keep rows where goldsmith is slower than a peer."""

from __future__ import annotations

from collections.abc import Sequence

from rich.markup import escape

from ..terminal import WholeTable
from .rows import TimingRow
from .subject import OURS


def table(rows: Sequence[TimingRow]) -> WholeTable:
    """The table of one case: every peer in each direction, with its ratio to goldsmith."""
    first = rows[0]
    backend = next((r.backend for r in rows if r.peer == OURS), "")
    on_gpu = first.device == "cuda"
    ceiling = " or ".join(dict.fromkeys(row.ceiling for row in rows if row.ceiling)) or "ceiling"
    threads = f", threads: {first.threads}" if first.threads else ""
    case = escape(first.case)
    title = f"\n{first.op}  {case}  {first.dtype}  [dim]goldsmith's backend: {backend}{threads}[/]"
    rich_table = WholeTable(labels=2, title=title)
    rich_table.add_column("", no_wrap=True)
    rich_table.add_column("peer", no_wrap=True)
    for name in ("median", "p10-p90", "floor", f"of {ceiling}", "ours is", *(("wall",) if on_gpu else ()), "error"):
        rich_table.add_column(name, justify="right", no_wrap=True)
    rich_table.add_column("verified", no_wrap=True)
    last = ""
    for row in rows:
        single = row.mode not in ("graph", "replayed")
        kind = row.direction if single else f"{row.direction}, {row.mode}"
        label, last = ("" if kind == last else kind), kind
        peer = f"[bold]{row.peer}[/]" if row.peer == OURS else row.peer
        if row.median_us is None:
            continue
        ours = next((r for r in rows if (r.direction, r.mode, r.peer) == (row.direction, row.mode, OURS)), None)
        wall = (_us(row.wall_us) if single else "",) if on_gpu else ()
        rich_table.add_row(
            label,
            peer,
            _us(row.median_us),
            f"{_us(row.p10)}-{_us(row.p90)}",
            _us(row.floor_us),
            "" if row.share_of_ceiling is None else f"{100 * row.share_of_ceiling:.0f} %",
            _ratio(row, ours),
            *wall,
            "" if row.error is None else f"{row.error:.1e}",
            {True: "[green]yes[/]", False: "[red]no[/]", None: ""}[row.verified],
        )
    return rich_table


def broken(row: TimingRow) -> str:
    """The line for a peer that failed."""
    return f"[dim]{row.op} {row.case}: {row.peer} {escape(row.note)}[/]"


def _ratio(row: TimingRow, ours: TimingRow | None) -> str:
    if ours is None or row is ours or not ours.median_us or row.median_us is None:
        return ""
    ratio = row.median_us / ours.median_us
    return f"[green]{ratio:.2f}x faster[/]" if ratio >= 1 else f"[yellow]{1 / ratio:.2f}x slower[/]"


def _us(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def legend(device: str) -> str:
    """What the columns mean on this device."""
    how = (
        "device time of single calls, L2 flushed before each, variants taking turns; graph: 20 calls in one "
        "CUDA graph; replayed: as graph, but no call finds its inputs in L2"
        if device == "cuda"
        else "wall time of single calls, variants taking turns, caches warm"
    )
    return (
        f"[dim]{how}. Times in microseconds. floor: the time of the bytes that must move (at the copy or read rate "
        "measured in this run) or of the FLOPs (at the rate of the named instruction), whichever is longer. "
        "wall: one synchronised call. error: |first result - float64 reference| / |reference|.[/]"
    )
