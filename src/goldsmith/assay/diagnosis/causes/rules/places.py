"""Rules about right numbers in the wrong place or in the wrong form."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from ....report.results import CERTAIN
from ...facts.evidence import ErrorPattern
from ...facts.spans import say
from .reading import EXACT, HINT, LIKELY, SEEN, WEAK, Match, Reading, close, label, plain

# the whole result is the golden's: an exchange inside the golden would be a less direct explanation
_PLAIN = EXACT + 0.035


def _pattern(r: Reading, pattern: ErrorPattern, score: float = EXACT) -> Match:
    sentences = [
        pattern.text
        or f"{pattern.tensor} is the golden {pattern.kind} ({_parameters(pattern)}), match {pattern.match:.4f}"
    ]
    if pattern.also:
        sentences.append(f"also explained by {', '.join(pattern.also)}")
    return Match(score - 0.1 * bool(pattern.also), tuple(sentences), {**pattern.params, "also": list(pattern.also)})


def _parameters(pattern: ErrorPattern) -> str:
    return ", ".join(f"{k} {v}" for k, v in pattern.params.items())


def transposed(r: Reading) -> Match | None:
    pattern = r.pattern("transposed")
    if pattern is not None:
        return _pattern(r, pattern, EXACT if _oblong(r, pattern) else _PLAIN)
    if r.pair is not None and r.pair[0].dim() >= 2:
        y, g = r.pair
        if g.shape[-1] == g.shape[-2] and close(y, g.mT, r.unit) and not close(y, g, r.unit):
            return Match(_PLAIN, ("it is the golden with its last two axes transposed",), {"axes": [-2, -1]})
    return None


def permuted(r: Reading) -> Match | None:
    pattern = r.pattern("permuted", "reversed")
    if pattern is not None:
        return _pattern(r, pattern, EXACT if pattern.params.get("bijective", True) else LIKELY)
    return _other_places(r)


def _other_places(r: Reading) -> Match | None:
    """Values in rows of an input arrive at other places than in the golden, and miss some of their own."""
    for i in r.influences:
        rows = sum(hi - lo + 1 for lo, hi in i.elsewhere)
        if rows > 1 and not i.missing:
            text = (
                f"{i.input}[axis {i.axis}: {say(i.elsewhere)}] reaches other places than in the golden, "
                "and misses some that it should reach: it is read in another order"
            )
            return Match(WEAK + 0.02, (text,), {"input": i.input, "axis": i.axis})
    return None


def shifted(r: Reading) -> Match | None:
    pattern = r.pattern("shifted")
    if pattern is not None:
        return _pattern(r, pattern)
    for axis, index in _rows(r):
        step = _shift(index)
        if step is not None:
            text = f"along axis {axis} it is the golden shifted by {step}"
            return Match(EXACT, (text,), {"axis": axis, "step": step})
    return None


def _shift(index: Tensor) -> int | None:
    """The step by which rows moved, if all except one or two moved alike."""
    n = len(index)
    step = (torch.arange(n, device=index.device) - index) % n
    usual = int(step.mode().values)
    return (usual if usual <= n // 2 else usual - n) if usual and int((step != usual).sum()) <= 2 else None


def _rows(r: Reading) -> Iterator[tuple[int, Tensor]]:
    """(axis, index of the golden's row that each row equals), for axes along which rows are moved."""
    for pattern in r.e.permutations:
        if "index" in pattern.params and "axis" in pattern.params:
            yield pattern.params["axis"], torch.tensor(pattern.params["index"])


def wrong_stride(r: Reading) -> Match | None:
    """Read with other strides: those of another axis order, or of another partition's size."""
    pattern = r.pattern("transposed")
    if pattern is not None and _oblong(r, pattern):
        return _pattern(r, pattern, EXACT + 0.01)
    if r.pair is not None and r.pair[0].dim() >= 2 and r.pair[0].shape[-1] != r.pair[0].shape[-2]:
        y, g = r.pair
        for other in (g.mT.reshape(g.shape), g.reshape(*g.shape[:-2], g.shape[-1], g.shape[-2]).mT):
            if close(y, other, r.unit) and not close(y, g, r.unit):
                return Match(EXACT, ("it is the golden read with its last two strides exchanged",), {"axes": [-2, -1]})
    for i in r.influences:
        if not i.missing and sum(hi - lo + 1 for lo, hi in i.elsewhere) > 1:
            sentence = f"{i.input}[axis {i.axis}: {say(i.elsewhere)}] reaches other places than in the golden"
            return Match(WEAK - 0.03, (sentence,), {"input": i.input, "axis": i.axis})
    return None


def _oblong(r: Reading, pattern: ErrorPattern) -> bool:
    """True if the exchanged axes have different lengths: the tensor keeps its shape, so its strides were exchanged."""
    axes = pattern.params.get("axes", ())
    return r.g is not None and len({r.g.shape[a] for a in axes}) > 1


def swapped_results(r: Reading) -> Match | None:
    """It holds another result, or another result holds its share."""
    pattern = r.pattern("swapped")
    if pattern is not None:
        return _pattern(r, pattern, EXACT + 0.02)
    if r.y is None or r.g is None or not r.wrong_count or float(r.g.norm()) == 0:
        return None
    for name, (got, golden) in r.e.other.items():
        if name == r.e.tensor or got is None or golden is None or got.shape != r.g.shape or golden.shape != r.g.shape:
            continue
        if close(r.y, golden, r.unit) and not close(r.g, golden, r.unit):
            both, stage = close(got, r.g, r.unit), r.e.stage(name)
            if not both and stage is not None and stage.kind == "stage":
                continue  # a stage in the place of another one is a step that was left out
            text = f"{r.e.tensor} holds what should be {name}" + (f", and {name} holds {r.e.tensor}" if both else "")
            return Match(EXACT + 0.03 if both else SEEN, (text,), {"with": name})
        if not bool((r.y != 0).any()) and close(got, golden + r.g, r.unit):
            text = f"{r.e.tensor} is zero, and {name} is its own gradient plus that of {r.e.tensor}"
            return Match(EXACT + 0.03, (text,), {"with": name})
        if not bool((got != 0).any()) and close(r.y, golden + r.g, r.unit) and float(golden.norm()) > 0:
            text = f"{name} is zero, and {r.e.tensor} holds its share as well"
            return Match(EXACT + 0.03, (text,), {"with": name})
    return _blocks_exchanged(r)


def _blocks_exchanged(r: Reading) -> Match | None:
    """Of parts packed along an axis, two hold each other's numbers, such as the gradients of shift and scale."""
    for axis, index in _rows(r):
        moved = [(i, j) for i, j in enumerate(index.tolist()) if i != j]
        half = len(moved) // 2
        step = moved[0][1] - moved[0][0]
        first, second = moved[:half], moved[half:]
        if half < 2 or len(moved) % 2 or step < half:
            continue
        begins = first[0][0], second[0][0]
        along = [(begins[0] + k, begins[0] + k + step) for k in range(half)]
        if first != along or second != [(j, i) for i, j in along]:
            continue
        spans = " and ".join(f"{b}..{b + half - 1}" for b in begins)
        text = f"along axis {axis} {spans} hold each other's numbers; all others are in their place"
        packed = r.e.tensor.endswith(".grad")
        return Match(EXACT + 0.03 if packed else EXACT - 0.02, (text,), {"axis": axis, "parts": list(begins)})
    return None


def dtype_width(r: Reading) -> Match | None:
    """Written with another width: the first half is full, and holds two numbers in the place of one."""
    width = r.pattern("dtype_width")
    return None if width is None else _pattern(r, replace(width, also=()), EXACT + 0.02)


def wrong_format(r: Reading) -> Match | None:
    """Numbers of a very different size that do not correlate with the golden's."""
    if r.y is None or r.g is None or r.e.permutations or r.pair is None:
        return None
    y, g = r.pair
    if float((((y - g).abs() > 1e-2 * g.abs()) | (r.y != r.y)).double().mean()) < 0.5:
        return None
    wild, tame = _exponents(y), _exponents(g)
    if wild > 12 and wild > 4 * tame and r.memory("never_written", "stray_read") is None:
        text = (
            f"exponents spread over {wild:.0f} bits where the golden's spread over {tame:.1f}: bytes of another format"
        )
        return Match(SEEN, (text,), {"spread": wild})
    return None


def _exponents(t: Tensor) -> float:
    """Spread of the magnitudes of nonzero elements, in powers of two."""
    logs = t[t != 0].abs().log2()
    return float(logs.std()) if logs.numel() > 3 else 0.0


def _layouts(r: Reading) -> tuple[list[str], list[str]]:
    """(failing layouts, those among them with stride 0), if the case's own layouts are right.

    The errors must exceed a bound: a bias at the edge of detection shows in one layout and not in another.
    """
    if r.plain_wrong or r.unsteady:
        return [], []
    sure = {plain(n) for n in r.e.runs} | {plain(label(f)) for f in r.e.report.findings if f.rung == CERTAIN}
    failing = [run for run in r.runs("layout") if not run.right and plain(run.name) in sure]
    names = [run.name for run in failing]
    return names, [n for n in names if "stride0" in n or "expanded" in n]


def layout_assumption(r: Reading) -> Match | None:
    """Right on contiguous tensors, wrong on the same values in another layout."""
    names, expanded = _layouts(r)
    if not names:
        return None
    others = [n for n in names if n not in expanded]
    text = f"right on contiguous tensors; wrong with {', '.join((others or expanded)[:3])}"
    return Match(EXACT if others else HINT, (text,), {"layouts": names})


def expanded_gradient(r: Reading) -> Match | None:
    """Wrong if the output gradient has stride 0, as `y.sum().backward()` passes it."""
    names, expanded = _layouts(r)
    sent = [n for n in expanded if "grad" in n or "(" not in n]
    if not sent:
        return None
    only = len(expanded) == len(names)
    text = f"wrong with an output gradient of stride 0 ({sent[0]})"
    sentences = (text, "every other layout is right") if only else (text,)
    return Match(EXACT if only else LIKELY, sentences, {"layouts": expanded})
