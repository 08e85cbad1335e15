"""Where numbers of an input go in the candidate and not in the golden, whatever NaN does.

NaN goes where no number does: through 0 * NaN behind a mask, through NaN - NaN behind a cumulative sum. A number goes
to an element when the element moves by more than another formula's rounding explains at these inputs: by more than

    max(2 bound, 4 sqrt(n) u max(|g|, |dy y| / |x|), 2 |golden(x + d) - golden(x)|), |d| <= 4 sqrt(n) u max |x|

the last since a stable formula gives what the golden gives of inputs that are off by rounding at the size of the
largest: a cumulative sum of 3000 and 0.5 holds the latter to 3000 u, a transform over an axis every element so.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from ..bounds.bounded import SLACK
from ..execute.run import CandidateRun, Material
from ..golden.golden_results import GoldenResults
from ..golden.kinks import binary
from ..judge.examination import Examination
from ..noise import formula_rounding
from .slices import ran, results

# of the large numbers: of both signs, since a comparison lets one pass; small ones, since a softmax that one of the
# large saturates shows a small one, and large ones hide behind their own rounding what small ones do not
TIMES = (1.0, -1.0, 0.01, -0.01)
_DRAWS = 4
STABLE = "right for inputs that are off by rounding at the size of the largest"


def seen(
    examination: Examination, places: Mapping[str, Tensor], changed: Callable[[float], Material], label: str
) -> dict[str, Tensor]:
    """Of each result's `places` those that some number reaches: changed(times) gives inputs with such numbers."""
    found = {n: torch.zeros_like(mask) for n, mask in places.items()}
    for times in TIMES:
        made = ran(examination, changed(times), f"{label}, {times:g}")
        if made is None:
            continue
        done, references = made
        got = results(examination, done)
        for name, mask in places.items():
            if name in got and not bool(found[name].any()):  # one number is enough
                found[name] = mask & moved(examination, name, got[name], references)
        if all(bool(mask.any()) for mask in found.values()):
            break
    return found


def moved(examination: Examination, name: str, tensor: Tensor, references: GoldenResults) -> Tensor:
    """Where a result is another one than in the first run, by more than rounding, while the golden's is the same."""
    was = {n: t for n, _, t in examination.first.results()}.get(name)
    before, golden = examination.ref.bounded.get(name), references.values.get(name)
    if was is None or before is None or golden is None or not tensor.shape == was.shape == golden.shape:
        return torch.zeros_like(tensor, dtype=torch.bool)
    still = (tensor == was) | (torch.isnan(tensor) & torch.isnan(was))
    apart = (tensor.double() - was.double()).abs()
    out = ~still & (golden == before.value) & ~(apart <= 2 * SLACK * before.bound)
    out = out & off(examination, name, tensor, references) if bool(out.any()) else out
    return off_kinks(examination, name, out, references)


def stable(examination: Examination, reference: GoldenResults, name: str, done: CandidateRun) -> bool:
    """Whether another formula rounds so: exp(x - logsumexp(x)) rounds at the size of x, and loses at large ones."""
    got, golden = {n: t for n, _, t in done.results()}.get(name), reference.values[name]
    if got is None or got.shape != golden.shape:
        return False
    return not bool(off(examination, name, got, reference, inputs_alone=True).any())


def off_kinks(examination: Examination, name: str, mask: Tensor, references: GoldenResults) -> Tensor:
    """Without the elements of a gradient at which the golden ties or kinks, before or after the change."""
    if not name.endswith(".grad") or not bool(mask.any()):
        return mask
    mask = mask & ~examination.ref.kink(name)
    return mask & ~references.kink(name) if bool(mask.any()) else mask  # each asks for many runs of the golden


def off(
    examination: Examination, name: str, tensor: Tensor, references: GoldenResults, *, inputs_alone: bool = False
) -> Tensor:
    """Where a result is not the golden's at these inputs, by more than rounding, of another formula too.

    inputs_alone: of one that loses what rounding of its inputs loses, and not what it adds up on the way besides.
    """
    now = references.bounded[name]
    apart = (tensor.double() - now.value).abs()
    out = ~(apart <= SLACK * now.bound) & torch.isfinite(now.value)
    infinite = out & ~torch.isfinite(tensor)
    if bool(infinite.any()):  # exp overflows in float32 where it does not in float64
        out &= ~(infinite & references.in_its_own_run(name, lambda t: ~torch.isfinite(t)))
        if not all(bool(torch.isfinite(t).all()) for t in references.values.values() if t.is_floating_point()):
            out &= ~infinite  # the golden divides by 0, or overflows, and another formula's zeros meet that elsewhere
    return out & ~(apart <= rounding(examination, name, references, inputs_alone)) if bool(out.any()) else out


def formula(examination: Examination, name: str) -> Tensor:
    """How far another formula's rounding moves this result of the first run, at the size of the largest beside it."""
    golden, ref = examination.ref.values[name], examination.ref
    return formula_rounding.unit(golden, ref.compute) * _sizes(golden).clamp(
        min=formula_rounding.terms(name, ref.bounded, ref.leaves)
    )


def rounding(examination: Examination, name: str, references: GoldenResults, inputs_alone: bool = False) -> Tensor:
    """How far the rounding of another formula moves this result at these inputs, per element."""
    golden, compute = references.values[name], references.compute
    unit = formula_rounding.unit(golden, compute)
    size = torch.maximum(_sizes(golden), _sizes(examination.ref.values[name]))
    size = size.clamp(min=formula_rounding.terms(name, references.bounded, references.leaves))
    far = torch.zeros_like(golden)
    generator = torch.Generator().manual_seed(examination.seed + 41)
    for _ in range(_DRAWS):
        off = {n: _off(t, compute, generator) for n, t in references.material.inputs.items() if _rounds(t)}
        material = references.material.with_inputs(off)
        run = examination.references(material, references.run, references.decisions).values[name]
        far = torch.maximum(far, (run - golden).abs().nan_to_num(0.0, 0.0, 0.0))
    return 2 * far if inputs_alone else torch.maximum(unit * size, 2 * far)


def _rounds(t: Tensor) -> bool:
    return t.is_floating_point() and t.numel() > 0 and not binary(t)


def _off(t: Tensor, compute: torch.dtype, generator: torch.Generator) -> Tensor:
    """In float64, each element off by rounding at the size of the largest."""
    signs = torch.randint(0, 2, t.shape, generator=generator).to(t.device) * 2 - 1
    exact = t.double()
    return exact + signs * formula_rounding.unit(t, compute) * _largest(exact)


def _largest(t: Tensor) -> float:
    finite = t[torch.isfinite(t)]
    return float(finite.abs().max()) if finite.numel() else 0.0


def _sizes(t: Tensor) -> Tensor:
    """The largest number of all lines through an element."""
    size = torch.where(torch.isfinite(t), t.abs(), 0.0)
    lines = [size.amax(a, keepdim=True).expand_as(size) for a in range(size.dim())]
    return torch.stack(lines).amax(0) if lines else size
