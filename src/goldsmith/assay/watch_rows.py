"""Norms of a watched run: measured on the device, read together, compared with the step before."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from . import watch_facts as facts

if TYPE_CHECKING:
    from .watch import Watch

JUMP = 100.0  # times the norm of the step before, from which a row is remarked on
SHOWN_ROWS, SHOWN_EVENTS = 40, 8
FLUSH = 1 << 14
WIDTH = 80


@dataclass(frozen=True)
class Norm:
    """One tensor in one step: `norm` is the Euclidean one, `zeros` the share of zeros, `ratio` to the step before."""

    step: int
    name: str
    what: str
    norm: float
    absmax: float
    zeros: float
    ratio: float | None

    @property
    def remark(self) -> str:
        """ "not finite", "all zero", "jump" (100 times the norm of the step before, or a hundredth) or ""."""
        if not math.isfinite(self.absmax):
            return "not finite"
        if self.zeros == 1:
            return "all zero"
        jumped = self.ratio is not None and not 1 / JUMP < self.ratio < JUMP
        return "jump" if jumped else ""


class Norms:
    """Collects the figures on the device, and makes rows of them when asked."""

    def __init__(self) -> None:
        self.rows: list[Norm] = []
        self._waiting: list[tuple[int, str, str, int, Tensor]] = []
        self._before: dict[tuple[str, str], float] = {}

    def add(self, step: int, name: str, what: str, tensor: Tensor) -> None:
        # outside of any mode: the watch does not watch itself
        with torch.no_grad(), torch.utils._python_dispatch._disable_current_modes():
            value = tensor.detach()
            wide = torch.float64 if value.dtype in (torch.float64, torch.complex128) else torch.float32
            norm = torch.linalg.vector_norm(value, dtype=None if value.is_complex() else wide)
            nonzero = torch.empty(value.shape, dtype=torch.float32, device=value.device)
            torch.ne(value, 0, out=nonzero)  # count_nonzero takes 2.5 times as long (torch 2.13, CPU)
            figures = torch.stack([f.double() for f in (norm, facts.absmax(value), nonzero.sum())])
        self._waiting.append((step, name, what, tensor.numel(), figures))
        if len(self._waiting) >= FLUSH:
            self.read()

    def read(self) -> list[Norm]:
        waiting, self._waiting = self._waiting, []
        if not waiting:
            return self.rows
        with torch.utils._python_dispatch._disable_current_modes():
            values = read_stacks([w[4] for w in waiting])
        for (step, name, what, total, _), (norm, peak, nonzero) in zip(waiting, values, strict=True):
            before = self._before.get((name, what))
            ratio = norm / before if before else None
            self.rows.append(Norm(step, name, what, norm, peak, 1 - nonzero / total, ratio))
            self._before[name, what] = norm
        return self.rows


def read_stacks(figures: list[Tensor]) -> list[list[float]]:
    """Small vectors of one or several devices as numbers, one transfer for each device, in the given order."""
    values: dict[int, list[float]] = {}
    for device in {f.device for f in figures}:
        on = [i for i, f in enumerate(figures) if f.device == device]
        values.update(zip(on, torch.stack([figures[i] for i in on]).tolist(), strict=True))
    return [values[i] for i in range(len(figures))]


def headline(watch: Watch) -> str:
    """The first event in one sentence, or that there is none."""
    first = watch.first
    if first is None:
        return "Nothing but finite values was seen."
    name = {facts.NAN: "NaN", facts.INF: "Inf"}[first.kind]
    where = f" in {first.module}" if first.module else ""
    how = "born in" if first.born else "carried into"
    source = "" if first.born else f", from {first.source}"
    return f"First {name}: step {first.step}, {first.phase}, {how} {first.op}{where}{source}; likely {first.likely.id}."


def last_rows(watch: Watch) -> list[Norm]:
    """The rows of the last step that has any, those with a remark first."""
    rows = watch.rows
    last = [r for r in rows if r.step == rows[-1].step] if rows else []
    return sorted(last, key=lambda r: not r.remark)


def table(watch: Watch) -> str:
    """Events and the norms of the last step in 80 columns."""
    parts = [headline(watch)]
    parts += [str(event) for event in watch.events[:SHOWN_EVENTS]]
    hidden = len(watch.events) - SHOWN_EVENTS
    if hidden + watch.more > 0:
        parts.append(f"... and {max(hidden, 0) + watch.more} more events")
    rows = last_rows(watch)
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
    """Norm, absmax, share of zeros and ratio, as they are printed."""
    ratio = "-" if row.ratio is None else f"{row.ratio:.3g}"
    return f"{row.norm:.3g}", f"{row.absmax:.3g}", f"{100 * row.zeros:.3g} %", ratio
