"""Rules that goldsmith's rates must keep: a narrower format, more memory, and its own plan are never slower.

A rate is slower than another if its fastest round is slower than the other's slowest one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import permutations

from ..common.rows import RunRow
from .engines.peers import AUTO, OURS
from .model.shapes import BITS
from .rows import GenerateRow, Rate

LEAST_OF_BEST = 0.95  # of the best fixed plan's median rate (specs/generation.md, section 3)


@dataclass(frozen=True)
class RuleRow(RunRow):
    """Whether a rule was kept in a comparison: `faster` must not be slower than `slower`, by these rates."""

    rule: str
    case: str
    faster: str
    slower: str
    rates: tuple[float, float]
    kept: bool
    op: str = "generate.rule"

    def __str__(self) -> str:
        first, second = self.rates
        return f"{self.rule}: {self.case}: {self.faster} reaches {first:.3g} tokens/s, {self.slower} {second:.3g}"


def judged(rows: Sequence[GenerateRow]) -> Iterator[RuleRow]:
    """Every comparison of a rule that these rows allow."""
    whole = [row for row in rows if row.decode is not None and row.verified is not False]
    ours = [row for row in whole if row.engine == OURS]
    for first, second in permutations(ours, 2):
        if _alike(first, second, "plan", "budget") and _narrower(first, second):
            yield from _compared("a narrower format never decodes slower", first, second, ("decode",), "precision")
        if _alike(first, second, "plan", "format", "dense") and _memory(first) > _memory(second):
            yield from _compared("more memory is never slower", first, second, ("decode", "prompt"), "label")
    for row in ours:
        if row.plan == AUTO:
            fixed = [r for r in ours if r.plan != AUTO and _alike(row, r, "budget", "format", "dense")]
            for phase in ("decode", "prompt") if fixed else ():
                yield _against_best(row, fixed, phase)
            for other in whole:
                if other.engine == "accelerate" and _alike(row, other, "budget", "format", "dense"):
                    yield from _compared("the plan is never slower than plain offload", row, other,
                                         ("decode", "prompt"), "label")  # fmt: skip


def _alike(first: GenerateRow, second: GenerateRow, *names: str) -> bool:
    shared = ("shape", "sizes", "prompt_tokens", "decode_tokens", "compute", "level", "machine", "device", *names)
    return all(getattr(first, name) == getattr(second, name) for name in shared)


def _narrower(first: GenerateRow, second: GenerateRow) -> bool:
    pairs = [(BITS[getattr(first, name)], BITS[getattr(second, name)]) for name in ("format", "dense_used")]
    return all(a <= b for a, b in pairs) and any(a < b for a, b in pairs)


def _memory(row: GenerateRow) -> float:
    """Bytes of the budget; without a number, all memory."""
    return float("inf") if row.budget is None else row.budget


def _compared(
    rule: str, first: GenerateRow, second: GenerateRow, phases: Sequence[str], names: str
) -> Iterator[RuleRow]:
    for phase in phases:
        one, other = rate(first, phase), rate(second, phase)
        if one is not None and other is not None:
            kept = one.most >= other.least
            yield _row(rule, first, second, phase, names, (one.median, other.median), kept)


def _against_best(row: GenerateRow, fixed: Sequence[GenerateRow], phase: str) -> RuleRow:
    def median(of: GenerateRow) -> float:
        value = rate(of, phase)
        return 0.0 if value is None else value.median

    best = max(fixed, key=median)
    rates = median(row), median(best)
    rule = f"the plan reaches {100 * LEAST_OF_BEST:.0f} % of the best fixed one"
    return _row(rule, row, best, phase, "label", rates, rates[0] >= LEAST_OF_BEST * rates[1])


def _row(
    rule: str, first: GenerateRow, second: GenerateRow, phase: str, names: str, rates: tuple[float, float], kept: bool
) -> RuleRow:  # fmt: skip
    layers = f"{first.sizes['layers']} layers"
    case = f"{first.shape}, {layers}, {phase}, " + (first.label if names == "precision" else precision(first))
    words = [precision(row) if names == "precision" else row.label for row in (first, second)]
    return RuleRow(
        rule, case, *words, rates, kept, machine=first.machine, device=first.device, versions=first.versions,
        commit=first.commit, date=first.date, load=first.load, threads=first.threads,
    )  # fmt: skip


def rate(row: GenerateRow, phase: str) -> Rate | None:
    return row.decode if phase == "decode" else row.prompt


def precision(row: GenerateRow) -> str:
    return row.format if row.format == row.dense else f"{row.format}, dense part {row.dense}"
