"""Judges one tensor y against its golden g by four rungs: bound e, noise, patterns, quality.

1 CERTAIN      |y - g| > 1.02 e, or a NaN, Inf or finite number where no rounding can produce it
2 STATISTICAL  |y - g| / e beyond the noise of eight legal orders (noise/noise_floor.py)
3 SYSTEMATIC   errors with a common slope or sign, or a pattern by row, tile, tail or segment (noise/patterns.py)
4 QUALITY      passes rungs 1 to 3, but maximum and rms error exceed twice those of the noisiest honest implementation

Rungs 2 to 4 raise alarms, which become findings only if a fresh seed with a fresh ensemble repeats them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from ..bounds.bounded import SLACK
from ..golden.golden_tensor import GoldenTensor
from ..noise import formula_rounding, patterns
from ..noise.noise_floor import quantiles, ulps
from ..report.results import CERTAIN, QUALITY, STATISTICAL, SYSTEMATIC, Finding, Note, Row
from .locations import locate, looks_like, worst, worst_golden

__all__ = ["GoldenTensor", "Judgement", "judge", "locate"]

_NAN, _NO_NAN = "NaN where the golden is a number", "a number where the golden is NaN"
_INF, _NO_INF = "Inf where the golden is finite", "not Inf where the golden is Inf"
_SPECIAL = {_NAN: "nan", _NO_NAN: "swallowed_nan", _INF: "inf", _NO_INF: "missing_inf"}  # kinds of findings
QUALITY_RATIO = 2.0
_TRUNCATION = 2.0**-12  # relative to the value: 1024 steps of 16 terms that each lose up to 2^-22 toward zero
Confirm = Callable[[int], "tuple[Tensor, GoldenTensor]"]


@dataclass
class Judgement:
    """The result for one tensor: a table row, findings (QUALITY does not make it wrong), and notes (flushes_subnormals,
    cancels, not_proven).
    """

    row: Row
    findings: list[Finding] = field(default_factory=list)
    notes: list[Note] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return all(f.rung == QUALITY for f in self.findings)


def judge(
    name: str,
    actual: Tensor | None,
    ref: GoldenTensor,
    *,
    case: str = "",
    run: str = "values",
    probe: str = "values",
    confirm: Confirm | None = None,
) -> Judgement:
    """Compare `actual` with `ref` rung by rung, and stop at the first rung that has a finding.

    actual: the candidate's tensor as stored; None, if the candidate returned none, gives a CERTAIN finding.
    confirm(attempt) -> (candidate's tensor, golden tensor) on a fresh seed with a fresh ensemble, attempt = 1, 2, ...
    Alarms of rungs 2 to 4 become findings only if this run repeats them; without `confirm`, rungs 2 to 4 are skipped.
    """
    g = ref.bounded.value
    shape = tuple(g.shape)
    if actual is None or tuple(actual.shape) != shape:
        shape_text = "no tensor came" if actual is None else f"shape {list(actual.shape)} came"
        text, kind = f"{name}: {shape_text}, expected shape {list(shape)}", "no_tensor" if actual is None else "shape"
        row = Row(case, run, name, ref.kind, str(ref.store), shape, float("inf"), state="bad")
        return Judgement(row, [Finding(CERTAIN, probe, name, None, None, None, text, case, kind=kind)])
    comparison = _Comparison(name, actual, ref)
    findings = comparison.certain(probe, case)
    if not findings and confirm is not None and ref.noise.usable:
        findings = _alarms(comparison, confirm, probe, case)
    notes = comparison.notes(case)
    return Judgement(comparison.row(case, run, findings, notes), findings, notes)


def stands_out(name: str, actual: Tensor, ref: GoldenTensor) -> bool:
    """Whether any element exceeds the noise limit of the ensemble, without confirmation by a fresh seed."""
    return ref.noise.usable and _beyond(_Comparison(name, actual, ref))


class _Comparison:
    """A candidate's tensor compared with the golden's."""

    def __init__(self, name: str, actual: Tensor, ref: GoldenTensor):
        self.name, self.ref = name, ref
        self.dtype = str(actual.dtype).removeprefix("torch.")
        b = ref.bounded
        self.y = actual.detach().to(device=b.value.device, dtype=torch.float64)
        self.error = (self.y - b.value).abs()
        self.y_finite, self.g_finite = torch.isfinite(self.y), torch.isfinite(b.value)
        both = self.y_finite & self.g_finite
        over = both & (self.error > SLACK * b.bound)
        self.flushed = self.cancelled = torch.zeros_like(over)
        self.any_flushed = self.any_cancelled = False
        if ref.store.is_floating_point and bool(over.any()):
            tiny = torch.finfo(ref.store).smallest_normal
            self.flushed = over & (self.y == 0) & (b.value.abs() < tiny) & ~b.structural_zero
            over = over & ~self.flushed
            self.cancelled = over & self._of_another_formula(over)
            over = over & ~self.cancelled
            self.any_flushed, self.any_cancelled = bool(self.flushed.any()), bool(self.cancelled.any())
        self.over = over
        self.special = self._special()

    @cached_property
    def formula_limit(self) -> Tensor:
        ref = self.ref
        return formula_rounding.limit(ref.bounded, ref.compute, ref.terms, everywhere=ref.any_formula)

    @cached_property
    def cancels(self) -> Tensor:
        """Which elements err within the limit of another formula's rounding."""
        return (self.formula_limit > 0) & (self.error <= self.formula_limit)

    def _of_another_formula(self, elements: Tensor) -> Tensor:
        """Which of these elements err as an equal formula may."""
        if self.ref.nearby is None or not bool((elements & ~self.cancels).any()):
            return self.cancels
        allowed = self.formula_limit + self.ref.nearby()
        return self.cancels | ((self.error <= allowed) & (self.ref.bounded.bound > 0))

    @cached_property
    def beyond(self) -> Tensor:
        """Mask of elements beyond the noise limit, except those that the rounding of an equal formula explains."""
        out = self.ref.noise.excess(self.r) > self.ref.noise.limit()
        explain = self.ref.store.is_floating_point and bool(out.any())
        return out & ~self._of_another_formula(out) if explain else out

    @cached_property
    def r(self) -> Tensor:
        return self.ref.noise.relative(torch.where(self.cancelled, self.ref.bounded.value, self.y))

    @cached_property
    def of_no_formula(self) -> Tensor:
        """`r` without the errors that an equal formula may make."""
        explained = self._of_another_formula(torch.ones_like(self.over))
        return self.ref.noise.relative(torch.where(explained, self.ref.bounded.value, self.y))

    def _special(self) -> dict[str, Tensor]:
        """Masks of NaN and Inf that differ from the golden's, by description."""
        y, b = self.y, self.ref.bounded
        fits: dict[str, Tensor] = {}
        if bool((self.y_finite & self.g_finite).all()):
            return fits
        nan, golden_nan = torch.isnan(y), torch.isnan(b.value)
        honest = self._members_overflow()
        if self.ref.store.is_floating_point:
            largest = torch.finfo(self.ref.store).max
            overflows = torch.isinf(y) & (y.sign() == b.value.sign()) & (b.value.abs() + b.bound >= largest)
        else:
            overflows = torch.zeros_like(nan)
        unbounded = torch.isinf(b.value) & b.open  # inf - inf is one rounding away
        fits[_NAN] = nan & ~golden_nan & ~honest & ~unbounded
        fits[_NO_NAN] = ~nan & golden_nan & ~b.open
        fits[_INF] = torch.isinf(y) & self.g_finite & ~overflows & ~honest
        golden_inf = torch.isinf(b.value) & ~b.open
        fits[_NO_INF] = golden_inf & ~nan & (y != b.value)
        return {text: mask for text, mask in fits.items() if bool(mask.any())}

    def _members_overflow(self) -> Tensor:
        """Mask of elements where an honest run in the compute precision is NaN or Inf; the candidate may be too."""
        out = torch.zeros_like(self.y_finite)
        for member in (*self.ref.ensemble, *self.ref.honest):
            out = out | ~torch.isfinite(member)
        return out

    # rung 1

    def certain(self, probe: str, case: str) -> list[Finding]:
        name, b = self.name, self.ref.bounded
        findings = []
        for text, mask in self.special.items():
            place = locate(name, mask, self.ref)
            sentence = f"{name} has {text}: {place.text}; {worst(mask, self.error, self.y, self.ref)}"
            findings.append(Finding(CERTAIN, probe, name, place, None, None, sentence, case, kind=_SPECIAL[text]))
        if bool(self.over.any()):
            place = locate(name, self.over, self.ref)
            ratio = self.ratio
            looks = [f"it looks like {t}" if t.startswith("the golden") else t for t in looks_like(self.y, self.ref)]
            zeros = self.over & b.structural_zero
            if bool(zeros.any()):
                looks.insert(0, f"{int(zeros.sum())} of them are nonzero where only 0 is possible")
            times = "" if ratio == float("inf") else f" up to {ratio:.3g} times"
            words = [f"{name} exceeds its rounding bound{times}: {place.text}", *looks]
            sentence = "; ".join([*words, worst(self.over, self.error / b.bound, self.y, self.ref)])
            golden = worst_golden(self.over, self.error / b.bound, self.ref)
            at = {"zeros": "all zeros" in looks, "golden": golden}
            findings.append(Finding(CERTAIN, probe, name, place, ratio, SLACK, sentence, case, kind="bound", values=at))
        return findings

    @cached_property
    def ratio(self) -> float:
        """max |y - g| / e over finite elements whose bound is not open; 0 / 0 counts as 0."""
        b = self.ref.bounded
        keep = self.y_finite & self.g_finite & ~b.open & (self.error > 0) & ~self.flushed & ~self.cancelled
        return float(torch.where(keep, self.error / b.bound, 0.0).max()) if keep.numel() else 0.0

    # the table

    def notes(self, case: str) -> list[Note]:
        out, b = [], self.ref.bounded
        if self.any_flushed:
            text = f"{self.name}: {int(self.flushed.sum())} subnormal results are flushed to 0"
            out.append(Note("flushes_subnormals", self.name, text, case))
        if self.any_cancelled:
            off, most = float(self.error[self.cancelled].max()), float(b.value[self.g_finite].abs().max())
            text = (
                f"{self.name}: {int(self.cancelled.sum())} elements differ by up to {off:.2g} where the golden is 0 or"
            )
            text += f" small next to {most:.2g}: another formula, whose sums cancel there, may round so"
            out.append(Note("cancels", self.name, text, case))
        share = float(b.open.double().mean()) if b.open.numel() else 0.0
        if b.notes and share:
            text = f"{self.name}: not proven: {', '.join(b.notes)} has no error rule, so rung 1 is skipped"
            out.append(Note("not_proven", self.name, text, case))
        elif share:
            text = (
                f"{self.name}: not proven at {100 * share:.3g} % of the elements: ill-conditioned, so rung 1 skips them"
            )
            out.append(Note("not_proven", self.name, text, case))
        return out

    def row(self, case: str, run: str, findings: list[Finding], notes: list[Note]) -> Row:
        ref, noise = self.ref, self.ref.noise
        finite = self.error[self.y_finite & self.g_finite]
        row: dict[str, Any] = {"max_error": float(finite.max()) if finite.numel() else 0.0}
        row["max_over_bound"] = self.ratio
        if self.special:  # a wrong NaN or Inf is farther from the golden than any number
            row |= {"max_error": float("inf"), "max_over_bound": float("inf")}
        if ref.store.is_floating_point and finite.numel():
            steps = ulps(self.y, ref.bounded.value, ref.store)
            row["ulp_p50"], row["ulp_p99"] = quantiles(steps, (0.5, 0.99))
            row["ulp_max"] = float(steps.max()) if steps.numel() else 0.0
        if noise.usable:
            rms = float(self.r.double().square().sum() / noise.count) ** 0.5
            row["rms_over_noise"] = rms / noise.rms if noise.rms else None
            bias = patterns.slope(self.r, noise)
            row |= {"slope": bias.value, "slope_z": bias.z}
        rungs = {f.rung for f in findings}
        if rungs:
            state = "quality" if rungs == {QUALITY} else "bad"
        elif bool(ref.bounded.open.all()) and ref.bounded.open.numel() and not noise.usable:
            state = "not judged"
        else:
            state = "note" if notes else "ok"
        return Row(case, run, self.name, ref.kind, self.dtype, tuple(self.y.shape), **row, state=state)


# rungs 2 to 4


def _alarms(comparison: _Comparison, confirm: Confirm, probe: str, case: str) -> list[Finding]:
    again: _Comparison | None = None

    def repeats() -> _Comparison:
        nonlocal again
        if again is None:
            actual, ref = confirm(1)
            again = _Comparison(comparison.name, actual, ref)
        return again

    for rung in (_statistical, _systematic, _quality):
        finding = rung(comparison, repeats, probe, case)
        if finding is not None:
            return [finding]
    return []


def _beyond(comparison: _Comparison) -> bool:
    return bool(comparison.beyond.any())


def _statistical(comparison: _Comparison, repeats: Callable[[], _Comparison], probe: str, case: str) -> Finding | None:
    if not _beyond(comparison) or not _repeated(repeats, _beyond):
        return None
    if comparison.ref.tensor_cores and _truncated_products(comparison):
        text = (
            f"{comparison.name} is biased toward zero, like products that tensor cores truncate; "
            "a fresh seed repeats it"
        )
        return Finding(
            QUALITY,
            probe,
            comparison.name,
            None,
            patterns.slope(comparison.r, comparison.ref.noise).value,
            None,
            text,
            case,
            kind="quality",
        )
    excess, limit = comparison.ref.noise.excess(comparison.r), comparison.ref.noise.limit()
    bad = comparison.beyond
    place = locate(comparison.name, bad, comparison.ref)
    measured = float(excess[bad].max())
    looks = "".join(
        f"; it looks like {t}" for t in looks_like(comparison.y, comparison.ref) if t.startswith("the golden")
    )
    text = (
        f"{comparison.name} errs by {measured:.3g} times the noise of honest implementations (limit {limit:.3g}): "
        f"{place.text}{looks}; {worst(bad, excess.double(), comparison.y, comparison.ref)}; a fresh seed repeats it"
    )
    return Finding(STATISTICAL, probe, comparison.name, place, measured, limit, text, case, kind="noise")


def _truncated_products(comparison: _Comparison) -> bool:
    """Whether a slope toward zero explains the whole alarm: without the slope, no element exceeds the limit."""
    noise = comparison.ref.noise
    bias = patterns.slope(comparison.r, noise)
    rest = noise.excess(comparison.r - bias.value * noise.signal)
    return -_TRUNCATION < bias.value < 0 and bool((rest <= noise.limit()).all())


def _systematic(comparison: _Comparison, repeats: Callable[[], _Comparison], probe: str, case: str) -> Finding | None:
    first_patterns = _patterns(comparison)
    if not first_patterns:
        return None
    fresh = repeats()
    if not fresh.ref.noise.usable:
        return None
    repeated = {p.key for p in _patterns(fresh)}
    same = [p for p in first_patterns if p.key in repeated]
    if not same:
        return None
    toward_zero = (
        comparison.ref.tensor_cores and -_TRUNCATION < patterns.slope(comparison.r, comparison.ref.noise).value < 0
    )
    rung = QUALITY if toward_zero else SYSTEMATIC
    text = f"{comparison.name}: {'; '.join(p.text for p in same[:3])}; a fresh seed repeats it"
    shown = {"patterns": [str(p.key[0]) for p in same[:3]]}
    return Finding(
        rung, probe, comparison.name, None, same[0].measured, same[0].limit, text, case, kind="pattern", values=shown
    )


def _quality(comparison: _Comparison, repeats: Callable[[], _Comparison], probe: str, case: str) -> Finding | None:
    def ratios(h: _Comparison) -> tuple[float, float]:
        """Maximum and rms error as multiples of the noisiest ensemble member's; includes the rounding of the store."""
        noise = h.ref.noise
        quantum = float(noise.quantum.double().square().sum() / max(noise.count, 1)) ** 0.5
        rms = float(h.r.double().square().sum() / max(noise.count, 1)) ** 0.5
        floor = max(noise.rms, quantum, 1e-30)
        return float(h.r.abs().max()) / max(noise.largest, floor), rms / floor

    def worse(h: _Comparison) -> bool:
        return min(ratios(h)) > QUALITY_RATIO

    if not worse(comparison) or not _repeated(repeats, worse):
        return None
    top, rms = ratios(comparison)
    text = (
        f"{comparison.name} is within its bounds, but its error is {top:.2g} times (maximum) and {rms:.2g} times (rms) "
        f"that of the noisiest honest implementation; a fresh seed repeats it"
    )
    return Finding(QUALITY, probe, comparison.name, None, min(top, rms), QUALITY_RATIO, text, case, kind="quality")


def _repeated(repeats: Callable[[], _Comparison], test: Callable[[_Comparison], bool]) -> bool:
    fresh = repeats()
    return fresh.ref.noise.usable and test(fresh)


def _patterns(comparison: _Comparison) -> list[patterns.Pattern]:
    ref = comparison.ref
    groups = ref.groups if comparison.r.dim() else None
    seen = patterns.error_patterns(comparison.r, ref.noise, groups)
    if seen and ref.nearby is not None:
        return patterns.error_patterns(comparison.of_no_formula, ref.noise, groups)
    return seen
