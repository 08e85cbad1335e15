"""Rules about results that the kernel did not write or compute."""

from __future__ import annotations

import math

from ...facts.spans import say
from .reading import EXACT, HINT, LIKELY, SEEN, Match, Reading


def never_written(r: Reading) -> Match | None:
    """Poison is left, and zeroing the same memory does not make the result right."""
    fact = r.memory("never_written")
    if fact is None:
        zeroed = r.nan_gone("zeroed memory")
        if zeroed is not None and not zeroed.right:
            text = f"{r.e.tensor} holds NaN where uninitialised memory does"
            return Match(EXACT, (text, "on zeroed memory it is wrong, too"), {})
        return _zero_block(r)
    text, where = fact.text, fact.location
    share = where.fraction if where is not None else 1.0
    params = {"fraction": share, "axes": dict(where.axes) if where is not None else {}}
    if any(x.right and not x.same for x in r.runs("repeat")):
        return Match(HINT, (text, "repeats of the same call are right"), params)
    if r.right("zeroed memory"):
        return Match(SEEN, (text, "on zeroed memory the result is right"), params) if r.nothing_there else None
    if r.fails("zeroed memory"):
        if r.made_of_nothing:
            return Match(LIKELY, (text, "it is written there, with values computed from such memory"), params)
        return Match(EXACT, (text, "on zeroed memory it is wrong, too"), params)
    return Match(SEEN if share < 1 else LIKELY, (text,), params)


def _zero_block(r: Reading) -> Match | None:
    """A block of exact zeros where the golden has numbers: zeroed memory hides that it was never written."""
    if not 0 < r.zeros < 1 or not r.block or r.y is None or r.wrong is None:
        return None
    if bool((r.y[r.wrong] != 0).any()):
        return None
    spans = "; ".join(f"axis {a}: {say(s)}" for a, s in r.spans.items())
    sentences = [f"exactly zero at {spans}, and right elsewhere"]
    cut = next((i for i in r.influences if r.reached_by(i)), None)
    if cut is not None:
        sentences.append(
            f"{cut.input}[axis {cut.axis}: {say(cut.missing)}], the only source of those elements, is not read"
        )
    return Match(HINT + 0.1 if cut is None else SEEN + 0.03, tuple(sentences), {"spans": r.spans})


def not_computed(r: Reading) -> Match | None:
    """All zeros, or no tensor at all."""
    missing = r.finding("no_tensor") or r.finding("no_gradient")
    if missing is not None:
        lost = (
            "look for detach(), no_grad() or .data between the input and the result"
            if r.e.tensor.endswith(".grad")
            else ""
        )
        # another tensor that is wrong before it may be the reason
        score = EXACT + 0.02 if missing.tensor == r.e.tensor else HINT
        return Match(score, (missing.text, lost) if lost else (missing.text,), {})
    if r.y is None or r.g is None or not r.wrong_count:
        return None
    if r.zeros == 1.0 and math.isclose(r.relative, 1.0):
        if r.right("scale 2^-12"):
            return Match(HINT, (f"{r.e.tensor} is all zeros, and right when inputs are times 2^-12",), {})
        return Match(
            EXACT + 0.025, (f"{r.e.tensor} is all zeros: its relative L2 error is exactly 1",), {"rel_l2": 1.0}
        )
    return None
