"""Judges outputs, saved tensors and gradients of the plain run by the ladder, after checking the golden."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...core.tracing import TargetError
from ..bounds.bounded import unit_roundoff
from ..declare.returned_values import BARE
from ..execute.records import CandidateRun, Material, RunSettings
from ..golden.golden_error import GoldenError, golden_errors
from ..golden.golden_results import GoldenResults
from ..golden.golden_tensor import GoldenTensor
from ..judge import ladder
from ..judge.examination import Ended, Examination
from ..noise import formula_rounding
from ..report.results import CERTAIN, STATISTICAL, Finding
from ..support.stage_tiles import join_pieces
from ..support.torch_settings import default_dtype
from . import decisions, hints, maps

GROSS = 0.05


def run(examination: Examination) -> None:
    """Make the first run and its references, check the golden, judge every tensor."""
    first = examination.first = examination.execute("values", "values", RunSettings(keep=examination.key), look=False)
    plain = examination.references(examination.material, first)
    _check_golden(examination, plain)
    if first.error is not None:
        examination.look("values", first)
        examination.raised("values", "values", first)
        raise Ended("the candidate raised")
    _check_names(examination, plain)
    _check_structure(examination, plain)
    examination.target.check_names(examination.material.supply, first.names, tuple(plain.bounded))
    examination.ref = decisions.settle(examination, first, plain)
    examination.look("values", first)
    judge(
        examination,
        first,
        examination.ref,
        "values",
        "values",
        noise="ensemble" in examination.selected,
        repeat=RunSettings(),
    )
    if examination.ref.unable:
        text = "the golden cannot run in the declared compute precision, so its honest runs are in float32"
        examination.note("golden_raised", examination.target.name or "", f"{text}: {examination.ref.unable}")
    examination.stages = examination.ref.order
    join_pieces(first.stages, first.covered, examination.ref.values)
    _stages(examination, first)
    if first.called_tracing:
        _debug_outputs(examination)
    _forward_only(examination, first)
    _narrow_results(examination, first)
    maps.draw(examination)


def _check_golden(examination: Examination, plain: GoldenResults) -> None:
    """Stop if the golden is at fault, or raises itself, before the candidate is judged."""
    checked = plain.checked
    examination.problems += checked.problems
    for text in checked.notes:
        examination.note("golden", examination.target.name or "", text)
    if examination.problems:
        raise Ended("the golden is at fault")
    for name, text in checked.mismatches.items():
        examination.find(CERTAIN, "values", name, text, kind="shape")
    if checked.mismatches:
        raise Ended("a result has another shape than the golden's")


def judge(
    examination: Examination,
    run: CandidateRun,
    reference: GoldenResults,
    probe: str,
    label: str,
    *,
    noise: bool,
    repeat: RunSettings | None,
    skip: frozenset[str] = frozenset(),
    change: Callable[[Material], Material] | None = None,
    hinted: bool = True,
) -> set[str]:
    """Judge every result of a run by the ladder; returns the names that fail, and records those of the first run.

    repeat: settings for a fresh seed that confirms an alarm; None: only certain findings count.
    change: what this run did to its input values; the fresh seed's inputs get the same change.
    hinted: whether findings get their hints, each of which takes several runs of the golden.
    """
    decided = set(examination.target.decisions)
    actual = {n: (k, t) for n, k, t in run.results()}
    for name in reference.bounded:
        if name not in actual and name in _expected(examination, run, reference):
            actual[name] = ("grad" if name.endswith(".grad") else "output", None)
    repeats = _Repeats(examination, probe, repeat, change) if repeat is not None and noise else None

    def look(
        name: str, tensor: Tensor | None, against: GoldenTensor, confirm: ladder.Confirm | None
    ) -> tuple[ladder.Judgement, Finding | None]:
        judged = ladder.judge(name, tensor, against, case=examination.label, run=label, probe=probe, confirm=confirm)
        return judged, _far_off(examination, probe, label, name, tensor, against)

    failed = set()
    for name, (kind, tensor) in actual.items():
        if name in decided or name in skip:
            continue
        against = judged_reference(reference, name, kind, noise)
        if against is None:
            continue
        golden = against.bounded.value
        overflows = tensor is not None and not bool(torch.isfinite(tensor).all())
        # the scaling probe checks every failure against the golden itself
        if overflows and not noise and probe != "scaling":
            runs = (reference.honest, reference.unmodified(False))
            against = replace(against, honest=[r[name] for r in runs if name in r])
        if tensor is None and kind == "grad" and not bool(golden.count_nonzero()):
            tensor = torch.zeros_like(examination.material.inputs[name.removesuffix(".grad")])
        reported = _reported_elements(examination, run, name)
        if reported is not None and tensor is not None and reported.shape == golden.shape:
            tensor = torch.where(reported, golden.to(tensor.dtype), tensor)
        if tensor is not None and not (tensor.is_floating_point() or tensor.is_complex()):
            tensor = decisions.determined(examination, reference, label, name, tensor)
        confirm = repeats.of(name, kind) if repeats is not None else None
        judgement, gross = look(name, tensor, against, confirm)
        if kind == "grad" and tensor is not None and (gross is not None or not judgement.ok):
            tensor, excused = _other_side(examination, reference, name, tensor, against)
            if excused:
                judgement, gross = look(name, tensor, against, confirm)
        if hinted and (gross is not None or not judgement.ok):
            hint = hints.hint(examination, run, reference, name, kind, tensor, scaled=False)
            judgement.findings = [hint.added(f) for f in judgement.findings]
            gross = gross if gross is None else hint.added(gross)
        if label != "values":
            judgement.findings = [replace(f, text=f"{f.text} ({label})", run=label) for f in judgement.findings]
        if reported is not None:
            judgement.row = replace(judgement.row, max_error=math.inf, state="bad")
        if gross is not None:
            examination.find(
                STATISTICAL, probe, name, gross.text, measured=gross.measured, limit=gross.limit, kind=gross.kind,
                run=gross.run, values=gross.values,
            )  # fmt: skip
        if examination.absorb(judgement) or reported is not None or gross is not None:
            failed.add(name)
    if label == "values":
        examination.bad |= failed
    else:
        maps.draw_run(examination, run, reference, label, failed)
    return failed


def judged_reference(references: GoldenResults, name: str, kind: str, noise: bool) -> GoldenTensor | None:
    """The reference of tensor `name`, with the size of the terms that may cancel in it."""
    reference = references.reference(name, kind, noise=noise)
    if reference is None:
        return None
    terms = formula_rounding.terms(name, references.bounded, references.leaves)
    if references.material.target.formula != "any":
        return replace(reference, terms=terms)
    return replace(reference, any_formula=True, terms=terms, nearby=lambda: references.nearby[name])


def _far_off(
    examination: Examination, probe: str, label: str, name: str, tensor: Tensor | None, against: GoldenTensor
) -> Finding | None:
    """A finding if another run's result, where its bound is open and it has no ensemble, is wrong by much of its size.

    That is, by more than GROSS of its size, while the plain run's legal orders differ by at most a thousandth of that.
    """
    before = None if label == "values" or against.ensemble else examination.ref.reference(name, against.kind)
    if before is None or tensor is None or probe == "scaling" or tensor.shape != against.bounded.value.shape:
        return None
    if not before.ensemble:  # the budget left no time for an ensemble
        return None
    error = tensor.double() - against.bounded.value
    measured = _rms(error, against.bounded.open)
    size = max(_rms(t.bounded.value) for t in (before, against))  # the golden may vanish in one of the two runs
    if not measured > GROSS * size:
        return None
    noise = max(_rms(m.double() - before.bounded.value, before.bounded.open) for m in before.ensemble)
    if noise > GROSS / 1000 * size:
        return None
    text = f"{name} is off by {measured / size:.3g} of its size, where legal orders of the plain run differ by "
    text += f"{noise / size:.3g} ({label})"
    return Finding(STATISTICAL, probe, name, None, measured / size, GROSS, text, examination.label,
                   kind="gross", run=label)  # fmt: skip


def _rms(t: Tensor, where: Tensor | bool = True) -> float:
    """The RMS of the finite elements; 0 if there are none."""
    finite = torch.isfinite(t) & where
    return float((torch.where(finite, t, 0.0).square().sum() / finite.sum().clamp(min=1)).sqrt())


def _other_side(
    examination: Examination, references: GoldenResults, name: str, tensor: Tensor, against: GoldenTensor
) -> tuple[Tensor, bool]:
    """The gradient with the golden's value where another convention at ties and kinks explains it; and if any."""
    golden, swing = against.bounded, references.swings.get(name)
    if swing is None or tensor.shape != golden.value.shape:
        return tensor, False
    mask = swing.excuses(tensor.double(), golden, against.store, against.ensemble)
    if bool(mask.any()):
        text = f"{int(mask.sum())} of {mask.numel()} elements of {name} lie where the golden has a tie or a kink"
        examination.note("tie", name, f"{text}; there its gradient is one of several, and the candidate's is another")
    return torch.where(mask, golden.value.to(tensor.dtype), tensor), bool(mask.any())


def _reported_elements(examination: Examination, run: CandidateRun, name: str) -> Tensor | None:
    """Elements that hold poison or bytes of a guard band; those probes report them, so the ladder ignores them."""
    sources = (("poison", run.unwritten), ("guard", run.from_bands))
    masks = [masks[name] for probe, masks in sources if probe in examination.selected and name in masks]
    return torch.stack(masks).any(0) if masks else None


class _Repeats:
    """Runs of fresh seeds, each run once and shared by all tensors that ask."""

    def __init__(
        self, examination: Examination, probe: str, how: RunSettings, change: Callable[[Material], Material] | None
    ):
        self.examination, self.probe, self.how, self.change = examination, probe, how, change
        self.runs: dict[int, tuple[CandidateRun, GoldenResults]] = {}

    def of(self, name: str, kind: str) -> ladder.Confirm:
        def confirm(attempt: int) -> tuple[Tensor, GoldenTensor]:
            if attempt not in self.runs:
                self.runs[attempt] = self._make(attempt)
            run, references = self.runs[attempt]
            tensor = dict((n, t) for n, _, t in run.results()).get(name)
            reference = judged_reference(references, name, kind, True)
            if reference is None:
                raise TargetError(f"{name}: the golden has it under one seed and not under another")
            if tensor is None:
                tensor = torch.zeros_like(reference.bounded.value, dtype=reference.store)
            return tensor, reference

        return confirm

    def _make(self, attempt: int) -> tuple[CandidateRun, GoldenResults]:
        material = self.examination.variant(100 + attempt)
        material = material if self.change is None else self.change(material)
        run = self.examination.execute(self.probe, "confirmation", self.how, material, look=False)
        if run.error is not None:
            self.examination.raised(self.probe, "fresh seed", run)
            raise Ended("the candidate raised")
        plain = self.examination.references(material, run)
        return run, decisions.settle(self.examination, run, plain)


def _check_names(examination: Examination, plain: GoldenResults) -> None:
    golden = plain.bounded
    for name in examination.first.outputs:
        if name not in golden:
            names = ", ".join(n for n in golden if not n.endswith(".grad"))
            raise TargetError(
                f"outputs: the candidate returns {name!r}, but the golden has no output or stage of that name; "
                f"it has: {names}"
            )


def _check_structure(examination: Examination, plain: GoldenResults) -> None:
    """Report a tuple, list or dict that holds one tensor, if no outputs are declared and the golden returns the tensor.

    Whoever calls the candidate in the golden's place gets something else than a tensor.
    """
    target, names = examination.target, examination.first.names
    if target.outputs is not None or len(names) != 1 or names[0] in BARE:
        return
    supply = examination.material.ordered({n: plain.leaves[n] for n in examination.material.inputs})
    with golden_errors(), default_dtype(torch.float64), torch.no_grad():
        alone = isinstance(target.bound("golden", supply)(supply), Tensor)
    if alone:
        text = "the candidate returns a tuple, list or dict that holds one tensor, where the golden returns the tensor"
        examination.find(CERTAIN, "values", names[0], text, kind="structure")
        raise Ended("the candidate's result has another structure than the golden's")


def _expected(examination: Examination, run: CandidateRun, reference: GoldenResults) -> set[str]:
    """The results that should exist according to the golden."""
    wanted = (
        {f"{n}.grad" for n in examination.target.wanted_grads(examination.material.inputs)} if run.cotangents else set()
    )
    declared = examination.target.outputs or ()
    wanted |= {f"saved.{n}" if n in examination.target.saved else n for n in declared}
    return wanted if examination.target.outputs is not None else wanted | set(reference.outputs)


def _stages(examination: Examination, run: CandidateRun) -> None:
    """Compare the stages that both name: a difference is a note while every result is right, otherwise a bad row."""
    for name, flaw in run.flaws.items():
        examination.note("stage_tiles", name, f"stage {name} is not judged: {flaw}")
    for name, tensor in run.stages.items():
        reference = examination.ref.reference(name, "stage", noise=False)
        if reference is None:
            known = ", ".join(n for n in examination.ref.bounded if n not in run.outputs)
            examination.note("unknown_stage", name, f"the golden has no stage {name!r}; it has: {known or 'none'}")
        elif name not in examination.target.decisions and name not in run.outputs:
            judgement = ladder.judge(name, tensor, reference, case=examination.label, run="values", probe="values")
            differs = examination.absorb(judgement, failing=False)
            if differs and examination.bad:
                examination.rows[-1] = replace(examination.rows[-1], state="bad")
            elif differs:
                examination.note(
                    "stage_differs", name, f"stage {name} differs from the golden's, while every result is right"
                )


def _debug_outputs(examination: Examination) -> None:
    """Run a kernel that asked `assay.tracing()` once more, with its debug outputs on."""
    traced = examination.execute("values", "debug outputs", RunSettings(debug=True))
    if examination.raised("values", "debug outputs", traced):
        return
    judge(examination, traced, examination.ref, "values", "debug outputs", noise=False, repeat=None)
    fresh = {n: t for n, t in traced.stages.items() if n not in examination.first.stages}
    _stages(examination, CandidateRun(outputs=traced.outputs, stages=fresh))


def _narrow_results(examination: Examination, run: CandidateRun) -> None:
    """Note each result stored narrower than every input, because its rounding covers losses before the store."""
    inputs = [unit_roundoff(t.dtype) for t in examination.material.inputs.values() if t.is_floating_point()]
    for name, tensor in run.outputs.items():
        unit = unit_roundoff(tensor.dtype)
        if inputs and unit > max(inputs):
            dtype = str(tensor.dtype).removeprefix("torch.")
            text = (
                f"{name} is stored in {dtype}, narrower than every input, so it is judged to {unit:.1g} of its value; "
                "smaller losses before the store do not show (they would in a float32 result)"
            )
            examination.note("narrow_result", name, text)


def _forward_only(examination: Examination, run: CandidateRun) -> None:
    """Report outputs without a gradient although the golden's gradient flows from them: the candidate lost it.

    An output marked non-differentiable on purpose looks the same, so the message shows how to declare that.
    """
    target, wanted = examination.target, examination.target.wanted_grads(examination.material.inputs)
    if target.backward != "auto" or not wanted:
        return
    kept = (*(f"saved.{n}" for n in target.saved), *target.decisions)
    visible = {n: t for n, t in run.outputs.items() if n not in kept and t.is_floating_point()}
    able = examination.ref.differentiable if target.golden_backward is None else frozenset(visible)
    lost = [n for n in visible if n in able and n not in run.cotangents]
    try:
        flows = {n: _inputs_reached(examination, run, n, visible) for n in lost}
    except (GoldenError, NotImplementedError):  # the first request for the golden's gradient, and it has none
        text = f"{', '.join(lost)} of the candidate does not require grad, and the golden's backward raises"
        examination.note("forward_only", lost[0], f"{text}: gradients were not judged")
        return
    sources = [n for n in lost if flows[n]]
    if not sources:
        return
    inputs = [n for n in wanted if any(n in flows[source] for source in sources)]
    if not run.cotangents:
        text = (
            f"the candidate returns no gradient: none of its outputs requires grad, while the golden's gradient flows "
            f"from {', '.join(sources)} to {', '.join(inputs)}; a kernel that is forward only is declared with "
            "backward=None"
        )
        examination.find(CERTAIN, "values", f"{inputs[0]}.grad", text, kind="no_gradient")
        return
    for name in sources:
        text = (
            f"{name} of the candidate does not require grad, while the golden's gradient flows from it to "
            f"{', '.join(n for n in wanted if n in flows[name])}; if {name} has none on purpose, declare "
            f"saved=({name!r},), or detach it in the golden"
        )
        examination.find(CERTAIN, "values", name, text, kind="detached")


def _inputs_reached(examination: Examination, run: CandidateRun, name: str, visible: Mapping[str, Tensor]) -> set[str]:
    """The inputs that the golden's gradient of this output alone reaches."""
    sent = {n: torch.zeros_like(t) for n, t in visible.items()}
    sent[name] = examination.material.cotangent(name, visible[name])
    alone = examination.references(examination.material, replace(run, cotangents=sent), examination.ref.decisions)
    wanted = examination.target.wanted_grads(examination.material.inputs)
    return {n for n in wanted if f"{n}.grad" in alone.values and bool(alone.values[f"{n}.grad"].count_nonzero())}
