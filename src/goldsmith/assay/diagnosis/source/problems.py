"""Problems: cases as the child processes get them, arguments with the golden's values and bounds."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from ....core.tracing import TargetError
from ...declare.case import Case
from ...execute.memory import LAYOUTS
from ...execute.records import CandidateRun, Material, RunSettings
from ...gate.isolation.wire import request_of
from ...gate.tricks.scalars import other_scalars
from ...golden.golden_error import GoldenError
from ...golden.golden_results import GoldenResults
from ...judge.examination import Examination
from ...probes.repeats import BACKWARDS
from ...probes.values import judged_reference
from .children.comparison import wrong_share

_SALT = 77_001  # of draws that neither the search nor the check makes
_LARGER, _TIMES = 4, 6  # sizes that are also tried above the declared ones, and how far above
_MOST_ELEMENTS = 1 << 16
STRAY = ("overrun", "stray_read")  # kinds of findings about memory that is not the candidate's
Problem = dict[str, object]


def _in_order(tensor: Tensor, descending: bool = False) -> Tensor:
    """The numbers times 8 in order along the last axis, so that a running maximum rises in every block, or never."""
    return 8 * (tensor.sort(-1, descending=descending).values if tensor.dim() else tensor)


def _spiked(tensor: Tensor) -> Tensor:
    """One number in eight times 32."""
    chosen = torch.rand(tensor.shape, generator=torch.Generator().manual_seed(_SALT)) < 1 / 8
    return torch.where(chosen.to(tensor.device), 32 * tensor, tensor)


_FORMS: dict[str, Callable[[Tensor], Tensor]] = {  # of all real inputs
    "inputs times 8": lambda t: t * 8,
    "inputs times 1/8": lambda t: t / 8,
    "inputs times -1": lambda t: -t,
    "ascending inputs": _in_order,
    "descending inputs": partial(_in_order, descending=True),
    "inputs with spikes": _spiked,
}


@dataclass(frozen=True)
class Further:
    """A problem beyond the failing case.

    what    in a few words
    beside  "below" or "above" if one of its sizes lies there, "numbers" if its scalars are others than the declared
            ones, "" if all lie between these
    """

    problem: Problem
    what: str
    sizes: Mapping[str, object]
    beside: str = ""


def problem(
    material: Material, run: CandidateRun, golden: GoldenResults, layouts: Mapping[str, str] | None = None,
    backwards: bool = False,
) -> Problem | None:  # fmt: skip
    """One case as a mutant gets it: arguments, and the golden's values with their bounds; None without any.

    Stages that are right in this run must stay right; the others are compared as well.
    """
    values = {}
    for name, kind, _ in run.results():
        if name.removeprefix("saved.") in material.target.decisions:
            continue
        against = _expected(golden, name, kind)
        if against is not None:
            values[name] = against
    settings = RunSettings(cotangents=dict(run.cotangents), layouts=dict(layouts or {}), backwards=backwards)
    stages = _stages(run, golden)
    return {"run": request_of(material, settings), "golden": values, "stages": stages} if values else None


def _stages(run: CandidateRun, golden: GoldenResults) -> dict[str, tuple[tuple[Tensor, Tensor], bool]]:
    """The golden's values with their bounds, and whether the run's stages are right."""
    stages = {}
    for name, tensor in run.stages.items():
        against = _expected(golden, name, "stage")
        if against is not None and tensor is not None and name not in golden.material.target.decisions:
            stages[name] = against, not wrong_share(tensor, *against)
    return stages


def _expected(golden: GoldenResults, name: str, kind: str) -> tuple[Tensor, Tensor] | None:
    """The golden's value, and the error that a check allows; where no bound is proven, the limit of the runs' noise."""
    against = judged_reference(golden, name, kind, False)
    if against is None:
        return None
    bound = against.allowed
    if bool(torch.isinf(bound).any()):
        noise = replace(against, ensemble=[run[name] for run in golden.ensemble if name in run]).noise
        if noise.usable:
            noisy = torch.isinf(bound) & noise.judged
            bound = torch.where(noisy, noise.limit() * noise.scale.double() * noise.unit, bound)
    return against.bounded.value.cpu(), bound.cpu()


def of_examination(examination: Examination) -> Problem | None:
    """The failing case of an examination; None if nothing can be compared.

    If only another order of programs is wrong, the case with that order.
    """
    first, ref, material = examination._first, examination._ref, examination.material
    try:
        if first is None or ref is None or first.error is not None:
            return of_material(material)
        return problem(material, first, ref, backwards=not examination.bad and _needs_order(examination))
    except GoldenError:
        return None


def _needs_order(examination: Examination) -> bool:
    return any(f.run == BACKWARDS for f in examination.findings)


def of_material(material: Material) -> Problem | None:
    """The golden's values for arguments that no candidate has run on."""
    run = stand_in_run(material)
    return problem(material, run, GoldenResults(material, run))


def with_layouts(examination: Examination) -> Iterator[Problem]:
    """The failing case with all inputs in each other layout."""
    material = examination.material
    run = stand_in_run(material)
    golden = GoldenResults(material, run)
    for layout in LAYOUTS:
        found = problem(material, run, golden, dict.fromkeys(material.inputs, layout))
        if found is not None:
            yield found


def stand_in_run(material: Material) -> CandidateRun:
    """A run that returns the golden's values, for a candidate that raised and so returned nothing."""
    golden, target = GoldenResults(material, CandidateRun()), material.target
    values = golden.evaluate(golden.leaves, gradients=False)
    dtype = next((t.dtype for t in material.inputs.values() if t.is_floating_point()), None)
    outputs = {n: values[n] for n in golden.outputs}
    outputs = {n: t.to(dtype) if dtype is not None and t.is_floating_point() else t for n, t in outputs.items()}
    run = CandidateRun(names=tuple(n.removeprefix("saved.") for n in outputs), outputs=outputs)
    wanted = target.wanted_grads(material.inputs) if target.backward is not None else ()
    if wanted:
        sent = {n: t for n, t in outputs.items() if not n.startswith("saved.")}
        run.cotangents = {n: material.cotangent(n, t) for n, t in sent.items() if t.is_floating_point()}
        run.grads = {f"{n}.grad": material.inputs[n].detach() for n in wanted}
    return run


def further_problems(examination: Examination) -> Iterator[Further]:
    """The case with inputs of other magnitudes and signs, sizes between declared ones, larger and smaller ones, and
    other scalars: a number of the case that stands in the source mends this case alone.

    Nothing for a target with decisions: which of them are legal depends on the candidate.
    """
    target = examination.target
    if target.decisions:
        return
    materials: list[tuple[Material, str, str]] = []
    for what, change in _FORMS.items():
        inputs = examination.material.inputs
        formed = {n: change(t) if t.is_floating_point() and t.numel() else t for n, t in inputs.items()}
        changed = replace(examination.material, inputs=formed)
        materials += [(changed, what, "")] if examination.admits(changed) else []
    dtype = examination.dtype or target.dtypes[0]
    numbers = ((case, "numbers") for case in other_scalars(target.cases, dtype, examination.seed))
    for case, beside in (*_other_sizes(target.cases, examination.case), *numbers):
        try:
            drawn = Examination(
                target, case, examination.dtype, examination.device, examination.seed, frozenset(("values",)), case.name
            ).material
        except Exception:  # noqa: BLE001 - a size that the case's function does not take
            continue
        if sum(t.numel() for t in drawn.inputs.values()) <= _MOST_ELEMENTS:
            materials.append((drawn, "other sizes", beside))
    for material, what, beside in materials:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                found = of_material(material)
        except (GoldenError, TargetError, ValueError, RuntimeError):
            continue
        if found is not None:
            yield Further(found, what, material.sizes, beside)


def _other_sizes(cases: tuple[Case, ...], failing: Case) -> Iterator[tuple[Case, str]]:
    """Cases whose sizes lie between declared ones, and some with a size "below" or "above" them.

    A block that is made so large that it holds every declared row passes at all declared sizes; a multiple of the
    largest one shows it, or shows that much more is computed.
    """
    chosen = random.Random(_SALT)
    kin = [c for c in cases if c.draw is failing.draw and c.sizes] or [c for c in cases if c.sizes]
    if not kin:
        return
    first = kin[0]
    ranges = {
        name: (min(values), max(values))
        for name in first.sizes
        if (values := [v for c in kin if isinstance(v := c.sizes.get(name), int) and not isinstance(v, bool)])
    }
    known = [dict(c.sizes) for c in kin]
    for number in range(4):
        sizes = {**first.sizes, **{n: chosen.randint(low, high) for n, (low, high) in ranges.items()}}
        if sizes not in known:
            known.append(sizes)
            yield replace(first, sizes=sizes, name=f"{first.draw.__name__}{number}", salt=_SALT + number), ""
    base = dict(kin[-1].sizes)
    for name, (_, high) in list(ranges.items())[:_LARGER]:
        yield replace(first, sizes={**base, name: _TIMES * high + 3}, name=f"larger{name}", salt=_SALT), "above"
    for number, (name, (low, _)) in enumerate(ranges.items()):
        for smaller in dict.fromkeys((low - 1, (low + 1) // 2)):
            if smaller >= 1 and number < 4:
                yield replace(first, sizes={**base, name: smaller}, name=f"smaller{name}{smaller}", salt=_SALT), "below"
