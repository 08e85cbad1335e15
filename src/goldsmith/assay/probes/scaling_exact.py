"""Checks that candidate(2^k x) = 2^(k d) candidate(x), bit by bit, where the golden scales exactly.

Overflow and underflow are exempt, also of an output that the candidate may read back as it is stored. Powers of two
pass through sums, products, quotients and even-power roots without extra rounding, in any order. A candidate that does
not scale so contains an absolute constant, or takes another path at another magnitude.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from ..execute.records import CandidateRun, Material
from ..golden.golden_results import GoldenResults
from ..judge.agreement import same_bits
from ..judge.examination import Examination
from ..report.results import SYSTEMATIC

Change = Callable[[Material], Material]


def compare(
    examination: Examination, probe: str, label: str, run: CandidateRun, golden: GoldenResults, change: Change
) -> None:
    """Compare a scaled run with the plain one; report a difference only if a fresh seed repeats it."""
    differing = {n.tensor for n in examination.notes if n.id == "order_nondeterminism"}
    broken = _inexact(examination, examination.material, examination.first, run, golden)
    broken = {n: m for n, m in broken.items() if n not in examination.bad | differing}
    if not broken:
        return
    again = examination.execute(probe, f"{label} again", look=False)
    steady = {n for n, _, t in examination.first.results() if same_bits(t, dict(_results(again)).get(n))}
    plain = examination.variant(300)
    scaled = change(plain)
    before, after = (examination.execute(probe, f"{label} fresh seed", material=m, look=False) for m in (plain, scaled))
    raised = before.error is not None or after.error is not None
    repeated = {} if raised else _inexact(examination, plain, before, after, examination.references(scaled, after))
    for name, mask in broken.items():
        if name in steady and name in repeated:
            where = examination.locate(name, mask)
            text = f"{name} does not scale with its inputs bit for bit, as the golden does ({label}): {where.text}; "
            text += "an absolute constant, or another path at another magnitude; a fresh seed repeats it"
            examination.find(SYSTEMATIC, probe, name, text, where=where, kind="inexact_scaling", run=label)


def _results(run: CandidateRun) -> list[tuple[str, Tensor]]:
    return [(n, t) for n, _, t in run.results() if t is not None and t.is_floating_point()]


def _inexact(
    examination: Examination, plain: Material, first: CandidateRun, run: CandidateRun, golden: GoldenResults
) -> dict[str, Tensor]:
    """Masks of the elements that are not the plain run's times the golden's power of two. golden: of the scaled run."""
    if examination.target.decisions:
        return {}
    pairs = [(plain.inputs[n], t) for n, t in golden.material.inputs.items() if t.is_floating_point()]
    if any(factor(a, b) is None for a, b in pairs):
        return {}  # the inputs themselves were rounded, or are all zero
    before = examination.ref if first is examination.first else examination.references(plain, first)
    after = golden.values
    first_results, out = dict(_results(first)), {}
    underflowed = _underflowed(first, before) | _underflowed(run, golden)
    for name, y in _results(run):
        first_result = None if underflowed - {name} else first_results.get(name)
        power = factor(before.values[name], after[name]) if name in before.values and name in after else None
        if first_result is None or power is None or first_result.shape != y.shape or first_result.dtype != y.dtype:
            continue
        expected = first_result.double() * power
        mask = (
            _normal(first_result, first_result.dtype)
            & _normal(y, y.dtype)
            & _normal(expected, y.dtype)
            & (y.double() != expected)
        )
        if bool(mask.any()) and _golden_scales(before, golden, name, power):
            out[name] = mask
    return out


def _golden_scales(before: GoldenResults, after: GoldenResults, name: str, power: float) -> bool:
    """Whether the golden as written scales exactly in compute precision; a square overflows early in float16."""
    small, large = before.unmodified(False).get(name), after.unmodified(False).get(name)
    return small is None or large is None or torch.equal(small.double() * power, large.double())


def _underflowed(run: CandidateRun, golden: GoldenResults) -> set[str]:
    """Outputs that a kernel may read back as they are stored, and that lose bits there because they are subnormal."""
    if golden.read_back is None:
        return set()
    rounded = {n: t for n, t in run.outputs.items() if t.is_floating_point() and n in golden.values}
    return {n for n, t in rounded.items() if bool(((golden.values[n] != 0) & ~_normal(t, t.dtype)).any())}


def factor(a: Tensor, b: Tensor) -> float | None:
    """The power of two p with b = a * p exactly in every element; None if there is none."""
    a, b = a.double(), b.double()
    nonzero = a != 0
    if a.shape != b.shape or not bool(nonzero.any()) or not torch.equal(nonzero, b != 0):
        return None
    ratio = float((b[nonzero] / a[nonzero]).flatten()[0])
    power = math.isfinite(ratio) and ratio > 0 and math.frexp(ratio)[0] == 0.5
    return ratio if power and torch.equal(a * ratio, b) else None


def _normal(t: Tensor, dtype: torch.dtype) -> Tensor:
    """Where t is normal in that dtype: not subnormal, Inf, NaN or zero; the ladder judges zeros."""
    limits = torch.finfo(dtype)
    return (t.abs() >= limits.smallest_normal) & (t.abs() <= limits.max)
