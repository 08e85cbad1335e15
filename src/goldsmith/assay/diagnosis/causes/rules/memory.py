"""Rules about memory outside the result: overruns, stray reads, aliasing, freed memory, invalid indices."""

from __future__ import annotations

import math

import torch

from ...facts.evidence import INHERITED, OK
from .reading import EXACT, HINT, LIKELY, SEEN, Match, Reading, close, plain


def overrun(r: Reading) -> Match | None:
    """Bytes outside a buffer were written."""
    if r.e.error and r.raised.writes_beyond:
        return Match(SEEN, (r.e.error,), {"tensor": r.e.tensor})
    fact = r.memory("overrun")
    if fact is None:
        return None
    # above an edit of the golden with the same numbers (0.97): what was written past the end may be what is missing
    plain_run = plain(fact.run) == "values"
    return Match(EXACT + (0.025 if plain_run else 0.02), (fact.text,), {"tensor": fact.tensor, "observed": plain_run})


def stray_read(r: Reading) -> Match | None:
    """Memory outside a buffer shows in a result."""
    fact = r.memory("stray_read")
    if fact is not None:
        own = fact.tensor == r.e.tensor or r.y is None or not bool(torch.isfinite(r.y).all()) or not r.wrong_count
        sure = own and not plain(fact.run).startswith("layout")
        return Match(EXACT if sure else HINT, (fact.text,), {"tensor": fact.tensor})
    if r.nan_gone("numbers beside") is None:
        return None
    text = f"{r.e.tensor} holds NaN if NaN lies outside the buffers, and none if numbers lie there"
    return Match(EXACT, (text,), {"tensor": r.e.tensor})


def input_modified(r: Reading) -> Match | None:
    """An input, or an output gradient, holds different bytes after the run."""
    fact = r.memory("input_modified")
    if fact is None:
        return None
    unwritten = r.memory("never_written") is not None
    more = ("and a result was never written: it may have been stored into the input",) if unwritten else ()
    return Match(EXACT + 0.03, (fact.text, *more), {"input": fact.tensor})


def aliased(r: Reading) -> Match | None:
    """Two results, or a result and an input, share memory; or the backward overwrites a result."""
    fact = r.memory("aliased", "output_modified")
    if fact is not None:
        return Match(EXACT + 0.01, (fact.text,), {"tensor": fact.tensor})
    shared = _one_buffer(r) or _written_into(r)
    if shared is not None:
        return shared
    over = r.finding("overwritten_result")
    return Match(LIKELY, (over.text, "a buffer was returned and then used again"), {}) if over is not None else None


def _one_buffer(r: Reading) -> Match | None:
    """Two results hold the same numbers, the sum of what each should hold: both are accumulated in one buffer."""
    if r.y is None or r.g is None or not r.wrong_count:
        return None
    for name, (got, golden) in r.e.other.items():
        if name == r.e.tensor or got is None or golden is None or not got.shape == golden.shape == r.g.shape:
            continue
        small = min(float(golden.norm()), float(r.g.norm())) <= 1e-3 * float((golden + r.g).norm())
        if not small and close(r.y, got, r.unit) and close(r.y, golden + r.g, r.unit):
            text = f"{r.e.tensor} and {name} hold the same numbers, the sum of what each of them should hold"
            return Match(EXACT + 0.03, (text, "both are accumulated in one buffer"), {"tensor": name, "with": name})
    return None


def _written_into(r: Reading) -> Match | None:
    """A stage is written into an earlier one's memory, and the result is wrong although the stage itself is right."""
    state = r.e.stage(r.e.first_wrong or "")
    if state is None or state.state != INHERITED or not r.e.reused:
        return None
    before = r.e.stages[: r.e.stages.index(state)]
    right = {s.name for s in before if s.state == OK}
    for name, by in r.e.reused.items():
        if name in right:
            text = f"{name} is right when it is computed, and {by} is then written into its memory"
            wrong = f"{state.name} is wrong, and right as soon as each has memory of its own"
            return Match(EXACT + 0.03, (text, wrong), {"tensor": name, "with": by})
    return None


def use_after_free(r: Reading) -> Match | None:
    """Freed memory is read."""
    return r.first_nonfinite("use_after_free", EXACT)


def invalid_index(r: Reading) -> Match | None:
    """An index outside its range was refused, was chosen, or wrapped to a neighbour's place."""
    chosen = next((f for f in r.e.report.findings if f.values.get("out_of_range")), None)
    if chosen is not None:
        return Match(EXACT, (chosen.text,), {})
    if r.e.error and r.raised.index:
        empty = any(isinstance(v, int) and v == 0 for v in r.e.sizes.values())
        return Match(HINT if empty else LIKELY if r.raised.one_beyond else SEEN, (r.e.error or "",), {})
    if r.pair is None or r.wrong is None or not r.spans or not r.block and len(r.spans) != 1:
        return None
    y, g = r.pair
    for axis, spans in r.spans.items():
        n = r.length(axis)
        ends = [(lo, hi) for lo, hi in spans if lo == hi and lo in (0, n - 1)]
        if n < 3 or not ends or len(ends) != len(spans):
            continue
        more = float(y[r.wrong].norm()) > 1.05 * float(g[r.wrong].norm())
        extra = float((y - g).sum())
        if more or (bool((g == g.round()).all()) and extra > 0):
            which = " and ".join(str(lo) for lo, _ in ends)
            text = f"only index {which} of axis {axis} (of {n}) is wrong, and holds too much ({extra:+.3g} in all)"
            return Match(LIKELY + 0.05, (text, "entries without a valid index, such as -1, land there"), {"axis": axis})
    return None


def single_element(r: Reading) -> Match | None:
    """One element of many is wrong."""
    if r.wrong is None or r.wrong_count != 1 or r.wrong.numel() < 8 or r.y is None or r.g is None:
        return None
    at = [int(i) for i in r.wrong.nonzero()[0]]
    got, golden = float(r.y[tuple(at)]), float(r.g[tuple(at)])
    short = r.wrong.dim() == 1 and at[0] in (0, r.wrong.numel() - 1)
    text = f"one element of {r.wrong.numel()} is wrong: {at}, got {got:.6g}, golden {golden:.6g}"
    score = LIKELY if short or not math.isfinite(got) else EXACT
    return Match(score, (text,), {"index": at})
