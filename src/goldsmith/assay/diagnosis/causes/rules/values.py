"""Rules about ranges (too large, too small, not a number) and about rounding at the store."""

from __future__ import annotations

import torch

from .reading import EXACT, FAINT, LIKELY, SEEN, Match, Reading
from .reductions import narrower


def _infinite(r: Reading) -> int:
    """Elements that are not finite although the golden's are."""
    if r.y is None or r.g is None or r.memory("never_written", "stray_read", "overrun") is not None:
        return 0
    return int((~torch.isfinite(r.y) & torch.isfinite(r.g)).sum())


def overflow(r: Reading) -> Match | None:
    """Inf, or NaN made from Inf, where the golden is finite: an intermediate left its dtype's range."""
    count = _infinite(r)
    origin = r.first_nonfinite("overflow", EXACT + 0.01)
    if origin is not None:
        return origin
    if count and r.y is not None and r.g is not None:
        inf = int(torch.isinf(r.y).sum())
        largest = float(r.g[torch.isfinite(r.g)].abs().max())
        top = torch.finfo(getattr(torch, r.e.dtype, torch.float32)).max
        sentences = [f"{count} elements are not finite ({inf} Inf); the golden is at most {largest:.3g} there"]
        if bool(torch.isinf(r.g).any()):
            return Match(FAINT, (*sentences, "it has infinities elsewhere: they may be intended"), {})
        big = max([largest, *_largest(r)])
        narrow = next((n for n, m in (("float16", 65504.0), (r.e.dtype, top)) if big > m), "")
        if narrow:
            sentences.append(f"the golden reaches {big:.3g}, beyond {narrow}")
        small = r.right("scale 2^-12")
        if small:
            sentences.append("inputs times 2^-12 are right")
        return Match(
            EXACT if narrow else SEEN if small and inf else LIKELY if inf or small else FAINT, tuple(sentences), {}
        )
    if not r.plain_wrong and _blows_up(r):
        large = r.fails("scale 2^12")
        return Match(LIKELY, (large.text if large is not None else "large inputs give Inf or NaN",), {})
    return None


def _largest(r: Reading) -> list[float]:
    out = []
    for got, golden in r.e.other.values():
        if got is not None and golden is not None and golden.numel() and golden.is_floating_point():
            out.append(float(golden.abs().nan_to_num(0.0, 0.0, 0.0).max()))
    return out


def _blows_up(r: Reading) -> bool:
    """Large inputs, or inputs with an offset, give NaN or Inf where the golden does not."""
    failing = [x for name in ("scale 2^12", "scale 2^11", "offset") for x in r.runs(name) if not x.right]
    return any(x.kinds & {"nan", "inf"} for x in failing)


def missing_max_shift(r: Reading) -> Match | None:
    """Exponentials of large arguments: an offset that cancels in the golden gives NaN or Inf."""
    origin = r.first_nonfinite("missing_max_shift", EXACT + 0.02)
    if origin is not None:
        return origin
    offset = r.fails("offset")
    large = r.fails("scale 2^12")
    if not r.plain_wrong and offset is not None:
        score = EXACT if _blows_up(r) else FAINT - 0.2
        return Match(score, (offset.text or "with a large offset on every input the result is wrong",), {})
    if not r.plain_wrong and large is not None and _blows_up(r) and not r.fails("scale 2^-12"):
        return Match(SEEN - 0.05, (large.text or "large inputs give NaN or Inf",), {})
    count = _infinite(r)
    if count and r.right("scale 2^-12") and r.y is not None and bool(torch.isnan(r.y).any()):
        return Match(LIKELY, (f"{count} elements are Inf / Inf; with inputs times 2^-12 it is right",), {})
    return None


def nan_swallowed(r: Reading) -> Match | None:
    """A number where the golden has NaN or Inf."""
    finding = r.finding("swallowed") or r.finding("swallowed_nan")
    if finding is not None:
        return Match(EXACT, (finding.text,), {})
    if r.y is not None and r.g is not None:
        lost = torch.isnan(r.g) & torch.isfinite(r.y)
        if bool(lost.any()):
            return Match(EXACT, (f"{int(lost.sum())} elements are numbers where the golden is NaN",), {})
    return None


_SATURATING = frozenset("exp _softmax _log_softmax logsumexp sigmoid tanh erf softplus silu gelu".split())


def absolute_eps(r: Reading) -> Match | None:
    """The error depends on the magnitude of the inputs: wrong if they are small, right if they are large."""
    small, large = r.fails("scale 2^-12"), r.fails("scale 2^12") or r.fails("scale 2^11")
    if large is not None and "inexact_scaling" in large.kinds and not r.plain_wrong:
        sentences = (large.text, small.text) if small is not None and small.text else (large.text,)
        return Match(SEEN + 0.02 if small is not None else LIKELY, sentences, {})
    if small is None or large is not None or r.unsteady or r.plain_wrong and r.y is None:
        return None
    if r.plain_wrong and any(f.values.get("rounds") for f in r.e.report.findings):
        return None  # with large inputs a softmax has one nonzero weight, so nothing is rounded
    text = small.text or "with inputs times 2^-12 the result is wrong"
    if small.error:
        return None  # small inputs only reveal another mistake, such as an index out of range
    tells = not (r.plain_wrong and r.e.operators & _SATURATING)  # with large inputs a softmax has one nonzero weight
    if not r.plain_wrong or tells and r.right("scale 2^12") and r.relative < 0.05 and not r.influences:
        return Match(
            SEEN + 0.02, (text, "with inputs times 2^12 it is right: a constant is added to something that scales"), {}
        )
    return None  # a result that is wrong anyway is also wrong with small inputs


def truncating_store(r: Reading) -> Match | None:
    """Rounded toward zero at the store: errors of one sign, below one unit in the last place."""
    if r.y is None or r.g is None or r.y.numel() < 16:
        return None
    y, g = r.y, r.g
    kind = narrower(r) or r.e.dtype
    dtype = getattr(torch, kind, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point or not bool(torch.isfinite(y - g).all()):
        return None
    exponent = torch.frexp(g).exponent.double()
    step = torch.exp2(exponent - 1) * torch.finfo(dtype).eps
    off = y.abs() - g.abs()
    moved = off.abs() > 1e-3 * step
    if not bool(moved.any()) or float((off.abs() / step).max()) > 1.05:
        return None
    toward = float((off[moved] < 0).double().mean())
    beyond = float((off.abs() / step > 0.51).double().mean())
    if toward < 0.95 or int(moved.sum()) < 12 or beyond < 0.1:
        return None
    text = f"{toward:.1%} of the errors point toward zero, and none is over one {kind} unit in the last place"
    return Match(EXACT, (text, f"{beyond:.0%} are over half a unit: rounding would leave none"), {"dtype": kind})


def index_overflow(r: Reading) -> Match | None:
    """Wrong only beyond 2^31: an offset does not fit into 32 bits."""
    big = {k: v for k, v in {**r.e.sizes, **r.e.scalars}.items() if isinstance(v, int) and abs(v) >= 2**30}
    if big and r.wrong_count:
        name, value = next(iter(big.items()))
        return Match(SEEN, (f"{name} = {value}: offsets pass 2^31",), {"name": name})
    if r.wrong is None or r.wrong.numel() < 2**31 // 8 or not r.wrong_count:
        return None
    first = int(r.wrong.flatten().nonzero()[0])
    for limit in (2**31, 2**32):
        for width in (1, 2, 4, 8):
            if 0.99 * limit <= first * width <= 1.05 * limit:
                return Match(SEEN, (f"right up to element {first}, and wrong from there on",), {"first": first})
    return None
