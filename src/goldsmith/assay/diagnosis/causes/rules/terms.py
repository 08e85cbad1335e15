"""Rules about terms and factors of a formula."""

from __future__ import annotations

import math
import re

import torch

from .reading import EXACT, HINT, LIKELY, SEEN, Match, Reading


def _count(ratio: float, spread: float) -> int:
    """The whole number from 2 that a ratio equals, or 0."""
    near = round(ratio)
    return near if near >= 2 and abs(ratio - near) <= max(1e-4, 4 * spread) * near else 0


def repeated_term(r: Reading) -> Match | None:
    """The result is the right one times a whole number."""
    ratio = r.ratio()
    times = 0 if ratio is None else _count(ratio.ratio, ratio.spread)
    if ratio is None or not times:
        return None
    where = "" if ratio.scope == "tensor" else f" in {ratio.group}"
    named = f" = {ratio.named}" if ratio.named and ratio.named != str(times) else ""
    text = f"y / g is {times}{named}{where}: it is added {times} times"
    score = SEEN + 0.02 - 0.1 * (named != "" and not _of_sizes(r, ratio.named))
    return Match(score, (text,), {"times": times, "named": ratio.named, "where": ratio.group})


def _of_sizes(r: Reading, named: str) -> bool:
    """True if the name contains only sizes: a count, rather than a scalar that happens to be whole."""
    return not any(name in named for name in r.e.scalars if name not in r.e.sizes)


def sign_flip(r: Reading) -> Match | None:
    ratio = r.ratio()
    if ratio is not None and math.isclose(ratio.ratio, -1, abs_tol=max(1e-4, 4 * ratio.spread)):
        return Match(EXACT, (f"y / g is -1 in {ratio.group or 'every element'}",), {"coefficient": -1.0})
    if r.alike < -0.999:
        return Match(SEEN, (f"the correlation with the golden is {r.alike:.4f}",), {"coefficient": -1.0})
    return None


def wrong_factor(r: Reading) -> Match | None:
    """A factor too many, missing, or with another value; of the whole or of a segment."""
    ratio = r.ratio()
    if ratio is None or not ratio.ratio or _bias(ratio.ratio) and not _is_case_number(r, ratio.named):
        return None
    named = ratio.named and ratio.named not in ("1", "-1")
    score = SEEN if named else HINT + 0.15
    if _count(ratio.ratio, ratio.spread) and (not named or _of_sizes(r, ratio.named)):
        score = LIKELY
    if math.isclose(ratio.ratio, -1, abs_tol=1e-4):
        score = HINT
    where = "in every element" if ratio.scope == "tensor" else f"in {ratio.group}"
    text = f"y / g is {ratio.ratio:.6g}{f' = {ratio.named}' if named else ''} {where}"
    sentences = [text] + ([f"also {', '.join(ratio.also)}"] if ratio.also else [])
    params = {"ratio": ratio.ratio, "factor": ratio.named, "where": ratio.group, "also": list(ratio.also)}
    return Match(score, tuple(sentences), params)


def _is_case_number(r: Reading, named: str) -> bool:
    """True if a number's name refers to a value of the case."""
    return any(re.search(rf"\b{re.escape(name)}\b", named) for name in (*r.e.scalars, *r.e.sizes))


def _bias(ratio: float) -> bool:
    return abs(ratio - 1) < 2.0**-5


def scale_bias(r: Reading) -> Match | None:
    """y = (1 + b) g with a small b that is not a known factor."""
    if r.pair is None or r.y is None or not bool(torch.isfinite(r.y).all()):
        return None
    y, g = r.pair
    norm = float(g.square().sum())
    slope = float((y * g).sum()) / norm - 1 if norm else 0.0
    left = float((y - (1 + slope) * g).norm()) / max(float((y - g).norm()), 1e-300)
    known = r.ratio()
    if known is not None and known.named and (not _bias(known.ratio) or _is_case_number(r, known.named)):
        return None
    listed = next((f for f in r.systematic if "slope" in f.values.get("patterns", ())), None)
    if r.right("scale 2^12") and r.fails("scale 2^-12") is not None:
        return None
    if not _bias(1 + slope) or abs(slope) < 2 * r.unit or left > 0.5 and listed is None:
        return None
    if left > 0.9:
        return None
    text = f"the golden times {1 + slope:.8g} leaves {left:.1%} of the error"
    sentences = (text, listed.text) if listed is not None else (text,)
    return Match(SEEN if left < 0.2 else LIKELY, sentences, {"bias": slope})
