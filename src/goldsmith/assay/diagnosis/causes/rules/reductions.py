"""Rules about sums that leave something out, or keep too little precision."""

from __future__ import annotations

import torch

from ...facts.evidence import Influence
from ...facts.spans import say
from .reading import EXACT, FAINT, HINT, LIKELY, SEEN, Match, Reading, half_open, label, plain

_HALF, _MOST = 0.5, 0.9  # of the wrong elements
_MAXIMA = frozenset(
    "_softmax _log_softmax logsumexp amax max aminmax argmax topk sort cummax max_pool2d_with_indices".split()
)


def _missing(r: Reading) -> list[Influence]:
    """Influences that miss something, the largest missing range first; empty if NaN and Inf hide what moves."""
    hidden = r.y is not None and r.g is not None and bool((~torch.isfinite(r.y) & torch.isfinite(r.g)).any())
    influences = [i for i in r.influences if i.missing and not hidden]
    return sorted(influences, key=lambda i: -sum(hi - lo + 1 for lo, hi in i.missing))


def truncated_reduction(r: Reading) -> Match | None:
    """A contiguous part of an input has no influence, although it has some in the golden."""
    for i in _missing(r)[:1]:
        lo, hi = i.missing[0]
        where_it_is_wrong = r.reached_by(i)
        if len(i.missing) > 1 or r.zeros > 0 and where_it_is_wrong or lo == 0 or i.extra:
            return None
        if i.reached < _HALF and not where_it_is_wrong:  # one mistake of several
            return None
        text = f"{i.input}[axis {i.axis}: {say(i.missing)}] has no influence, but has some in the golden"
        params = {"input": i.input, "axis": i.axis, "missing": [lo, hi + 1]}
        return Match(SEEN + 0.02 if hi > lo else LIKELY + 0.07, (text,), params)
    finding = r.finding("no_influence")
    return Match(LIKELY, (finding.text,), {}) if finding is not None else None


def overwritten_accumulator(r: Reading) -> Match | None:
    """Only the last part of a reduction has influence: every block replaces the previous one."""
    for i in _missing(r):
        lo, hi = i.missing[0]
        of_two = hi == 0 and i.length == 2  # a loop of two iterations that starts late is rare
        if len(i.missing) == 1 and lo == 0 and (hi > 0 or of_two) and not i.extra:
            text = f"of {i.input} on axis {i.axis} only the part after {hi} has influence"
            params = {"input": i.input, "axis": i.axis, "missing": [0, hi + 1]}
            return Match(SEEN + 0.01 * of_two, (text, "the last block replaces the sum"), params)
    return None


def off_by_one(r: Reading) -> Match | None:
    """One index at an end is missing, or is read beyond."""
    for i in r.influences:
        for kind, at in (("missing", i.missing), ("extra", i.extra)):
            whole = i.reached > _MOST and not (kind == "extra" and r.explained)  # it explains all wrong elements
            if len(at) == 1 and at[0][0] == at[0][1] and whole:
                text = f"{i.input}[axis {i.axis} = {at[0][0]}], one index, has influence {kind}"
                return Match(SEEN, (text,), {"input": i.input, "axis": i.axis, kind: [at[0][0], at[0][0] + 1]})
    if r.e.error and r.raised.one_beyond:
        return Match(SEEN, (r.e.error or "", "it is the place after the last one"), {})
    if r.e.error and r.raised.one_apart:
        return Match(HINT + 0.1, (r.e.error or "",), {})
    return _next_row(r)


def _next_row(r: Reading) -> Match | None:
    """Values in a row reach the first element of the next row and no other: a store one past the row's end."""
    for f in r.findings("taint"):
        at = list(f.location.axes.values()) if f.location is not None else []
        row = f.values.get("index") if f.kind == "leak" else None
        if row is None or len(at) < 2 or any(len(spans) != 1 or spans[0][0] != spans[0][1] for spans in at):
            continue
        if at[-1][0][0] == 0 and at[-2][0][0] == row + 1:
            return Match(SEEN - 0.05, (f.text, "that is the place after the end of the row"), {"tensor": f.tensor})
    return None


def wrong_mask(r: Reading) -> Match | None:
    """Masked elements take part in a reduction."""
    if r.pair is not None and r.wrong is not None and r.g is not None and r.y is not None and r.wrong_count > 0:
        got, wanted = r.y[r.wrong], r.g[r.wrong]
        every = bool((r.y[r.g < 0] == 0).all())
        if r.zeros > 0 and every and bool((got == 0).all()) and bool((wanted < 0).all()) and bool((r.g > 0).any()):
            return Match(SEEN, ("zero wherever the golden is negative: masked elements enter a maximum as 0",), {})
        right = r.g[~r.wrong] != 0
        finite = bool(torch.isfinite(got).all())
        if r.wrong_count > 2 and finite and not bool(wanted.any()) and int(right.sum()) > 2:
            text = f"only places where the golden is 0 are wrong, {r.wrong_count} of them; all others are right"
            return Match(SEEN, (text,), {})
    extra = next((i for i in r.influences if i.extra and not i.elsewhere), None)
    if extra is not None and not extra.throughout and extra.reached >= _HALF:
        text = f"{extra.input}[axis {extra.axis}: {say(extra.extra)}] has influence, but has some in the golden"
        params = {"input": extra.input, "axis": extra.axis, "extra": half_open(extra.extra)}
        return Match(LIKELY, (text,), params)
    raised = r.e.runs.get("offset")
    offset = [f for f in r.e.report.findings if plain(label(f)) == "offset"]
    operators = r.e.operators
    offset = [f for f in offset if not f.tensor.endswith(".grad") and (not operators or operators & _MAXIMA)]
    zeros = next((f for f in offset if f.values.get("zeros") and f.values["golden"] < 0), None)
    if not r.plain_wrong and zeros is not None:
        text = "right with the inputs as they are, zeros with all of them lowered: a padded 0 enters a maximum"
        return Match(LIKELY, (text, zeros.text), {})
    nan = next((f for f in offset if f.kind == "nan"), None)
    if not r.plain_wrong and nan is not None and raised is not None and raised.right:
        text = "right with raised inputs, NaN with lowered ones: something larger, such as a padded 0, enters a maximum"
        return Match(LIKELY, (text, nan.text), {})
    finding = r.finding("leak")
    return Match(HINT if r.plain_wrong else FAINT, (finding.text,), {}) if finding is not None else None


def uninitialised_accumulator(r: Reading) -> Match | None:
    """Poison shows in the result, and zeroed memory removes it: the sum started from old memory."""
    reused = r.first_nonfinite("uninitialised_accumulator", EXACT)
    if reused is not None:
        return reused
    fact = r.memory("never_written")
    if fact is None:
        zeroed, left = r.nan_gone("zeroed memory"), r.left_to_the_next
        if left:
            return Match(LIKELY, (left, "a sum starts from the value that the previous row left"), {})
        if zeroed is None or not zeroed.right:
            return None
        text = f"{r.e.tensor} holds NaN where uninitialised memory does"
        return Match(EXACT, (text, "on zeroed memory it is right: it is added to the old content"), {})
    text, where = fact.text, fact.location
    if any(x.right and not x.same for x in r.runs("repeat")):
        return None
    if r.right("zeroed memory"):
        if r.nothing_there:
            return None  # it may be added to the old content, or left out
        return Match(EXACT, (text, "on zeroed memory the result is right: it is added to the old content"), {})
    if r.fails("zeroed memory"):
        return None  # a sum that only starts from old memory is right on zeroed memory
    whole = where is None or where.fraction >= 1
    return Match(LIKELY + 0.02 if whole else HINT, (text, "every element is affected" if whole else "in part"), {})


def lost_update(r: Reading) -> Match | None:
    """Of several updates of one place, only some take effect."""
    if "lost_update" in r.ruled_out:
        return None
    for i in _missing(r):
        if len(i.missing) == 2 and i.missing[0][0] == 0:
            left = f"{i.missing[0][1] + 1}..{i.missing[1][0] - 1}"
            text = f"of {i.input} on axis {i.axis} only {left} has influence, neither its beginning nor its end"
            return Match(LIKELY + 0.1, (text, "of several additions one is left"), {"input": i.input, "axis": i.axis})
    return None


# errors before and after a small change of the inputs correlate at least this much if they are not rounding
_FORMULA = 0.7


def low_precision_accumulation(r: Reading) -> Match | None:
    """Errors that look like rounding but are larger, and that no place, slope or term explains."""
    rounded = next((f for f in r.e.report.findings if f.values.get("rounds")), None)
    if rounded is not None and rounded.tensor == r.e.tensor:
        text = f"it exceeds its bound, and is right for {rounded.values['rounds']}"
        return Match(LIKELY - 0.05, (text,), {})
    if r.pair is None or r.ratio() is not None:
        return None
    y, g = r.pair
    narrow = narrower(r)
    if not 0 < r.relative < 0.1:
        return None
    # sums with a single addend are exact in the narrow dtype; the others may be one block
    if narrow is None and (r.zeros > 0 or r.spans and r.block):
        return None
    if narrow is not None:
        worst = float(((y - g).abs() / g.abs().clamp(min=1e-300)).median())
        text = f"every element is a {narrow} number, although {r.e.dtype} is stored; half are off by over {worst:.1g}"
        several = float((_away_from(y, narrow, g) > 1.0).double().mean()) > _OFTEN
        return Match(SEEN + 0.02 if several else SEEN - 0.05, (text,), {"dtype": narrow})
    slope = abs(float((y * g).sum() / g.square().sum()) - 1)
    if slope > 0.9 * r.relative or r.relative < 4 * r.unit or r.relative > 0.02:
        return None
    error = (y - g).abs()
    if float(error.max()) > 16 * float(error.square().mean().sqrt()):
        return None
    nudged = next(r.runs("nudged"), None)
    if nudged is not None and nudged.alike.get(r.e.tensor, 0.0) > _FORMULA:
        return None
    bits = -torch.tensor(r.relative).log2().item()
    return Match(
        HINT + 0.1, (f"errors without place or sign, about 2^-{bits:.0f} of the size",), {"rel_l2": r.relative}
    )


def narrower(r: Reading) -> str | None:
    """The narrower dtype that represents every element of the candidate exactly, though not of the golden."""
    if r.pair is None:
        return None
    y, g = r.pair
    wide = getattr(torch, r.e.dtype, torch.float32)
    for kind in (torch.bfloat16, torch.float16, torch.float32):
        if not wide.is_floating_point or torch.finfo(kind).eps <= torch.finfo(wide).eps:
            continue
        if bool((y.to(kind).double() == y).all()) and not bool((g.to(kind).double() == g.to(wide).double()).all()):
            return str(kind).removeprefix("torch.")
    return None


_OFTEN = 0.1  # share of the elements


def _away_from(y: torch.Tensor, narrow: str, g: torch.Tensor) -> torch.Tensor:
    """Errors in units of one rounding to that dtype: a sum that is rounded as it grows has larger ones."""
    return (y - g).abs() / (torch.finfo(getattr(torch, narrow)).eps / 2 * g.abs()).clamp(min=1e-300)
