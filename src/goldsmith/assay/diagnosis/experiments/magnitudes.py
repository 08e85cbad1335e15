"""Searches changed goldens at another magnitude of the inputs, if the error is too close to rounding in this one.

A constant that does not scale with the inputs, such as an epsilon, may be a millionth of them at one magnitude and a
hundredth at another. There rounding hides nothing, and a changed golden either gives the candidate's numbers or does
not. The change must also reduce the error of the case as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ....core.tracing import TargetError
from ...declare.case import Case
from ...execute.records import CandidateRun, RunSettings
from ...golden.golden_error import GoldenError
from ...judge.examination import Examination
from ...probes import decisions
from ..whatif import Search, search
from ..whatif.engine import SMALL
from .isolate import named

PROBE = "magnified"
_EXPONENTS = (12, -12, 6, -6)
_GAIN = 8.0  # factor by which the error must be larger, in units of the bound


def search_magnitudes(
    examination: Examination,
    tensor: str,
    own: CandidateRun,
    own_search: Search,
    spent: Callable[[], bool] = lambda: False,
) -> Search | None:
    """The search at the magnitude with the largest error; None if the error is already large, or nowhere larger.

    own_search  the search at the case's own magnitude
    """
    if own_search.judge.worst > SMALL or examination.case.salt:
        return None
    searches: list[Search] = []
    for exponent in _EXPONENTS:
        if spent():
            break
        searches += _searched(examination, tensor, own, own_search, exponent)
    best = max(searches, key=lambda s: s.judge.worst, default=own_search)
    if best.judge.worst <= _GAIN * own_search.judge.worst:
        return None
    best.magnitudes = [own_search, *(s for s in searches if s is not best and s.judge.worst > own_search.judge.worst)]
    return best


def _searched(
    examination: Examination, tensor: str, own: CandidateRun, own_search: Search, exponent: int
) -> Iterator[Search]:
    for other, done in _run(examination, own is not examination.first, exponent):
        got = named(done).get(tensor, ("", None))[1]
        scaled = None if got is None else search(other, tensor, got, done, causes=own_search.causes)
        if scaled is not None and bool(scaled.judge.finite.all()):
            scaled.seen = (
                f", with inputs times 2^{exponent}: there the error of {tensor} is {scaled.judge.worst:.3g} bounds, "
            )
            scaled.seen += f"and {own_search.judge.worst:.3g} with the inputs as they are"
            yield scaled


def _run(examination: Examination, debug: bool, exponent: int) -> Iterator[tuple[Examination, CandidateRun]]:
    """An examination of the case with scaled inputs, and its first run; yields nothing if it cannot be judged."""
    case = replace(examination.case, draw=_scaled(examination.case, 2.0**exponent))
    label = f"{examination.label} times 2^{exponent}"
    e = examination
    try:
        other = Examination(e.target, case, e.dtype, e.device, e.seed, e.selected, label)
    except TargetError:  # inputs that the kernel need not take
        return
    run = other.first = other.execute(PROBE, label, RunSettings(debug=debug), look=False)
    examination.candidate_runs += 1
    if run.error is not None:
        return
    try:
        other.ref = decisions.settle(other, run, other.references(other.material, run))
        _ = other.ref.bounded
    except (GoldenError, TargetError):
        return
    yield other, run


def _scaled(case: Case, by: float) -> Callable[..., dict[str, Any]]:
    def draw(make: Any, **sizes: Any) -> dict[str, Any]:
        return {n: v * by if _scales(v) else v for n, v in case.draw(make, **sizes).items()}

    return draw


def _scales(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point() and bool(torch.isfinite(value).all())
