"""The tables that `goldsmith bench generate` prints, 80 columns wide; rows that are slower than a peer stay."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.markup import escape

from goldsmith.cli.terminal import WholeTable, size

from .rows import GenerateRow, Rate
from .rules import precision

LEGEND = (
    "Tokens per second: median over rounds in turns, ± half of slowest to fastest. read: share of the measured read "
    "rate that a token's weights take. memory: of the process (stated before it started). error: of logits "
    "against float64."
)
LEAST_PART = 0.02  # of a token's time; smaller parts are added up


def table(rows: Sequence[GenerateRow]) -> WholeTable:
    first = rows[0]
    layers = f"{first.sizes['layers']} layers"
    if first.sizes["layers"] < first.all_layers:
        layers += f" of {first.all_layers}"
    title = f"{first.shape}, {layers}, {precision(first)}"
    shown = WholeTable(labels=1, title=title)
    shown.add_column("", no_wrap=True)
    for name in (f"prompt {first.prompt_tokens}", f"decode {first.decode_tokens}", "read", "memory", "error"):
        shown.add_column(name, justify="right", no_wrap=True)
    shown.add_column("", no_wrap=True)
    for row in rows:
        if row.prompt is None and row.decode is None:
            continue
        resident = row.memory.get("resident")
        memory = f"{size(resident)} ({size(row.memory['stated'])})" if resident else ""
        shown.add_row(
            escape(row.label), rate(row.prompt), rate(row.decode), percent(row.share_of_read), memory,
            "" if row.error is None else f"{row.error:.0e}",
            {True: "[green]agrees[/]", False: "[red]WRONG[/]", None: ""}[row.verified],
        )  # fmt: skip
    return shown


def remarks(rows: Sequence[GenerateRow]) -> Iterator[str]:
    """A line for each engine without rates or with a note, and for each division of a token's time."""
    for row in rows:
        if row.note:
            yield f"{row.label}: {row.note}."
    for row in rows:
        if row.parts:
            whole = sum(row.parts.values())
            large = {k: v for k, v in row.parts.items() if v >= LEAST_PART * whole}
            words = [f"{name} {1e3 * value:.2g} ms" for name, value in sorted(large.items(), key=lambda i: -i[1])]
            if len(large) < len(row.parts):
                words.append(f"others {1e3 * (whole - sum(large.values())):.2g} ms")
            timed = "" if row.decode is None else f" of {1e3 / row.decode.median:.3g} ms"
            yield f"{row.label}, a token{timed}; its parts, timed separately, {1e3 * whole:.3g} ms: {', '.join(words)}."


def rate(value: Rate | None) -> str:
    if value is None:
        return "-"
    return f"{figure(value.median)} ±{100 * value.spread:.0f} %"


def figure(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.5 else f"{value:.3g}"


def percent(share: float | None) -> str:
    return "" if share is None else f"{100 * share:.0f} %"
