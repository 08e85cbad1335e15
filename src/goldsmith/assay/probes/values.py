"""Outputs, saved tensors and gradients of the plain run, held to the ladder; the golden is checked first."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...core.tracing import TargetError
from ..bounds.bounded import unit_roundoff
from ..execute.run import CandidateRun, Material, RunSettings
from ..golden.golden_error import GoldenError
from ..golden.golden_results import GoldenResults
from ..golden.golden_tensor import GoldenTensor
from ..judge import ladder
from ..judge.examination import Ended, Examination
from ..noise import formula_rounding
from ..report.results import CERTAIN, STATISTICAL, Finding
from . import decisions, hints, maps

GROSS = 0.05


def run(examination: Examination) -> None:
    """Make the first run and its references, check the golden, judge every tensor."""
    first = examination.first = examination.execute("values", "values", look=False)
    plain = examination.references(examination.material, first)
    _golden_first(examination, plain)
    if first.error is not None:
        examination.look("values", first)
        examination.raised("values", "values", first)
        raise Ended("the candidate raised")
    _names_exist(examination, plain)
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
    _stages(examination, first)
    if first.asked:
        _debug_outputs(examination)
    _forward_only(examination, first)
    _narrow_results(examination, first)
    maps.draw(examination)


def _golden_first(examination: Examination, plain: GoldenResults) -> None:
    """Nobody is accused by a golden at fault, nor of raising where it raises itself."""
    checked = plain.self_check()
    examination.problems += checked.problems
    for text in checked.notes:
        examination.note("golden", examination.target.name or "", text)
    if examination.problems:
        raise Ended("the golden is at fault")


def judge(
    examination: Examination,
    done: CandidateRun,
    reference: GoldenResults,
    probe: str,
    label: str,
    *,
    noise: bool,
    repeat: RunSettings | None,
    skip: frozenset[str] = frozenset(),
    change: Callable[[Material], Material] | None = None,
) -> set[str]:
    """Hold every result of a run to the ladder; returns the names that fail, and keeps those of the first run.

    repeat: how to run again on a fresh seed to confirm an alarm; None: only what is certain counts.
    change: what this run did to the values of its inputs, to be done to the fresh ones as well.
    """
    decided = set(examination.target.decisions)
    got = {n: (k, t) for n, k, t in done.results()}
    for name in reference.bounded:
        if name not in got and name in _expected(examination, done, reference):
            got[name] = ("grad" if name.endswith(".grad") else "output", None)
    repeats = _Repeats(examination, probe, repeat, change) if repeat is not None and noise else None

    def look(
        name: str, tensor: Tensor | None, against: GoldenTensor, confirm: ladder.Confirm | None
    ) -> tuple[ladder.Judgement, Finding | None]:
        judged = ladder.judge(name, tensor, against, case=examination.label, run=label, probe=probe, confirm=confirm)
        return judged, _far_off(examination, probe, label, name, tensor, against)

    failed = set()
    for name, (kind, tensor) in got.items():
        if name in decided or name in skip:
            continue
        against = _against(reference, name, kind, noise)
        if against is None:
            continue
        golden = against.bounded.value
        overflows = tensor is not None and not bool(torch.isfinite(tensor).all())
        if overflows and not noise and probe != "scaling":  # which asks that of every failure
            runs = (reference.honest, reference.unmodified(False))
            against = replace(against, honest=[r[name] for r in runs if name in r])
        if tensor is None and kind == "grad" and not bool(golden.count_nonzero()):
            tensor = torch.zeros_like(examination.material.inputs[name.removesuffix(".grad")])
        told = _told(examination, done, name)
        if told is not None and tensor is not None and told.shape == golden.shape:
            tensor = torch.where(told, golden.to(tensor.dtype), tensor)
        confirm = repeats.of(name, kind) if repeats is not None else None
        judgement, gross = look(name, tensor, against, confirm)
        if kind == "grad" and tensor is not None and (gross is not None or not judgement.ok):
            tensor, excused = _other_side(examination, reference, name, tensor, against)
            if excused:
                judgement, gross = look(name, tensor, against, confirm)
        if gross is not None or not judgement.ok:
            hint = hints.hint(examination, done, reference, name, kind, tensor, scaled=probe == "scaling")
            judgement.findings = [replace(f, text=f.text + hint) for f in judgement.findings]
            gross = gross if gross is None else replace(gross, text=gross.text + hint)
        if label != "values":
            judgement.findings = [replace(f, text=f"{f.text} ({label})") for f in judgement.findings]
        if told is not None:
            judgement.row = replace(judgement.row, max_error=math.inf, state="bad")
        if gross is not None:
            examination.find(STATISTICAL, probe, name, gross.text, measured=gross.measured, limit=gross.limit)
        if examination.absorb(judgement) or told is not None or gross is not None:
            failed.add(name)
    if label == "values":
        examination.bad |= failed
    else:
        maps.draw_run(examination, done, reference, label, failed)
    return failed


def _against(references: GoldenResults, name: str, kind: str, noise: bool) -> GoldenTensor | None:
    """What tensor `name` is judged by, with the size of what may cancel in it."""
    found = references.reference(name, kind, noise=noise)
    terms = 0.0 if found is None else formula_rounding.terms(name, references.bounded, references.leaves)
    return found if found is None else replace(found, terms=terms)


def _far_off(
    examination: Examination, probe: str, label: str, name: str, tensor: Tensor | None, against: GoldenTensor
) -> Finding | None:
    """Another run's result, judged without an ensemble, where its bound is open: is it wrong by much of its size?

    That is, by more than GROSS of it, where the plain run's legal orders differ by a thousandth of that at most.
    """
    before = None if label == "values" or against.ensemble else examination.ref.reference(name, against.kind)
    if before is None or tensor is None or probe == "scaling" or tensor.shape != against.bounded.value.shape:
        return None
    if not before.ensemble:  # there was no time for it
        return None
    size = max(_rms(before.bounded.value), _rms(against.bounded.value))  # the golden may vanish in one of the two runs
    noise = max((_rms((m.double() - before.bounded.value)[before.bounded.open]) for m in before.ensemble), default=0.0)
    measured = _rms((tensor.double() - against.bounded.value)[against.bounded.open])
    if not measured > GROSS * size or noise > GROSS / 1000 * size:
        return None
    text = f"{name} is off by {measured / size:.3g} of its size, where legal orders of the plain run differ by "
    text += f"{noise / size:.3g} ({label})"
    return Finding(STATISTICAL, probe, name, None, measured / size, GROSS, text, examination.label)


def _rms(t: Tensor) -> float:
    """Of the finite elements; 0 where there are none."""
    finite = t[torch.isfinite(t)]
    return float(finite.square().mean().sqrt()) if finite.numel() else 0.0


def _other_side(
    examination: Examination, references: GoldenResults, name: str, tensor: Tensor, against: GoldenTensor
) -> tuple[Tensor, bool]:
    """A gradient with the golden's own in place of what another convention at ties and kinks explains."""
    golden, swing = against.bounded, references.swings.get(name)
    if swing is None or tensor.shape != golden.value.shape:
        return tensor, False
    mask = swing.excuses(tensor.double(), golden, against.store, against.ensemble)
    if bool(mask.any()):
        text = f"{int(mask.sum())} of {mask.numel()} elements of {name} lie where the golden has a tie or a kink"
        examination.note("tie", name, f"{text}; there its gradient is one of several, and the candidate's is another")
    return torch.where(mask, golden.value.to(tensor.dtype), tensor), bool(mask.any())


def _told(examination: Examination, done: CandidateRun, name: str) -> Tensor | None:
    """Elements that hold poison or the bytes of a band: those probes have told of them; the ladder looks past them."""
    told = (("poison", done.unwritten), ("guard", done.from_guards))
    masks = [masks[name] for probe, masks in told if probe in examination.selected and name in masks]
    return torch.stack(masks).any(0) if masks else None


class _Repeats:
    """Fresh seeds of the same run, each made once for all tensors that ask."""

    def __init__(
        self, examination: Examination, probe: str, how: RunSettings, change: Callable[[Material], Material] | None
    ):
        self.examination, self.probe, self.how, self.change = examination, probe, how, change
        self.made: dict[int, tuple[CandidateRun, GoldenResults]] = {}

    def of(self, name: str, kind: str) -> ladder.Confirm:
        def confirm(attempt: int) -> tuple[Tensor, GoldenTensor]:
            if attempt not in self.made:
                self.made[attempt] = self._make(attempt)
            done, references = self.made[attempt]
            tensor = dict((n, t) for n, _, t in done.results()).get(name)
            reference = _against(references, name, kind, True)
            if reference is None:
                raise TargetError(f"{name}: the golden has it under one seed and not under another")
            if tensor is None:
                tensor = torch.zeros_like(reference.bounded.value, dtype=reference.store)
            return tensor, reference

        return confirm

    def _make(self, attempt: int) -> tuple[CandidateRun, GoldenResults]:
        material = self.examination.variant(100 + attempt)
        material = material if self.change is None else self.change(material)
        done = self.examination.execute(self.probe, "confirmation", self.how, material, look=False)
        if done.error is not None:
            self.examination.raised(self.probe, "fresh seed", done)
            raise Ended("the candidate raised")
        plain = self.examination.references(material, done)
        return done, decisions.settle(self.examination, done, plain)


def _names_exist(examination: Examination, plain: GoldenResults) -> None:
    golden = plain.bounded
    for name in examination.first.outputs:
        if name not in golden:
            made = ", ".join(n for n in golden if not n.endswith(".grad"))
            raise TargetError(
                f"outputs: the candidate returns {name!r}, the golden has no output or stage of that name; "
                f"it has: {made}"
            )


def _expected(examination: Examination, done: CandidateRun, reference: GoldenResults) -> set[str]:
    """Results that the golden says should be there."""
    wanted = (
        {f"{n}.grad" for n in examination.target.wanted_grads(examination.material.inputs)}
        if done.cotangents
        else set()
    )
    declared = examination.target.outputs or ()
    wanted |= {f"saved.{n}" if n in examination.target.saved else n for n in declared}
    return wanted if examination.target.outputs is not None else wanted | set(reference.outputs)


def _stages(examination: Examination, done: CandidateRun) -> None:
    """Stages that both name: a difference is a note while every result is right, else where the fault begins."""
    for name, tensor in done.stages.items():
        reference = examination.ref.reference(name, "stage", noise=False)
        if reference is None:
            known = ", ".join(n for n in examination.ref.bounded if n not in done.outputs)
            examination.note("unknown_stage", name, f"the golden has no stage {name!r}; it has: {known or 'none'}")
        elif name not in examination.target.decisions and name not in done.outputs:
            judgement = ladder.judge(name, tensor, reference, case=examination.label, run="values", probe="values")
            differs = examination.absorb(judgement, failing=False)
            if differs and examination.bad:
                examination.rows[-1] = replace(examination.rows[-1], state="bad")
            elif differs:
                examination.note(
                    "stage_differs", name, f"stage {name} differs from the golden's, while every result is right"
                )


def _debug_outputs(examination: Examination) -> None:
    """A kernel that asked `assay.tracing()` is run once more with its debug outputs on."""
    traced = examination.execute("values", "debug outputs", RunSettings(debug=True))
    if examination.raised("values", "debug outputs", traced):
        return
    judge(examination, traced, examination.ref, "values", "debug outputs", noise=False, repeat=None)
    fresh = {n: t for n, t in traced.stages.items() if n not in examination.first.stages}
    _stages(examination, CandidateRun(outputs=traced.outputs, stages=fresh))


def _narrow_results(examination: Examination, done: CandidateRun) -> None:
    """Say it where a result is stored narrower than any input: its rounding covers what is lost before it."""
    inputs = [unit_roundoff(t.dtype) for t in examination.material.inputs.values() if t.is_floating_point()]
    for name, tensor in done.outputs.items():
        unit = unit_roundoff(tensor.dtype)
        if inputs and unit > max(inputs):
            dtype = str(tensor.dtype).removeprefix("torch.")
            text = (
                f"{name} is stored in {dtype}, narrower than every input, so it is judged to {unit:.1g} of its value; "
                "what is lost below that before the store does not show (it would in a float32 result)"
            )
            examination.note("narrow_result", name, text)


def _forward_only(examination: Examination, done: CandidateRun) -> None:
    """An output that autograd cannot follow, while the golden's gradient flows from it: the candidate lost it.

    One that was marked non-differentiable on purpose looks the same, so the sentence says how that is declared.
    """
    target, wanted = examination.target, examination.target.wanted_grads(examination.material.inputs)
    if target.backward != "auto" or not wanted:
        return
    kept = (*(f"saved.{n}" for n in target.saved), *target.decisions)
    visible = {n: t for n, t in done.outputs.items() if n not in kept and t.is_floating_point()}
    able = examination.ref.differentiable if target.golden_backward is None else frozenset(visible)
    lost = [n for n in visible if n in able and n not in done.cotangents]
    try:
        flows = {n: _reached(examination, done, n, visible) for n in lost}
    except (GoldenError, NotImplementedError):  # nobody asked for the golden's gradient so far, and it has none
        text = f"{', '.join(lost)} of the candidate does not require grad, and the golden's backward raises"
        examination.note("forward_only", lost[0], f"{text}: gradients were not judged")
        return
    sources = [n for n in lost if flows[n]]
    if not sources:
        return
    inputs = [n for n in wanted if any(n in flows[source] for source in sources)]
    if not done.cotangents:
        text = (
            f"the candidate returns no gradient: none of its outputs requires grad, while the golden's gradient flows "
            f"from {', '.join(sources)} to {', '.join(inputs)}; a kernel that is forward only is declared with "
            "backward=None"
        )
        examination.find(CERTAIN, "values", f"{inputs[0]}.grad", text)
        return
    for name in sources:
        text = (
            f"{name} of the candidate does not require grad, while the golden's gradient flows from it to "
            f"{', '.join(n for n in wanted if n in flows[name])}; if {name} has none on purpose, declare "
            f"saved=({name!r},), or detach it in the golden"
        )
        examination.find(CERTAIN, "values", name, text)


def _reached(examination: Examination, done: CandidateRun, name: str, visible: Mapping[str, Tensor]) -> set[str]:
    """The inputs that the golden's gradient of this output alone reaches."""
    sent = {n: torch.zeros_like(t) for n, t in visible.items()}
    sent[name] = examination.material.cotangent(name, visible[name])
    alone = examination.references(examination.material, replace(done, cotangents=sent), examination.ref.decisions)
    wanted = examination.target.wanted_grads(examination.material.inputs)
    return {n for n in wanted if f"{n}.grad" in alone.values and bool(alone.values[f"{n}.grad"].count_nonzero())}
