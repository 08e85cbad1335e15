"""Finds the elements that finite numbers of an input reach in the candidate but not in the golden.

NaN also reaches elements that no number reaches: by 0 * NaN behind a mask, by NaN - NaN in a cumulative sum. A number
reaches an element if it moves the element by more than another formula's rounding explains at these inputs:

    max(2 bound, 4 sqrt(n) u max(|g|, |dy y| / |x|), 2 |golden(x + d) - golden(x)|), |d| <= 4 sqrt(n) u max |x|

A result that is NaN is not moved by a number: an overflow times 0 spreads like NaN. Where a large number gives NaN, the
smallest one that changes anything decides: a real influence gives a wrong number, or Inf, before it gives NaN.

The last term is the error of a stable formula: the golden of inputs perturbed by rounding at the size of the largest.
A cumulative sum of 3000 and 0.5 keeps the 0.5 to 3000 u; a transform over an axis does so for every element.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..bounds.bounded import SLACK
from ..execute.records import CandidateRun, Material
from ..golden.golden_results import GoldenResults
from ..golden.kinks import binary
from ..judge.examination import Examination
from ..noise import formula_rounding
from .slices import results, run_changed

# Multiples of the large numbers: both signs, since a comparison lets only one pass; small ones as well, since a large
# one saturates a softmax, and its own rounding hides small effects.
SMALL = 0.01
FACTORS = (1.0, -1.0, SMALL, -SMALL)
_STEPS, _CLOSE = 100.0, 0.1  # numbers down to this part are tried, until two of them are this close
_DRAWS = 4
_REROUNDED_FACTOR = 8.0  # allowed multiple of the distance between the golden and its re-rounded runs
RIGHT_NEARBY = "right for inputs that are off by one rounding of the largest input"


def reached_elements(
    examination: Examination, places: Mapping[str, Tensor], changed: Callable[[float], Material], label: str
) -> dict[str, Tensor]:
    """The elements of each result's `places` that a number reaches; changed(times) returns inputs with such numbers."""
    reached = {n: torch.zeros_like(mask) for n, mask in places.items()}
    nan = set()  # factors of numbers that made a result NaN

    def tried(times: float) -> bool:
        """Adds what these numbers reach; whether they make a result NaN that nothing has reached yet."""
        outcome = run_changed(examination, changed(times), f"{label}, {times:g}")
        if outcome is None:
            return False
        run, references = outcome
        actual = results(examination, run)
        left = [n for n in places if n in actual and not bool(reached[n].any())]  # one number is enough
        for name in left:
            reached[name] = places[name] & moved(examination, name, actual[name], references)
        return any(not bool(reached[n].any()) and bool((places[n] & torch.isnan(actual[n])).any()) for n in left)

    for times in FACTORS:
        if all(bool(mask.any()) for mask in reached.values()):
            break
        nan |= {times} if tried(times) else set()
    for times in sorted(nan, key=abs)[:1]:
        smallest, step = times, _STEPS
        while step > 1 + _CLOSE and not all(bool(mask.any()) for mask in reached.values()):
            step **= 0.5
            smallest = smallest / step if tried(smallest) else smallest * step
    return reached


def moved(examination: Examination, name: str, tensor: Tensor, references: GoldenResults) -> Tensor:
    """Where a result moves by more than rounding compared with the first run, while the golden's does not move."""
    was = {n: t for n, _, t in examination.first.results()}.get(name)
    before, golden = examination.ref.bounded.get(name), references.values.get(name)
    if was is None or before is None or golden is None or not tensor.shape == was.shape == golden.shape:
        return torch.zeros_like(tensor, dtype=torch.bool)
    still = (tensor == was) | (torch.isnan(tensor) & torch.isnan(was))
    apart = (tensor.double() - was.double()).abs()
    out = ~still & (golden == before.value) & ~(apart <= 2 * SLACK * before.bound) & ~torch.isnan(tensor)
    out = out & off_golden(examination, name, tensor, references) if bool(out.any()) else out
    return off_kinks(examination, name, out, references)


def right_nearby(examination: Examination, reference: GoldenResults, name: str, run: CandidateRun) -> bool:
    """Whether the error is no larger than rounded inputs, or rounded arguments of exp, make it.

    Example: exp(x - logsumexp(x)), whose argument is rounded at the size of x.
    """
    actual, golden = {n: t for n, _, t in run.results()}.get(name), reference.values[name]
    if actual is None or actual.shape != golden.shape:
        return False
    out = off_golden(examination, name, actual, reference, inputs_alone=True)
    if bool(out.any()) and reference.exponent_rounding:
        limit = reference.exponent_rounding * golden.abs() + SLACK * reference.bounded[name].bound
        out &= ~((actual.double() - golden).abs() <= limit)
    return not bool(out.any())


def errs_like_rerounded(reference: GoldenResults, name: str, run: CandidateRun) -> bool:
    """Whether the golden with one more rounding of every number errs about as much.

    Example: exp2(x c - m c) in place of exp(x - m).
    """
    actual, golden = {n: t for n, _, t in run.results()}.get(name), reference.values[name]
    others = [values[name].double() for values in reference.jittered if name in values]
    if actual is None or actual.shape != golden.shape or not others:
        return False
    farthest = max(float((value - golden).abs().max()) for value in others)
    return bool(
        ((actual.double() - golden).abs() <= _REROUNDED_FACTOR * farthest).all()
    )  # false for NaN, which is no rounding


def off_kinks(examination: Examination, name: str, mask: Tensor, references: GoldenResults) -> Tensor:
    """The mask without those elements of a gradient where the golden has a tie or kink, before or after the change."""
    if not name.endswith(".grad") or not bool(mask.any()):
        return mask
    mask = mask & ~examination.ref.kink(name)
    return mask & ~references.kink(name) if bool(mask.any()) else mask  # each kink mask takes many runs of the golden


def in_own_run(references: GoldenResults, name: str, there: Callable[[Tensor], Tensor]) -> Tensor:
    """Mask of the elements for which `there` holds in an unmodified run of the golden, in either precision."""
    runs = [r[name] for r in (references.unmodified(True), references.unmodified(False)) if name in r]
    mask = torch.zeros_like(references.values[name], dtype=torch.bool)
    for run in runs:
        mask |= there(run) if run.shape == mask.shape else False
    return mask


def off_golden(
    examination: Examination, name: str, tensor: Tensor, references: GoldenResults, *, inputs_alone: bool = False
) -> Tensor:
    """Where a result differs from the golden at these inputs by more than any formula's rounding.

    inputs_alone: allow only the effect of rounded inputs, not the rounding of intermediate sums.
    """
    now = references.bounded[name]
    apart = (tensor.double() - now.value).abs()
    out = ~(apart <= SLACK * now.bound) & torch.isfinite(now.value)
    infinite = out & ~torch.isfinite(tensor)
    if bool(infinite.any()):  # exp overflows in float32 where it does not in float64
        out &= ~(infinite & in_own_run(references, name, lambda t: ~torch.isfinite(t)))
        if not all(bool(torch.isfinite(t).all()) for t in references.values.values() if t.is_floating_point()):
            out &= ~infinite  # the golden divides by 0 or overflows, so another formula may do so at other elements
    return out & ~(apart <= rounding(examination, name, references, inputs_alone)) if bool(out.any()) else out


def formula_error(examination: Examination, name: str) -> Tensor:
    """How far another formula's rounding moves this result of the first run, at the size of its largest neighbour."""
    golden, ref = examination.ref.values[name], examination.ref
    return formula_rounding.unit(golden, ref.compute) * _line_maxima(golden).clamp(
        min=formula_rounding.terms(name, ref.bounded, ref.leaves).usual
    )


def rounding(examination: Examination, name: str, references: GoldenResults, inputs_alone: bool = False) -> Tensor:
    """How far another formula's rounding moves this result at these inputs, per element."""
    golden, compute = references.values[name], references.compute
    unit = formula_rounding.unit(golden, compute)
    size = torch.maximum(_line_maxima(golden), _line_maxima(examination.ref.values[name]))
    terms = formula_rounding.terms(name, references.bounded, references.leaves)
    size = size.clamp(min=terms.usual)
    if examination.target.formula == "any":
        zeros = golden.abs() < formula_rounding.lost(golden, compute, terms)
        size = torch.where(zeros, size.clamp(min=terms.of_zeros), size)
    far = torch.zeros_like(golden, dtype=torch.float64)
    generator = torch.Generator().manual_seed(examination.seed + 41)
    for _ in range(_DRAWS):
        perturbed = {n: _perturbed(t, compute, generator) for n, t in references.material.inputs.items() if _rounds(t)}
        material = references.material.with_inputs(perturbed)
        run = examination.references(material, references.run, references.decisions).values[name]
        far = torch.maximum(far, (run.double() - golden).abs().nan_to_num(0.0, 0.0, 0.0))
    return 2 * far if inputs_alone else torch.maximum(unit * size, 2 * far)


def _rounds(t: Tensor) -> bool:
    return t.is_floating_point() and t.numel() > 0 and not binary(t)


def _perturbed(t: Tensor, compute: torch.dtype, generator: torch.Generator) -> Tensor:
    """A float64 copy with each element perturbed by one rounding of the largest element."""
    signs = torch.randint(0, 2, t.shape, generator=generator).to(t.device) * 2 - 1
    exact = t.double()
    return exact + signs * formula_rounding.unit(t, compute) * _largest(exact)


def _largest(t: Tensor) -> float:
    finite = t[torch.isfinite(t)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _line_maxima(t: Tensor) -> Tensor:
    """For each element, the largest magnitude on any axis-aligned line through it."""
    size = torch.where(torch.isfinite(t), t.abs(), 0.0)
    lines = [size.amax(a, keepdim=True).expand_as(size) for a in range(size.dim())]
    return torch.stack(lines).amax(0) if lines else size
