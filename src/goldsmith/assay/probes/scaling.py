"""The probe `scaling`: inputs times 2^12 and 2^-12, zeros and equal values, a large offset, one NaN, one Inf.

It finds absolute epsilons, a softmax without its maximum, swallowed NaN, and cancellation that a two-pass sum avoids.
Where the golden scales exactly, scaling_exact.py compares bits. The candidate may overflow where the golden in compute
precision overflows too.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ..declare.domain import OutsideDomain
from ..execute.memory import distinct
from ..execute.records import CandidateRun, Material, RunSettings
from ..golden import zero_times_nan
from ..golden.golden_results import GoldenResults
from ..golden.kinks import binary
from ..judge import ladder
from ..judge.examination import Examination
from ..report.results import CERTAIN
from . import decisions, hints, reach, scaling_exact, values
from .layouts import REFUSALS
from .slices import changeable, far, own_decisions, own_results

NAME = "scaling"
OFFSET = 128.0
PLAIN = RunSettings()
RESOLVED = 2.0**-44  # relative: float64's resolution of a gradient's change


def run(examination: Examination) -> None:
    if not _changeable_inputs(examination):
        return
    for exponent in (12, -12):
        change = partial(_changed, examination, change=partial(_scaled, exponent=exponent))
        run, golden = _judge_changed(examination, f"scale:2^{exponent}", partial(_scaled, exponent=exponent))
        if golden is not None:
            scaling_exact.compare(examination, NAME, f"scale:2^{exponent}", run, golden, change)
    # equal values make every maximum a tie and may put every rectifier on its kink, where any subgradient is legal
    _judge_changed(examination, "values:flat", _equal_values, RunSettings(backward=False))
    # a one-pass sum is within its bound here, and far outside the noise of honest runs
    _judge_changed(examination, "values:offset", _offset, noise="ensemble" in examination.selected)
    _plant_special(examination, "values:nan", float("nan"), torch.isnan)
    _plant_special(examination, "values:inf", float("inf"), lambda t: ~torch.isfinite(t))


def _changeable_inputs(examination: Examination) -> list[str]:
    """Names of the inputs whose values are changed. An input of only zeros and ones has no other legal values."""
    inputs = examination.material.inputs
    return [n for n, t in inputs.items() if changeable(t) and not binary(t)]


def _scaled(t: Tensor, exponent: int) -> Tensor:
    """2^exponent * t, or the largest smaller power that stays finite."""
    top = float(t.abs().amax())
    while exponent > 0 and top * 2.0**exponent > torch.finfo(t.dtype).max / 4:
        exponent -= 1
    # keep the strides: another layout may take another path
    scaled = torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=t.device)
    distinct(scaled).copy_(distinct(t) * 2.0**exponent)
    return scaled


def _offset(t: Tensor) -> Tensor:
    """Shift the values by OFFSET, away from zero."""
    return t - OFFSET if bool((t < 0).any()) else t + OFFSET


def _equal_values(t: Tensor) -> Tensor:
    """All elements equal, except the first index of the first axis, which is zero."""
    values = t.flatten()[0].expand(t.shape).contiguous()
    if values.dim() and len(values) > 1:
        values[0] = 0
    return values


def _changed(examination: Examination, material: Material, change: Callable[[Tensor], Tensor]) -> Material:
    return material.with_inputs({n: change(material.inputs[n]) for n in _changeable_inputs(examination)})


def _judge_changed(
    examination: Examination,
    label: str,
    change: Callable[[Tensor], Tensor],
    settings: RunSettings = PLAIN,
    *,
    noise: bool = False,
) -> tuple[CandidateRun, GoldenResults | None]:
    """Judge a run on changed inputs; drop a failure if the golden in compute precision fails too.

    Returns the run and the golden's results it was judged by (None if it raised).

    noise: also compare with the noise of legal orders, on inputs perturbed by one rounding. A formula that is right for
    inputs this close, such as log-sum-exp minus a logit, is honest. One that loses the square of the rounding is not.
    """

    def changed(material: Material) -> Material:
        return replace(_changed(examination, material, change), nudged=noise)

    material = changed(examination.material)
    run = examination.execute(NAME, label, settings, material)
    if (
        run.error is not None
        and examination.golden_raises(label, material, run)
        or examination.raised(NAME, label, run)
    ):
        return run, None
    reference = decisions.settle(examination, run, examination.references(material, run))
    open_ends = {n for n, b in reference.bounded.items() if not bool(torch.isfinite(b.value).all())}
    overflowing = [] if reference.read_back is None else [n for n in run.outputs if _overflows(reference, n)]
    # what is computed later may read such an output as it is stored
    later = set(reference.order[min(map(reference.order.index, overflowing)) + 1 :]) if overflowing else set()
    findings_before, maps_before, first = list(examination.findings), dict(examination.maps), len(examination.rows)
    try:
        failed = values.judge(
            examination, run, reference, NAME, label, noise=noise, repeat=settings,
            skip=frozenset(examination.bad | open_ends), change=changed, hinted=False,
        )  # fmt: skip
        excused = {n for n in failed if n in later or not honest_passes(examination, reference, n)}
        stable = set() if noise else {n for n in failed - excused if reach.right_nearby(examination, reference, n, run)}
        if noise:
            excused |= {n for n in failed - excused if reach.errs_like_rerounded(reference, n, run)}
        steep = {n for n in failed - excused if noise and _honest_runs_stand_out(reference, n)}
    except BaseException:  # such as out of memory: drop the findings, because the golden has not been checked yet
        examination.findings, examination.maps = findings_before, maps_before
        del examination.rows[first:]
        raise
    new = examination.findings[len(findings_before) :]
    remaining = {f.tensor for f in new if f.tensor not in excused | steep | stable}
    certain = {f.tensor for f in new if f.rung == CERTAIN}
    # Cancellation in gradients depends on the formula: dy * y instead of p * dp is legal, and rounds more.
    within_bounds = remaining - certain if noise and all(n.endswith(".grad") for n in remaining) else set()
    remaining = excused | steep | stable | within_bounds
    kept = [f for f in new if f.tensor not in remaining]
    examination.findings = findings_before + hints.all_added(examination, run, reference, kept, scaled=True)
    examination.maps = maps_before | {k: m for k, m in examination.maps.items() if m.tensor not in remaining}
    examination.rows[first:] = [r.not_judged() if r.tensor in remaining else r for r in examination.rows[first:]]
    for names, reason in (
        (excused & later, "an output that it may be computed from overflows"),
        (excused - later, "the golden in compute precision exceeds its own bounds"),
        (steep, "other honest runs stand out of the noise, too"),
        (stable, reach.RIGHT_NEARBY),
        (within_bounds, "within what rounding allows, outside the noise of the golden's own formula"),
    ):
        if names:
            text = ", ".join(sorted(names))
            examination.note("compute_range", text, f"{text}: {reason} at {label}; not judged there")
    return run, reference


def _overflows(reference: GoldenResults, name: str) -> bool:
    """Whether an element of the golden's result is Inf in the dtype in which it is stored."""
    entry = reference.bounded.get(name)
    return entry is not None and bool(torch.isinf(entry.value.to(reference.stores[name])).any())


def honest_passes(examination: Examination, reference: GoldenResults, name: str) -> bool:
    """Whether a plain run of the golden in compute precision is right for this result."""
    judged_against = reference.reference(name, "output", noise=False)
    runs = [run[name] for run in (reference.honest, reference.unmodified(False)) if name in run]
    return judged_against is None or all(
        ladder.judge(name, value.to(judged_against.store), judged_against).ok for value in runs
    )


def _honest_runs_stand_out(reference: GoldenResults, name: str) -> bool:
    """Whether other honest runs also stand out of the noise: one rounding changes the result by orders of magnitude.

    Example: Sinkhorn of logits of 10^7. Its gradients are differences of 10^-90, and eight runs cannot show their
    spread.
    """
    against = reference.reference(name, "output")
    if against is None:
        return False
    return any(ladder.stands_out(name, run[name], against) for run in reference.second_ensemble if name in run)


# NaN and Inf


def _plant_special(examination: Examination, label: str, value: float, is_special: Callable[[Tensor], Tensor]) -> None:
    """Set one element of every changeable input to NaN or Inf: results must be NaN or Inf where the golden is."""
    elements = _changed_elements(examination)
    if not elements:
        return
    material = _planted(examination, elements, value)
    forward_only = value == float("inf")  # a gradient at infinity depends on the formula
    run = examination.execute(NAME, label, RunSettings(backward=not forward_only), material)
    if isinstance(run.error, REFUSALS) and not isinstance(run.error, OutsideDomain):
        examination.note(
            "refused_value", examination.target.name or "", f"{label} is refused with {type(run.error).__name__}"
        )
        return
    if examination.raised(NAME, label, run):
        return
    golden = own_results(examination, material, run)
    leaks: dict[str, Tensor] = {}
    swallowed: dict[str, Tensor] = {}
    for name, _, tensor in run.results():
        expected = golden.values.get(name)
        if tensor is None or expected is None or name in examination.bad or not tensor.is_floating_point():
            continue
        if expected.shape != tensor.shape or name in examination.target.decisions:
            continue
        finite = expected.abs() <= torch.finfo(tensor.dtype).max
        if bool((is_special(tensor) & finite).any()):
            leaks[name] = is_special(tensor) & finite
        finite_instead = is_special(expected) & torch.isfinite(tensor)
        # Inf - Inf and Inf / Inf depend on the formula. Next to an Inf, softmax is 0 and exp(x - logsumexp(x)) is NaN.
        finite_instead &= torch.isinf(expected) if forward_only else ~is_special(tensor)
        if bool(finite_instead.any()):
            swallowed[name] = finite_instead
    _report_leaks(examination, golden, label, leaks, is_special)
    _report_swallowed(examination, golden, label, value, is_special, run, swallowed)


def _report_leaks(
    examination: Examination,
    golden: GoldenResults,
    label: str,
    leaks: dict[str, Tensor],
    is_special: Callable[[Tensor], Tensor],
) -> None:
    for name, mask in leaks.items():
        honest = golden.honest.get(name)
        mask = mask if honest is None else mask & ~is_special(honest)
        mask = mask & ~reach.in_own_run(golden, name, is_special)
        if not bool(mask.any()):
            continue
        declared = set(_changed_elements(examination)) <= set(examination.target.holds_nan)
        wrong = mask if declared else _confirmed_leak(examination, label, name, mask)
        if bool(wrong.any()):
            where = examination.locate(name, wrong)
            text = (
                f"{label}: {name} is not finite where the golden is: {where.text}; "
                f"{_changed_elements_text(examination)}"
            )
            examination.find(CERTAIN, NAME, name, text, where=where, kind="nonfinite_leak", run=label)
        else:
            text = f"{label}: NaN spreads to more of {name} than in the golden; finite numbers do not"
            examination.note("nan_spread", name, text)


def _changed_elements_text(examination: Examination) -> str:
    """A phrase that names the changed elements."""
    shapes = {n: examination.material.inputs[n].shape for n in _changed_elements(examination)}
    at = {
        n: [int(i) for i in torch.unravel_index(torch.tensor(p), shapes[n])]
        for n, p in _changed_elements(examination).items()
    }
    return "it was put into " + ", ".join(f"{n}{i if i else ''}" for n, i in at.items())


def _confirmed_leak(examination: Examination, label: str, name: str, mask: Tensor) -> Tensor:
    """The elements of `mask` that a finite number at the changed element also reaches, or makes wrong.

    NaN may legally spread where numbers do not: a product with masked zeros, NaN - NaN in a cumulative sum, or a
    backward that recomputes probabilities as exp(-inf - NaN), where the golden writes a zero. It may also spread
    through a value that a comparison in the golden drops.
    """

    def changed(times: float) -> Material:
        return _planted(examination, _changed_elements(examination), None, times)

    def outcome(times: float) -> tuple[Tensor | None, GoldenResults]:
        material = changed(times)
        run = examination.execute(NAME, f"{label}, a finite number in its place", material=material, look=False)
        tensor = None if run.error is not None else {n: t for n, _, t in run.results()}.get(name)
        return tensor, own_results(examination, material, run)

    actual, references = outcome(1.0)
    if actual is not None and not _can_be_stored(references):
        actual, references = outcome(reach.SMALL)  # an overflow of one result may be why another differs
    if actual is None or actual.shape != mask.shape:
        return torch.zeros_like(mask)
    # in the golden, the changed element does not influence these
    unmoved = mask & (references.values[name] == examination.ref.values[name])
    wrong = torch.zeros_like(mask)
    if bool(unmoved.any()):
        wrong = reach.reached_elements(examination, {name: unmoved}, changed, f"{label}, a finite number")[name]
    if bool((mask & ~unmoved).any()):
        differs = mask & ~unmoved & reach.off_golden(examination, name, actual, references)
        wrong = wrong | reach.off_kinks(examination, name, differs, references)
    return wrong


def _can_be_stored(golden: GoldenResults) -> bool:
    """Whether no result of the golden overflows in the dtype that it is stored in."""
    return all(
        bool((value.abs() <= torch.finfo(golden.stores[name]).max).all())
        for name, value in golden.values.items()
        if name in golden.stores and golden.stores[name].is_floating_point
    )


def _report_swallowed(
    examination: Examination,
    golden: GoldenResults,
    label: str,
    value: float,
    is_special: Callable[[Tensor], Tensor],
    run: CandidateRun,
    swallowed: dict[str, Tensor],
) -> None:
    """Report results that are finite where the golden is NaN or Inf, if the changed element of an input matters there.

    It matters if a finite change of the element changes the golden. 0 * Inf at a masked element is an accident of the
    golden's formula. So is 0 * NaN in the gradient of an unchosen row, although a finite number there would change the
    choice (`zero_times_nan`).
    """
    swallowed = {n: mask & ~reach.in_own_run(golden, n, torch.isfinite) for n, mask in swallowed.items()}
    if any(n.endswith(".grad") and bool(mask.any()) for n, mask in swallowed.items()):
        # excludes NaN that only a product with zero causes
        zero_times = zero_times_nan.gradients(golden.evaluate, golden.leaves)
        swallowed = {n: mask & is_special(zero_times[n]) if n in zero_times else mask for n, mask in swallowed.items()}
    swallowed = {n: mask for n, mask in swallowed.items() if bool(mask.any())}
    if not swallowed:
        return
    caused = {name: torch.zeros_like(mask) for name, mask in swallowed.items()}
    for input, place in _changed_elements(examination).items():
        special, finite = (
            examination.references(
                _planted(examination, {input: place}, v), run, own_decisions(examination, run)
            ).values
            for v in (value, None)
        )
        nearby = (
            _gradients_nearby(examination, run, input, place)
            if any(name.endswith(".grad") for name in swallowed)
            else {}
        )
        for name in swallowed:
            before = examination.ref.bounded[name]
            moves = is_special(special[name]) & ((finite[name] - before.value).abs() > 2 * before.bound)
            if name in nearby:  # a gradient that can only jump, such as a maximum's, becomes NaN only by its formula
                moves &= (nearby[name] - before.value).abs() > RESOLVED * before.value.abs()
                moves &= ~examination.ref.kink(name) if bool(moves.any()) else moves
            caused[name] |= moves
    for name, mask in swallowed.items():
        mask = mask & caused[name]
        if name.endswith(".grad") and not any(bool(caused[n].any()) for n in swallowed if not n.endswith(".grad")):
            mask = _without_planted(examination, label, name, mask)
        if bool(mask.any()):
            where = examination.locate(name, mask)
            text = f"{label} is swallowed: {name} is finite where the golden is not: {where.text}; "
            names = tuple(_changed_elements(examination))
            text += f"{_changed_elements_text(examination)}; if inputs are always finite, declare finite={names}"
            examination.find(CERTAIN, NAME, name, text, where=where, kind="swallowed", run=label)


def _without_planted(examination: Examination, label: str, name: str, mask: Tensor) -> Tensor:
    """The mask without the gradient of the changed element itself, for use if every output is NaN as it should be.

    A branch (x if x > 20, otherwise log1p(exp(min(x, 20)))) sends no gradient through the side that is not taken, and a
    clamp sends none to a value outside its range. The loss is NaN, which is warning enough. For |x - y| the same is
    true of a NaN in x or y.
    """
    inputs, mask = examination.material.inputs, mask.contiguous()  # a gradient may be stored transposed
    places = [place for other, place in _changed_elements(examination).items() if inputs[other].shape == mask.shape]
    if not any(bool(mask.view(-1)[place]) for place in places):
        return mask
    mask = mask.clone()
    mask.view(-1)[places] = False
    if not bool(mask.any()):
        text = f"{label}: {name} is finite at the changed element itself, whose gradient is NaN in the golden; "
        examination.note("nan_gradient", name, text + "the outputs pass it on")
    return mask


def _gradients_nearby(examination: Examination, run: CandidateRun, input: str, place: int) -> dict[str, Tensor]:
    """The golden's gradients after a relative change of 1e-6 of the one element."""
    copy = examination.material.inputs[input].double().contiguous().clone()
    copy.view(-1)[place] += 1e-6 * max(float(copy.view(-1)[place].abs()), float(copy.abs().amax()) * 2.0**-10)
    values = examination.references(
        examination.material.with_inputs({input: copy}), run, own_decisions(examination, run)
    ).values
    return {n: g for n, g in values.items() if n.endswith(".grad")}


def _changed_elements(examination: Examination) -> dict[str, int]:
    """For each input that may not be finite, the index of the element that is set to NaN or Inf, for every seed."""
    generator = torch.Generator().manual_seed(5)
    names = [n for n in _changeable_inputs(examination) if n not in examination.target.finite]
    sizes = {n: examination.material.inputs[n].numel() for n in names}
    return {n: int(torch.randint(0, size, (1,), generator=generator)) for n, size in sizes.items()}


def _planted(examination: Examination, places: dict[str, int], value: float | None, times: float = 1.0) -> Material:
    """The inputs with the given elements set to `value`; None: to `times` times a large finite number."""
    changed = {}
    for name, place in places.items():
        copy = examination.material.inputs[name].clone(memory_format=torch.contiguous_format)
        copy.view(-1)[place] = times * far(copy) if value is None else value
        changed[name] = copy
    return examination.material.with_inputs(changed)
