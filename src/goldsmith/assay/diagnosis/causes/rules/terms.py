"""Rules about terms and factors of a formula."""

from __future__ import annotations

import math
import re
from dataclasses import replace

import torch

from ...facts.evidence import Fit
from .reading import EXACT, HINT, LIKELY, SEEN, Match, Reading, say

_WHOLE = 0.999999


def _fitted(r: Reading, reading: str) -> Match | None:
    fit = r.fit(reading)
    if fit is None or fit.gain < 0.05:
        return None
    score = EXACT if fit.exact is not None and fit.r2 > 0.999 else LIKELY if fit.r2 > 0.98 else HINT * fit.r2 + 0.1
    score -= 0.1 * bool(fit.also)
    number = f"{fit.exact if fit.exact is not None else fit.coefficient:g}"
    # the name of a factor is that of the sum: the golden's own share plus the error
    whole = fit.named if reading in ("factor", "repeated") and fit.golden is not None else ""
    named = f" = {fit.named}" if fit.named and fit.named != number and not whole else ""
    factor = "" if fit.factor in ("", "1") else f" {fit.factor}"
    place = f" in {fit.where}" if fit.where else ""
    weighs = f", which occurs {whole} times" if whole else ""
    of_itself = bool(whole) and not place and not factor and fit.term == r.e.tensor
    sentences = [f"{fit.term} is {whole} times the golden's"] if of_itself else []
    weighs = "" if of_itself else weighs
    sentences += [
        f"the error{place} is {number}{named} times{factor} {fit.term}{weighs} (R^2 {fit.r2:.4f}, +- {fit.error:.1g})"
    ]
    if fit.also:
        sentences.append(f"cannot be distinguished from {', '.join(fit.also)}")
    return Match(score, tuple(sentences), _params(fit))


def _params(fit: Fit) -> dict:
    return {
        "term": fit.term, "factor": fit.factor, "coefficient": fit.exact if fit.exact is not None else fit.coefficient,
        "named": fit.named, "golden": fit.golden, "where": fit.where, "also": list(fit.also),
    }  # fmt: skip


def missing_term(r: Reading) -> Match | None:
    """A term of the golden gives the residual; or the numbers are as if an addend were zero."""
    return max(filter(None, (_fitted(r, "missing"), _as_zero(r))), key=lambda m: m.score, default=None)


def _as_zero(r: Reading) -> Match | None:
    for i in r.influences:
        if i.absent and i.summed is False and not i.extra and not r.zeros:
            where = f"{i.input}[axis {i.axis}: {say(i.missing)}]"
            text = f"it is as if {where} were zero, and nothing is summed along that axis"
            return Match(SEEN + 0.02, (text,), {"term": i.input, "input": i.input, "axis": i.axis})
    return None


def _count(ratio: float, spread: float) -> int:
    """The whole number from 2 that a ratio equals, or 0."""
    near = round(ratio)
    return near if near >= 2 and abs(ratio - near) <= max(1e-4, 4 * spread) * near else 0


def repeated_term(r: Reading) -> Match | None:
    """A term added once more, or the whole result several times."""
    fitted = _fitted(r, "repeated") or _whole_times(r)
    ratio = r.ratio()
    if ratio is None:
        return fitted
    times = _count(ratio.ratio, ratio.spread)
    if times:
        where = "" if ratio.scope == "tensor" else f" in {ratio.group}"
        named = f" = {ratio.named}" if ratio.named and ratio.named != str(times) else ""
        text = f"y / g is {times}{named}{where}: it is added {times} times"
        score = SEEN + 0.02 - 0.1 * (named != "" and not _of_sizes(r, ratio.named))
        whole = Match(score, (text,), {"times": times, "named": ratio.named, "where": ratio.group})
        return max(filter(None, (fitted, whole)), key=lambda m: m.score)
    return fitted


def _whole_times(r: Reading) -> Match | None:
    """A term of the golden that is added several times more, for example by every rank or block."""
    fit, fitted = r.fit("added"), _fitted(r, "added")
    if fit is None or fitted is None or r.foreign or fit.factor not in ("", "1") or fit.also:
        return None
    if not fit.term.isidentifier() or fit.exact is None or fit.exact < 1 or fit.exact != round(fit.exact):
        return None
    return replace(fitted, score=SEEN)


def _of_sizes(r: Reading, named: str) -> bool:
    """True if the name contains only sizes: a count, rather than a scalar that happens to be whole."""
    return not any(name in named for name in r.e.scalars if name not in r.e.sizes)


def sign_flip(r: Reading) -> Match | None:
    ratio = r.ratio()
    if ratio is not None and math.isclose(ratio.ratio, -1, abs_tol=max(1e-4, 4 * ratio.spread)):
        return Match(EXACT, (f"y / g is -1 in {ratio.group or 'every element'}",), {"coefficient": -1.0})
    fitted = _fitted(r, "sign_flipped")
    if fitted is None and r.alike < -0.999:
        return Match(SEEN, (f"the correlation with the golden is {r.alike:.4f}",), {"coefficient": -1.0})
    return fitted


def wrong_factor(r: Reading) -> Match | None:
    """A factor too many, missing, or with another value; of the whole, of a segment, or of one term."""
    fitted = _is_bias(r, _fitted(r, "factor")) or _added(r)
    ratio = r.ratio()
    if ratio is None or not ratio.ratio or _bias(ratio.ratio) and not _is_case_number(r, ratio.named):
        return fitted
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
    whole = Match(score, tuple(sentences), params)
    return max(filter(None, (fitted, whole)), key=lambda m: m.score)


def _is_bias(r: Reading, fitted: Match | None) -> Match | None:
    """None for a factor close to 1 that nothing in the case explains: that is a bias, not a wrong factor."""
    if fitted is None:
        return None
    golden, coefficient = fitted.params["golden"] or 1.0, fitted.params["coefficient"]
    plain = fitted.params["factor"] in ("", "1") and not _is_case_number(r, str(fitted.params["named"]))
    near = plain and abs(coefficient / golden) < 2.0**-5
    return replace(fitted, score=HINT) if near else fitted


def _added(r: Reading) -> Match | None:
    """An addend that is not in the golden: only a hint, since it may stand for a changed factor."""
    fitted = _fitted(r, "added")
    if fitted is None:
        return None
    foreign = r.foreign
    if foreign and foreign in fitted.params["term"] and not fitted.params["also"]:
        text = f"the golden does not use {foreign} there"
        fit = r.fit("added")
        whole = fit is not None and fit.r2 > _WHOLE  # one of its terms gives every number
        return replace(fitted, score=SEEN if whole else LIKELY, sentences=(*fitted.sentences, text))
    return replace(fitted, score=fitted.score * HINT)


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
