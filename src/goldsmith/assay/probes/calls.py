"""Many plain calls, as a user makes them: no guard bands, no modes, the same tensors with changing numbers.

Finds what a run with guard bands hides: results kept by address, identity, shape or version of an input; the right
result for the first calls only, or for calls that look like a check; writes after the return; results that are right
only with gradients on or in the main thread, and gradients that are right only if every input wants one, if every
backward follows its forward at once, or for output gradients of usual size.

A case that is wrong already is not tried, unless its candidate is doubtful: the way it goes wrong may show a trick.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..execute.records import (
    INFERENCE,
    NO_GRAD,
    THREAD,
    USUAL,
    CandidateRun,
    Material,
    OpenGraphs,
    PlainBackward,
    PlainCalls,
    PlainResults,
    RunSettings,
)
from ..golden.golden_results import GoldenResults
from ..judge import ladder
from ..judge.agreement import difference, same_bits
from ..judge.examination import Examination
from ..report.results import CERTAIN
from . import decisions, scaling, values

NAME = "calls"
CALLS = 200  # as many as fit into the time that PlainCalls allows
_DRAWS = 2  # of numbers; the second is that of the probe of second calls, so that its golden is known
_DOUBTFUL_DRAWS = 8  # where a candidate may be right for most numbers only
_LATER = (USUAL, NO_GRAD, INFERENCE, THREAD), (26, 3, 2, 1)  # how calls after the first ones run, and how often
_LARGE = 1 << 20  # bytes of inputs from which two draws must do
_NEAR, _ROLLED = 12, 6  # draws that are the base numbers in a part, or in another order
_OPEN_BYTES = 64 << 20  # of inputs up to which several graphs are open at once
_HELD = 12, 19  # further graphs that are open then, where a candidate may keep a ring of buffers
_POWER, _POWER_OF_HALF = 16, 4  # of two, times output gradients: a loss scale, and with minus a mean over many tokens


def run(examination: Examination) -> None:
    if any(f.probe == "guard" for f in examination.findings):
        return  # without guard bands, a stray write ends the process
    doubtful = getattr(examination.target.runner, "doubtful", False)
    if examination.findings and not doubtful:
        return
    size = sum(t.numel() * t.element_size() for t in examination.material.inputs.values())
    draws = _DOUBTFUL_DRAWS if doubtful and size < _LARGE else _DRAWS
    others = tuple(examination.variant(k) for k in range(1, draws))
    materials = (examination.material, *others)
    shown = {n.removeprefix("saved.") for n in examination.first.outputs}
    hidden = [n for n in examination.target.decisions if n not in shown]  # stages, which plain calls do not record
    if hidden or not all(_alike(examination.material, m) for m in others):
        others, materials = (), (examination.material,)
    order = random.Random(f"{examination.seed} {examination.case.name}")
    draws_once = [0, *range(len(others), 0, -1)]
    schedule, under = draws_once[:2], [USUAL] * len(draws_once[:2])
    for unusual in (NO_GRAD, THREAD, INFERENCE):  # as early as this, so that slow candidates are called so, too
        schedule.append(order.choice(draws_once[:2]))
        under.append(unusual)
    schedule += draws_once[2:]
    under += [USUAL] * len(draws_once[2:])
    near = _near(examination, others[0], order) if doubtful and size < _LARGE and others else ()
    numbers = range(len(materials), len(materials) + len(near))
    for way, number in itertools.product((NO_GRAD, INFERENCE, USUAL), numbers):
        schedule += [0, number]
        under += [way, way]
    schedule += [order.randrange(len(materials)) for _ in range(CALLS - len(schedule))]
    under += [order.choices(*_LATER)[0] for _ in range(CALLS - len(under))]
    backward = _backwards(examination, [schedule.index(k) for k in draws_once], order)
    graphs = _graphs(examination, [draws_once[0], *draws_once[1:3]], order) if size <= _OPEN_BYTES else None
    if graphs is not None and doubtful and size < _LARGE and others:
        held = order.randint(*_HELD)
        graphs = replace(graphs, held=tuple(order.randrange(len(materials)) for _ in range(held)))
    shared = _alike_inputs(examination)
    plain = PlainCalls((*others, *near), tuple(schedule), backward, tuple(under), open=graphs, shared=shared)
    how = RunSettings(fresh=False, plain=plain)
    run = examination.execute(NAME, "plain calls", how, look=False)
    for number, name in () if run.plain is None else run.plain.late:
        text = f"{name} of plain call {number + 1} changed after the call had returned"
        examination.find(CERTAIN, NAME, name, text, trick="late_write", kind="late_write")
    for name in () if run.plain is None else run.plain.overwritten:
        text = f"{name} that an earlier call returned was overwritten by the backward of a later one"
        examination.find(CERTAIN, NAME, name, text, kind="overwritten_result")
    if examination.raised(NAME, "plain calls", run) or run.plain is None:
        return
    if run.plain.outputs:
        last = (*materials, *near)[plain.schedule[len(run.plain.outputs) - 1]]
        examination.look("plain calls", CandidateRun(changed=_changed(last, run.plain.inputs), phase="call"))
    references = _judge(examination, materials, plain, run.names, run.plain)
    if near:
        _judge_near(examination, materials, near, plain, run.plain)
    if graphs is not None and len(run.plain.open) == len(graphs.graphs):
        _judge_open(examination, materials, graphs, run, references, schedule)
    if len(run.plain.shared) == 2:
        _judge_shared(examination, shared, run.plain.shared)


def _graphs(examination: Examination, draws: Sequence[int], order: random.Random) -> OpenGraphs | None:
    """One graph for each draw, and two with large and small output gradients.

    The draws and the order of the backwards are such that neither a stack nor a queue of saved tensors is right, and no
    small ring of buffers, even though draws occur twice.
    """
    if examination.target.backward is None or not examination.target.wanted_grads(examination.material.inputs):
        return None
    tensors = (*examination.material.inputs.values(), *examination.first.outputs.values())
    power = _POWER_OF_HALF if any(t.dtype == torch.float16 for t in tensors) else _POWER
    graphs = (*((k, 0) for k in draws), (draws[-1], -power), (draws[:2][-1], power))
    forwards = [which for which, _ in graphs]
    stored = (forwards, forwards[::-1], [forwards[0], *forwards[:0:-1]])  # a queue, a stack, one with the call between
    numbers = order.sample(range(len(graphs)), len(graphs))
    while len(draws) > 1 and any([forwards[k] for k in numbers] == each for each in stored):
        numbers = order.sample(range(len(graphs)), len(graphs))
    return OpenGraphs(graphs, tuple(numbers))


def _alike_inputs(examination: Examination) -> tuple[str, ...]:
    """Two floating-point inputs that one tensor can be both of; () if there are none."""
    target, inputs = examination.target, examination.material.inputs
    if target.decisions:
        return ()
    names = [n for n, t in inputs.items() if t.is_floating_point() and t.numel() and n not in target.mutates]
    for a, b in itertools.combinations(names, 2):
        alike = inputs[a].shape == inputs[b].shape and inputs[a].dtype == inputs[b].dtype
        if alike and examination.admits(examination.material.with_inputs({b: inputs[a]})):
            return a, b
    return ()


def _changed(material: Material, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Input -> mask of the elements that differ from what this process had sent for the last call."""
    masks = {}
    for name, sent in material.inputs.items():
        now = inputs.get(name)
        if name in material.target.mutates or not sent.numel():
            continue
        if now is None or now.shape != sent.shape or now.dtype != sent.dtype:
            masks[name] = torch.ones(sent.shape, dtype=torch.bool)
            continue
        rows = [t.contiguous().reshape(-1).view(torch.uint8).view(-1, t.element_size()) for t in (now, sent)]
        if not torch.equal(*rows):
            masks[name] = (rows[0] != rows[1]).any(-1).view(sent.shape)
    return masks


def _backwards(examination: Examination, numbers: list[int], order: random.Random) -> tuple[PlainBackward, ...]:
    """The backwards of these calls: the first for all inputs as leaves, the others for one of them alone, which is no
    leaf, or a leaf that has a gradient already.
    """
    wanted = examination.target.wanted_grads(examination.material.inputs)
    if examination.target.backward != "auto":
        return tuple(map(PlainBackward, numbers))
    ways = [(name, views) for name in wanted for views in (True, False)]
    ways = order.sample(ways, len(ways)) or [("", False)]
    further = zip(numbers[1:], itertools.cycle(ways), strict=False)
    return (
        PlainBackward(numbers[0]),
        *(PlainBackward(n, (name,) if name else (), views=views, added=not views) for n, (name, views) in further),
    )


def _alike(a: Material, b: Material) -> bool:
    """Whether the numbers of one fit into the tensors of the other."""
    return a.scalars == b.scalars and all(
        n in b.inputs and b.inputs[n].shape == t.shape and b.inputs[n].dtype == t.dtype for n, t in a.inputs.items()
    )


def _judge(
    examination: Examination, materials: tuple[Material, ...], calls: PlainCalls, names: tuple[str, ...],
    plain: PlainResults,
) -> dict[int, GoldenResults]:  # fmt: skip
    """Judges the first call of each draw by the golden, and all others by the first: usual ones before the unusual.

    Returns the golden's results of each draw.
    """
    first: dict[int, int] = {}
    references: dict[int, GoldenResults] = {}
    wants = {b.number: b.wants for b in calls.backward}
    gradable = examination.target.wanted_grads(examination.material.inputs)
    for number in sorted(range(len(plain.outputs)), key=lambda k: (calls.under[k] != USUAL, k)):
        outputs, which = plain.outputs[number], calls.schedule[number]
        if which >= len(materials):  # near ones
            continue
        if which in first:
            _agrees(examination, plain, calls, first[which], number, references[which])
            continue
        first[which] = number
        asked = wants.get(number)
        absent = frozenset(f"{n}.grad" for n in gradable if asked is not None and n not in asked)
        grads = plain.grads.get(number, {})
        first_run = examination.first
        run = CandidateRun(names, outputs, grads, stages=first_run.stages, saved=first_run.saved)
        if number in wants:  # an output that is cut from the graph here, and was not in the first run, got none
            base = first_run.outputs
            sent = dict.fromkeys((*first_run.cotangents, *plain.sent.get(number, ())))
            # one of another shape is no fault of the golden
            like = {n: outputs[n] for n in sent if n in outputs and n in base and outputs[n].shape == base[n].shape}
            run.cotangents = {n: materials[which].cotangent(n, t) for n, t in like.items()}
        settled = decisions.settle(examination, run, examination.references(materials[which], run))
        references[which] = settled
        before = len(examination.findings)
        label = f"plain call {number + 1}"
        skip = frozenset(examination.bad) | absent
        values.judge(examination, run, settled, NAME, label, noise=False, repeat=None, skip=skip)
        fresh = examination.findings[before:]
        if fresh:
            only_grads = all(f.tensor.endswith(".grad") for f in fresh)
            trick = _trick(examination, before, materials[which], number, {**outputs, **grads}, only_grads=only_grads)
            examination.findings[before:] = [replace(f, trick=trick) for f in fresh]
    return references


def _near(examination: Examination, other: Material, order: random.Random) -> tuple[Material, ...]:
    """The base numbers with a part of one input from the other draw: a half of it, or of each of its rows. Also the
    base numbers with one input rolled along an axis, which leaves sums and sorted numbers as they are.
    """
    parts, rolled = list[Material](), list[Material]()
    for name, tensor in examination.material.inputs.items():
        if not tensor.is_floating_point() or tensor.numel() < 2:
            continue
        numbers = torch.arange(tensor.numel(), device=tensor.device).view(tensor.shape)
        columns = numbers % tensor.shape[-1] if tensor.dim() else numbers
        for places in (numbers, columns) if 1 < tensor.shape[-1] < tensor.numel() else (numbers,):
            half = places <= places.amax() // 2
            mixed = (torch.where(mask, other.inputs[name], tensor) for mask in (half, ~half))
            parts += [examination.material.with_inputs({name: t}) for t in mixed]
        turns = ((axis, order.randrange(1, n)) for axis, n in enumerate(tensor.shape) if n > 1)
        rolled += [examination.material.with_inputs({name: tensor.roll(by, axis)}) for axis, by in turns]
    chosen = [*order.sample(rolled, min(_ROLLED, len(rolled))), *order.sample(parts, min(_NEAR, len(parts)))]
    return tuple(part for part in chosen if examination.admits(part))


def _judge_near(
    examination: Examination, materials: Sequence[Material], near: Sequence[Material], calls: PlainCalls,
    plain: PlainResults,
) -> None:  # fmt: skip
    """Finds calls that repeat the result of the call before, although some numbers changed, or their order.

    Such numbers may lie outside of what the kernel must take: half of a symmetric matrix is none. So it counts only
    where the golden has another result, and the candidate, too, alone in a new process.
    """
    for number in range(1, len(plain.outputs)):
        which, outputs = calls.schedule[number] - len(materials), plain.outputs[number]
        same = [n for n, t in outputs.items() if same_bits(plain.outputs[number - 1].get(n), t)]
        if which < 0 or examination.bad.issuperset(same):
            continue
        references = examination.references(near[which], CandidateRun(tuple(outputs), dict(outputs)))
        against = {n: references.reference(n, "output") for n in same if n not in examination.target.decisions}
        wrong = {n: r for n, r in against.items() if r is not None and not ladder.judge(n, outputs[n], r).ok}
        if not wrong:
            continue
        runner: Any = examination.target.runner  # of a doubtful candidate
        alone = runner.alone(near[which], RunSettings(fresh=False))
        for name, reference in wrong.items():
            if not difference(alone.outputs.get(name), outputs[name], reference).legal:
                text = f"plain call {number + 1} gives the result of call {number}, whose numbers are others"
                text += f" (both ran {calls.under[number]})" if calls.under[number] else ""
                examination.find(CERTAIN, NAME, name, text, trick="cached_result", kind="call_differs")
        return


def _judge_open(
    examination: Examination, materials: tuple[Material, ...], graphs: OpenGraphs, run: CandidateRun,
    references: Mapping[int, GoldenResults], schedule: Sequence[int],
) -> None:  # fmt: skip
    """Judges gradients of graphs that were open together. Those with scaled output gradients must scale with these.
    Those whose results were changed must not depend on that.

    Equal bits need no golden, neither as those of a plain call nor after a power of two, which scales without rounding.
    """
    plain = run.plain or PlainResults()
    usual = {which: graph for (which, power), graph in zip(graphs.graphs, plain.open, strict=True) if not power}
    turns = ", ".join(str(number + 1) for number in graphs.order)
    scaled, together = "output gradients times 2^{}", f"several graphs, backwards in the order {turns}"
    open_rows = zip(graphs.graphs, plain.open, strict=True)
    rows = [(which, power, graph, scaled.format(power) if power else together) for (which, power), graph in open_rows]
    if plain.rewritten is not None:
        rows.append((0, 0, plain.rewritten, "results changed in place before the backward"))
    for which, power, graph, label in rows:
        before = usual[which].grads if power else plain.grads.get(schedule.index(which), {})
        grads = {**dict.fromkeys(before), **graph.grads}  # one that is missing here is a gradient that is missing
        same = {n for n, g in grads.items() if n in before and same_bits(_times(before[n], power), g)}
        if len(same) == len(grads) and (grads or not examination.first.cotangents):
            continue
        material = materials[which]
        first = examination.first
        now = CandidateRun(run.names, graph.outputs, grads, stages=first.stages, saved=first.saved)
        others = first.cotangents.keys() & graph.outputs.keys()
        sent = dict.fromkeys((*graph.sent, *others))
        now.cotangents = {n: material.cotangent(n, graph.outputs[n], power) for n in sent}
        known = None if power or examination.target.decisions else references.get(which)
        settled = known or decisions.settle(examination, now, examination.references(material, now))
        count = len(examination.findings)
        values.judge(
            examination, now, settled, NAME, label, noise=False, repeat=None,
            skip=frozenset({*examination.bad, *graph.outputs, *same}),
        )  # fmt: skip
        if power:  # where the golden in compute precision overflows, the candidate may, too
            new = examination.findings[count:]
            excused = {f.tensor for f in new if not scaling.honest_passes(examination, settled, f.tensor)}
            examination.findings[count:] = [f for f in new if f.tensor not in excused]


def _times(grad: Tensor | None, power: int) -> Tensor | None:
    return grad if grad is None else grad * 2.0**power


def _judge_shared(examination: Examination, names: tuple[str, ...], results: Sequence[Mapping[str, Tensor]]) -> None:
    """Compares the results for one tensor as two arguments with those for two equal tensors."""
    first, second = names
    material = examination.material.with_inputs({second: examination.material.inputs[first]})
    for name, tensor in results[1].items():
        if name in examination.bad or same_bits(results[0].get(name), tensor):
            continue
        references = examination.references(material, CandidateRun(tuple(results[1]), dict(results[1])))
        apart = difference(results[0].get(name), tensor, references.reference(name, "output"))
        if not apart.legal:
            text = f"one tensor as {first} and as {second} gives another result than two equal ones: {apart.text}"
            examination.find(CERTAIN, NAME, name, text, kind="call_differs")


def _trick(
    examination: Examination, before: int, material: Material, number: int, results: Mapping[str, Tensor | None],
    *, only_grads: bool,
) -> str:  # fmt: skip
    """What a wrong first call of a draw shows. before: the findings of earlier calls.

    The base numbers were right under guard bands. Other numbers are run there now: if the results are the same, they
    are just wrong; if not, earlier calls matter, or, where only gradients are wrong, how the backward was called.
    """
    if number == 0 and only_grads:
        return "backward_shortcut"
    if number == 0 or any(f.probe == NAME and f.trick == "shape_branch" for f in examination.findings[:before]):
        return "shape_branch"
    run = examination.execute(NAME, "the numbers of a wrong plain call", material=material, look=False)
    references = examination.references(material, run)
    for name, kind, tensor in run.results():
        if name not in results or name in examination.target.decisions:
            continue
        if not difference(tensor, results[name], references.reference(name, kind)).legal:
            return "backward_shortcut" if only_grads else "cached_result"
    return ""


def _agrees(
    examination: Examination,
    plain: PlainResults,
    calls: PlainCalls,
    first: int,
    number: int,
    reference: GoldenResults,
) -> None:
    """Compares a call with an earlier one of the same numbers."""
    for name, tensor in plain.outputs[number].items():
        before = plain.outputs[first].get(name)
        if name in examination.bad or name in examination.target.decisions or same_bits(before, tensor):
            continue
        apart = difference(before, tensor, reference.reference(name, "output"))
        if apart.legal:
            continue
        stale = next((k for k in _others(calls.schedule, number) if _equal(plain, k, name, tensor)), None)
        text = f"plain call {number + 1} gives another result than call {first + 1} of the same numbers: {apart.text}"
        if stale is not None:
            text += f"; it is the result of call {stale + 1}, whose numbers are others"
        if calls.under[number]:
            text += f" (call {number + 1} ran {calls.under[number]})"
        where = None if apart.mask is None else examination.locate(name, apart.mask)
        trick = "" if calls.under[number] else "call_count" if stale is None else "cached_result"
        examination.find(CERTAIN, NAME, name, text, where=where, trick=trick, kind="call_differs")


def _others(schedule: Sequence[int], number: int) -> list[int]:
    return [k for k in range(number) if schedule[k] != schedule[number]]


def _equal(plain: PlainResults, number: int, name: str, tensor: Tensor) -> bool:
    return same_bits(plain.outputs[number].get(name), tensor)
