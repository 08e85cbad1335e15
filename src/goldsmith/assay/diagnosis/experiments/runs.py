"""Runs the same case in other ways: again, on other memory, with other threads, layouts and magnitudes.

`check` tests whether a run agrees with the first one, and skips tensors that are already wrong there. A diagnosis
judges every result of every run. Which runs are right and which are wrong tells races, stale state, layouts and
scales apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial

import torch
from torch import Tensor

from ...declare.domain import OutsideDomain
from ...execute.memory import LAYOUTS
from ...execute.memory_marks import DIRT_FILL, ZERO_FILL
from ...execute.records import CandidateRun, Material, RunSettings
from ...golden.golden_error import GoldenError
from ...golden.golden_results import GoldenResults
from ...judge import ladder
from ...judge.examination import Examination
from ...probes import decisions
from ...probes.repeats import BACKWARDS
from ..facts.evidence import RunFact
from .isolate import named, order

PROBE = "runs"
LINGERING, _LINGER = "watched afterwards", 0.2  # seconds
ZEROED, OTHERS = "zeroed memory", "other inputs"
FRESH = "fresh start"  # only on request: the caller must have cleared the candidate's state
NUDGED = "nudged"  # slightly changed inputs: errors of rounding change, errors of a formula stay
_NUDGE = 2.0**-6
NUMBERS = "numbers beside"  # buffers are surrounded by numbers instead of NaN; used if a result holds NaN
_OPEN = 0.1  # share of undecidable bounds above which "right" would only mean "not judged"
GOLDEN_SAVED = "golden saved"  # judges only the gradients, since the saved tensors are as wrong as before


def facts(
    examination: Examination,
    *,
    repeats: int = 3,
    only: tuple[str, ...] | None = None,
    into: dict[str, RunFact] | None = None,
    spent: Callable[[], bool] = lambda: False,
) -> dict[str, RunFact]:
    """The result of each other run by name, as long as `spent()` is false.

    Names: "zeroed memory", "numbers beside" (around the buffers; if the first run holds NaN), "second call", "other
    inputs", "back", "repeat 1".., BACKWARDS (if Triton's interpreter ran the kernels), "1 thread" (or "2 threads"),
    "layout transposed".., "layout stride0", "golden saved", "scale 2^12", "scale 2^-12", "offset", "flat". `only`
    selects by prefix. `into` is filled run by run, so that an interrupt keeps the known ones.
    """
    out = {} if into is None else into
    for name, how, material in _plan(examination, repeats, only):
        if only is None or name.startswith(only):
            fact = None if spent() else judged_run(examination, name, how, material)
            out |= {} if fact is None else {name: fact}
    return out


def _plan(
    examination: Examination, repeats: int, only: tuple[str, ...] | None
) -> Iterator[tuple[str, RunSettings, Material]]:
    """The runs, the most informative first. Runs that need the state of an earlier run come after it."""
    first, same = examination.first, examination.material
    if only is not None and FRESH in only:
        yield FRESH, RunSettings(), same
    yield ZEROED, RunSettings(fill=ZERO_FILL), same
    if _nan_in(first, examination.ref):
        yield NUMBERS, RunSettings(neighbour_sign=1), same
    if any(f.probe == "poison" for f in examination.findings) or _nan_in(first, examination.ref):
        yield LINGERING, RunSettings(watch_seconds=_LINGER), same
    yield "second call", RunSettings(fill=DIRT_FILL, fresh=False), same
    yield OTHERS, RunSettings(fresh=False), examination.variant(1)
    yield "back", RunSettings(fresh=False), same
    for i in range(repeats):
        yield f"repeat {i + 1}", RunSettings(), same
    if examination.interpreted:
        yield BACKWARDS, RunSettings(backwards=True), same
    if same.device.type == "cpu":
        threads = 1 if torch.get_num_threads() > 1 else 2
        yield f"{threads} thread{'s' * (threads > 1)}", RunSettings(threads=threads), same
        yield "4 threads", RunSettings(threads=4), same
    golden = {
        f"saved.{n}": examination.ref.values[f"saved.{n}"]
        for n in first.saved
        if f"saved.{n}" in examination.ref.values
    }
    if golden and callable(examination.target.backward):
        yield GOLDEN_SAVED, RunSettings(substitute=golden), same
    tensors = [*same.inputs, *(f"grad_{n}" for n in first.cotangents)]
    for layout in ("contiguous", *LAYOUTS):
        yield f"layout {layout}", RunSettings(layouts=dict.fromkeys(tensors, layout)), same
    sent = {n: c.flatten()[:1].reshape([1] * c.dim()).expand(c.shape) for n, c in first.cotangents.items() if c.numel()}
    if sent:
        yield "layout stride0", RunSettings(cotangents=sent), same
    yield NUDGED, RunSettings(), changed(same, nudge)
    for exponent in (12, -12):
        yield f"scale 2^{exponent}", RunSettings(), changed(same, partial(torch.mul, other=2.0**exponent))
    yield "offset", RunSettings(), changed(same, lambda t: t + 128)
    yield "flat", RunSettings(), changed(same, lambda t: t.flatten()[:1].expand(t.numel()).reshape(t.shape).clone())


def changed(material: Material, change: Callable[[Tensor], Tensor]) -> Material:
    """The case with every float input changed; an input that would become NaN or Inf stays as it is."""

    values = {n: change(t) for n, t in material.inputs.items() if t.is_floating_point() and t.numel()}
    return material.with_inputs({n: t for n, t in values.items() if bool(torch.isfinite(t).all())})


def nudge(t: Tensor) -> Tensor:
    noise = torch.rand(t.shape, generator=torch.Generator().manual_seed(t.numel())) * 2 - 1
    return (t.double() * (1 + _NUDGE * noise.double().to(t.device))).to(t.dtype)


def judged_run(examination: Examination, name: str, how: RunSettings, material: Material) -> RunFact | None:
    """The result of one run; None if it says nothing, because no bound judges its wrong tensors at these values."""
    run = examination.execute(PROBE, name, how, material, look=False)
    if isinstance(run.error, OutsideDomain):
        return None
    if run.error is not None:
        lines = str(run.error).strip().splitlines() or [""]
        error = f"{type(run.error).__name__}: {lines[0][:200]}"
        return RunFact(name, same=False, error=error, text=f"{name}: the {run.phase} raises {error}")
    like_first = material is examination.material and not how.cotangents
    if like_first and examination.same_decisions(run):
        ref = examination.ref
    else:
        try:
            ref = decisions.settle(examination, run, examination.references(material, run))
        except GoldenError:  # the golden has no answer at these values
            return None
    wrong, silent = [], False
    for tensor, kind, got in run.results():
        against = ref.reference(tensor, kind, noise=False)
        if against is None or tensor in examination.target.decisions or (name == GOLDEN_SAVED and kind != "grad"):
            continue
        if got is None and kind == "grad" and not bool(against.bounded.value.count_nonzero()):
            continue
        if not ladder.judge(tensor, got, against, probe=PROBE).ok:
            wrong.append(tensor)
        elif tensor in examination.bad:
            silent |= bool(against.bounded.open.double().mean() > _OPEN)
    if silent and not wrong:
        return None
    first = "" if not wrong else first_in(examination, run, ref, wrong)
    same, apart = (True, 0.0) if not like_first else _compared(examination.first, run)
    text = f"{name}: {'right' if not wrong else ', '.join(wrong) + ' wrong'}"
    text += "" if same else f"; up to {apart:.3g} from the first run"
    if run.late_bytes:
        text += f"; {run.late_bytes} bytes of its own buffers were written after the call had returned"
    nan = _nan_in(run, ref)
    stale = _stale(examination, run, material, wrong) if name == OTHERS else None
    alike = _alike(examination, run, ref, wrong) if name == NUDGED else {}
    computed = _computed(examination, run) if name == ZEROED else ()
    return RunFact(
        name, tuple(wrong), same, apart, text=text, first=first, late=run.late_bytes, nan=nan, stale=stale,
        alike=alike, computed=computed,
    )  # fmt: skip


def _alike(examination: Examination, run: CandidateRun, ref: GoldenResults, wrong: list[str]) -> dict[str, float]:
    """Correlation of each wrong tensor's errors with those of the first run."""
    correlations = {}
    for tensor in wrong:
        a, b = _error(examination.first, examination.ref, tensor), _error(run, ref, tensor)
        if a is not None and b is not None and a.shape == b.shape and float(a.norm()) and float(b.norm()):
            correlations[tensor] = float(a @ b) / float(a.norm() * b.norm())
    return correlations


def _error(run: CandidateRun, ref: GoldenResults, tensor: str) -> Tensor | None:
    got, golden = named(run).get(tensor, ("", None))[1], ref.values.get(tensor)
    if got is None or golden is None or got.shape != golden.shape:
        return None
    return (got.double() - golden.double()).nan_to_num(0, 0, 0).flatten()


def _stale(examination: Examination, run: CandidateRun, material: Material, wrong: list[str]) -> tuple[str, ...]:
    """The input whose old values make the golden give this result; several inputs if none does so alone."""
    got = {n: (k, t) for n, k, t in run.results() if n in wrong}
    for names in _together(examination.material.inputs) if wrong else ():
        old = material.with_inputs({n: examination.material.inputs[n] for n in names})
        try:
            ref = examination.references(old, run)
            against = {n: ref.reference(n, k, noise=False) for n, (k, _) in got.items()}
        except GoldenError:  # lengths of one draw may not fit the offsets of another
            continue
        if all(a is not None and ladder.judge(n, got[n][1], a, probe=PROBE).ok for n, a in against.items()):
            return names
    return ()


def _together(inputs: Mapping[str, Tensor]) -> list[tuple[str, ...]]:
    """Groups of inputs that a candidate may have copied: each alone, all numbers, all indices and masks, all."""
    floating = tuple(n for n, t in inputs.items() if t.is_floating_point())
    others = tuple(n for n in inputs if n not in floating)
    tries = [*((n,) for n in inputs), floating, others, tuple(inputs)]
    return [names for names in dict.fromkeys(tries) if names]


def _computed(examination: Examination, run: CandidateRun) -> tuple[str, ...]:
    """Results that hold a number other than 0 wherever the first run holds NaN and the golden does not."""
    now, names = named(run), []
    for name in _nan_in(examination.first, examination.ref):
        first, got = named(examination.first)[name][1], now.get(name, ("", None))[1]
        if first is not None and got is not None and got.shape == first.shape:
            there = got[torch.isnan(first) & ~torch.isnan(examination.ref.values[name])]
            names += [name] if bool((there != 0).all()) else []
    return tuple(names)


def _nan_in(run: CandidateRun, ref: GoldenResults) -> tuple[str, ...]:
    """Results and stages that hold NaN where the golden does not."""
    names = []
    for name, (_, got) in named(run).items():
        golden = ref.values.get(name)
        if got is None or golden is None or got.shape != golden.shape or not got.is_floating_point():
            continue
        if bool((torch.isnan(got) & ~torch.isnan(golden)).any()):
            names.append(name)
    return tuple(names)


def first_in(examination: Examination, run: CandidateRun, ref: GoldenResults, wrong: list[str]) -> str:
    """The first wrong tensor of this run in the golden's order, stages included."""
    for name in order(ref, run):
        if name in wrong:
            return name
        tensor = run.stages.get(name)
        against = None if tensor is None else ref.reference(name, "stage", noise=False)
        if tensor is None or against is None or name in examination.target.decisions:
            continue
        if not ladder.judge(name, tensor, against, probe=PROBE).ok:
            return name
    return wrong[0]


def _compared(first: CandidateRun, run: CandidateRun) -> tuple[bool, float]:
    """(True if all results are bit-equal, counting NaN as equal to NaN; their largest difference)."""
    mine = {n: t for n, _, t in first.results()}
    same, apart = True, 0.0
    for name, _, tensor in run.results():
        other = mine.get(name)
        if tensor is None or other is None or tensor.shape != other.shape:
            same &= tensor is other
            continue
        a, b = tensor.double(), other.double()
        differs = ~((a == b) | ((a != a) & (b != b)))
        if bool(differs.any()):
            same = False
            away = (a - b).abs()[differs]
            finite = away[torch.isfinite(away)]
            apart = max(apart, float(finite.max()) if finite.numel() else float("inf"))
    return same, apart
