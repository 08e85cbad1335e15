"""Plain calls: the candidate as a user calls it, many times, without anything of the assay's around it.

All calls get the same tensors, into which the numbers of another draw are written between calls, through `.data`, so
that neither address, identity, shape nor version of an input says that it has changed. Some calls run with gradients
off, in inference mode or in another thread, and the backwards differ in what they ask for: a user's calls do, too.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import TypeVar

import torch
from torch import Tensor

from ...core.tracing import TargetError
from ..declare.returned_values import name_gradients, names_of, only_tensors
from ..declare.target import Target
from ..support import memory_errors
from ..support.output_gradients import add_gradients, gradients_of
from ..support.threads import in_a_thread, noted_threads, running_threads
from .interpreted_kernels import interpreted_kernels
from .memory import overlap
from .records import (
    INFERENCE,
    NO_GRAD,
    THREAD,
    USUAL,
    CandidateRun,
    Material,
    OpenGraph,
    OpenGraphs,
    PlainCalls,
    PlainResults,
    Watched,
)
from .torch_state import SeededGenerator, restored_settings

T = TypeVar("T")
_WATCHED = 8  # calls whose results are watched
LEAST = 5  # calls to make, however long they take
_BYTES = 16 << 20  # of all results
_LONG_WATCH = 0.5  # seconds at most, where the candidate left threads running
_HELD_SECONDS = 0.05  # after which no further graph is opened, and no further gradient kept
_KEPT_POWERS = range(-4, 5)  # of two, times the output gradients of the calls whose gradients are kept
_LEAST_KEPT = 3  # calls whose gradients are kept, however long they take
_STEP = 0.01  # seconds between two looks
_THREAD_WATCH = 64  # calls whose results are watched because they started a thread


def plain_calls(material: Material, calls: PlainCalls) -> CandidateRun:
    """The results of all calls; `error` is set where one of them raised."""
    run, results = CandidateRun(), PlainResults()
    materials = (material, *calls.others)
    placed = {n: t.detach().clone() for n, t in material.inputs.items()}
    threads = running_threads()
    with (
        restored_settings(run.changed_settings),
        interpreted_kernels() if material.device.type == "cpu" else nullcontext(),
    ):
        live: list[tuple[int, str, Tensor]] = []
        try:
            _calls(materials, calls, placed, run, results, live)
            if calls.open is not None:
                _open_graphs(materials, calls.open, results)
                _rewritten_results(material, results)
                _kept_gradients(material, results)
            if calls.shared:
                _one_tensor_for_two(material, calls.shared, results)
        except (Exception, SystemExit) as error:
            if isinstance(error, TargetError) or memory_errors.of_a_gpu(error):
                raise  # a mistake of the user or a limit of the machine, not of the kernel
            run.error = error  # results that change later may be the cause, such as too many threads
            if material.device.type == "cuda":
                return run  # after an illegal access nothing can be read there
        results.threads = max(0, running_threads() - threads)
        if calls.watch:
            time.sleep(calls.watch)
        until = time.monotonic() + _LONG_WATCH
        while running_threads() > threads and time.monotonic() < until:
            time.sleep(calls.watch or _STEP)
        if material.device.type == "cuda":
            torch.cuda.synchronize(material.device)
    results.inputs = {n: t.detach() for n, t in placed.items() if n not in material.target.mutates}
    results.late = [(i, n) for i, n, t in live if not _same(t.detach(), results.outputs[i][n])]
    results.watched = [Watched(f"{n} of plain call {i + 1}", t, results.outputs[i][n]) for i, n, t in live]
    if not material.target.mutates:
        results.watched += [Watched(f"the input {n}", t.detach(), t.detach().clone()) for n, t in placed.items()]
    run.plain = results
    return run


def _calls(
    materials: tuple[Material, ...],
    calls: PlainCalls,
    placed: dict[str, Tensor],
    run: CandidateRun,
    results: PlainResults,
    live: list[tuple[int, str, Tensor]],
) -> None:
    """Makes the calls; adds to `live` the watched results (call, name, the tensor itself)."""
    target, size = materials[0].target, 0
    gradable = target.wanted_grads(placed) if target.backward is not None else ()
    backwards = {b.number: b for b in calls.backward} if gradable else {}
    starts: list[str] = []  # other threads may not write to tensors of inference mode, so their candidates get none
    present, until = 0, time.monotonic() + calls.seconds
    latest = dict[int, dict[str, Tensor]]()  # numbers -> the results of their last call
    for number, which in enumerate(calls.schedule):
        if number >= LEAST and (time.monotonic() > until or size > _BYTES):
            break
        material = materials[which]
        if which != present or target.mutates:
            for name, tensor in placed.items():
                tensor.data.copy_(material.inputs[name])
            present = which
        generator = SeededGenerator(material.seed)
        backward = backwards.get(number)
        wanted = gradable if backward is None or backward.wants is None else backward.wants
        own = callable(target.backward)
        for name in gradable:
            placed[name].requires_grad_(backward is not None and name in wanted and not own)
            placed[name].grad = torch.zeros_like(placed[name]) if backward is not None and backward.added else None
        given = {n: t.clone() if n in target.mutates else t for n, t in placed.items()}
        if backward is not None and backward.views and not own:
            given |= {n: placed[n].view_as(placed[n]) for n in wanted if n not in target.mutates}
        supply = material.ordered(given)
        threads = running_threads()
        bound = target.bound("candidate", supply)
        under = calls.under[number] if number < len(calls.under) else USUAL
        with noted_threads(starts) if number == 0 else nullcontext():
            properties = {n: _properties(t) for n, t in placed.items()}
            under = USUAL if under == INFERENCE and (starts or threads) else under
            result = _called(bound, supply, under)
            notes = _changed_properties(properties, placed, target.mutates)
        run.names, named = _named(target, supply, result)
        labels = {n: _label(target, n) for n in named}
        if under in (NO_GRAD, INFERENCE):
            wanting = [n for n, t in named.items() if t.requires_grad]
            notes += [f"{labels[n]} requires a gradient although gradients were off" for n in wanting]
        returned = _copies(target, named)
        results.outputs.append(_known(returned, latest.get(which)))
        latest[which] = results.outputs[-1]
        size += sum(t.numel() * t.element_size() for t in named.values())
        if number < _WATCHED or number < _THREAD_WATCH and running_threads() > threads:
            watched = [(n, t) for n, t in named.items() if not any(overlap(t, p) for p in placed.values())]
            # a caller may keep a tensor itself or a view of it, after which only the memory lives on
            live += [(number, labels[n], t.detach() if number % 2 else t) for n, t in watched]
        if backward is not None:
            sent, grads = _backward(material, target, supply, placed, named, wanted)
            if sent:
                results.sent[number], results.grads[number] = sent, grads
        notes += filter(None, (generator.reseeded(),))
        run.changed_settings += [note for note in dict.fromkeys(notes) if note not in run.changed_settings]


def _open_graphs(materials: tuple[Material, ...], graphs: OpenGraphs, results: PlainResults) -> None:
    """All forwards, one call without gradients, and then the backwards, each on tensors of its own."""
    target = materials[0].target
    started = []
    for which, power in graphs.graphs:
        graph = _Graph(materials[which])
        results.open.append(OpenGraph(_copies(target, graph.named)))
        started.append((graph, power, results.open[-1]))
    until = time.monotonic() + _HELD_SECONDS
    held = []
    for which in graphs.held:
        held.append(_Graph(materials[which]))
        if time.monotonic() > until:
            break
    first = materials[graphs.graphs[0][0]]
    evaluated = first.ordered({n: t.detach().clone() for n, t in first.inputs.items()})
    _called(target.bound("candidate", evaluated), evaluated, NO_GRAD)
    for number in graphs.order:
        graph, power, result = started[number]
        torch.set_rng_state(graph.random_state[0])  # so that a backward may draw its forward's numbers again
        if first.device.type == "cuda":
            torch.cuda.set_rng_state(graph.random_state[1], first.device)
        result.sent, result.grads = graph.backward(power)


def _rewritten_results(material: Material, results: PlainResults) -> None:
    """Adds the gradients where the caller writes to the results before the backward, unless torch refuses that."""
    target = material.target
    if target.backward != "auto":
        return
    graph = _Graph(material)
    outputs = _copies(target, graph.named)
    try:
        with torch.no_grad():
            for tensor in graph.named.values():
                if tensor.requires_grad:
                    tensor.add_(1)
        sent, grads = graph.backward()
    except RuntimeError as error:
        if memory_errors.of_a_gpu(error):
            raise
        return  # as where the backward reads a result that is saved, and has another version now
    results.rewritten = OpenGraph(outputs, grads, sent)


def _kept_gradients(material: Material, results: PlainResults) -> None:
    """Calls with their backwards, whose gradients the caller keeps: adds those that a later backward overwrites."""
    kept = list[dict[str, Tensor]]()
    copies = list[dict[str, Tensor]]()
    until, size = time.monotonic() + _HELD_SECONDS, 0
    for power in _KEPT_POWERS:
        if len(kept) >= _LEAST_KEPT and (time.monotonic() > until or size > _BYTES):
            break
        graph = _Graph(material)
        kept.append(graph.own_gradients(power))
        copies.append({n: g.clone() for n, g in kept[-1].items()})
        size += sum(g.numel() * g.element_size() for g in kept[-1].values())
    results.kept = len(kept)
    changed = (n for now, before in zip(kept, copies, strict=True) for n, g in now.items() if not _same(g, before[n]))
    results.overwritten = list(dict.fromkeys(changed))


class _Graph:
    """A forward on tensors of its own, whose graph stays open."""

    def __init__(self, material: Material) -> None:
        target = material.target
        self.material, self.placed = material, {n: t.detach().clone() for n, t in material.inputs.items()}
        self.wanted = target.wanted_grads(self.placed)
        for name in self.wanted if target.backward == "auto" else ():
            self.placed[name].requires_grad_()
        given = {n: t.clone() if n in target.mutates else t for n, t in self.placed.items()}
        self.supply = material.ordered(given)
        SeededGenerator(material.seed)
        _, self.named = _named(target, self.supply, target.bound("candidate", self.supply)(self.supply))
        self.random_state = _random_state(material)

    def backward(self, power: int = 0) -> tuple[tuple[str, ...], dict[str, Tensor | None]]:
        """(outputs that got a gradient, copies of the gradients), as `_backward`."""
        target = self.material.target
        return _backward(self.material, target, self.supply, self.placed, self.named, self.wanted, power)

    def own_gradients(self, power: int) -> dict[str, Tensor]:
        """The gradients in the memory in which the candidate returns them, as `torch.autograd.grad` gives them."""
        target = self.material.target
        sent = _output_gradients(self.material, self.named, power)
        if not sent:
            return {}
        if target.backward == "auto":
            results, leaves = [self.named[n] for n in sent], [self.placed[n] for n in self.wanted]
            grads = dict(zip(self.wanted, gradients_of(results, leaves, list(sent.values())), strict=True))
        else:
            grads = _by_its_own_backward(target, self.supply, self.named, sent, self.wanted)
        return {f"{n}.grad": g.detach() for n, g in grads.items() if g is not None and g.layout == torch.strided}


def _random_state(material: Material) -> list[Tensor]:
    """Of the CPU, and of the material's GPU."""
    on_card = material.device.type == "cuda"
    return [torch.get_rng_state(), *([torch.cuda.get_rng_state(material.device)] if on_card else [])]


def _one_tensor_for_two(material: Material, names: tuple[str, ...], results: PlainResults) -> None:
    """Adds the results for two equal tensors, and for one tensor as both arguments."""
    target, (first, second) = material.target, names
    for same in (False, True):
        placed = {n: t.detach().clone() for n, t in material.inputs.items()}
        placed[second] = placed[first] if same else placed[first].clone()
        supply = material.ordered(placed)
        SeededGenerator(material.seed)
        try:
            result = target.bound("candidate", supply)(supply)
        except Exception:
            if same:
                raise
            return  # it refuses equal tensors, too: nothing is left to compare
        results.shared.append(_copies(target, _named(target, supply, result)[1]))


def _named(target: Target, supply: Mapping[str, object], result: object) -> tuple[tuple[str, ...], dict[str, Tensor]]:
    """The names of all results, and the results that are tensors."""
    pairs = names_of(result, target.outputs, "candidate", unavailable=unavailable_names(target, supply))
    return tuple(n for n, _ in pairs), only_tensors(pairs, "candidate")


def _properties(tensor: Tensor) -> dict[str, object]:
    """What a tensor holds besides its numbers."""
    known: dict[str, object] = {"grad": tensor.grad, "grad_fn": tensor.grad_fn, "_version": tensor._version}
    known |= {"list of attributes": list(vars(tensor)), "list of hooks": list(tensor._backward_hooks or ())}
    return {"requires_grad": tensor.requires_grad, **known, "shape": tensor.shape, "stride": tensor.stride()}


def _changed_properties(
    before: Mapping[str, Mapping[str, object]], placed: Mapping[str, Tensor], mutated: tuple[str, ...]
) -> list[str]:
    """Sentences about inputs that a call left with another property."""
    return [
        f"the input {name} has another {what}, which was {_word(was)}"
        for name, tensor in placed.items()
        for (what, was), now in zip(before[name].items(), _properties(tensor).values(), strict=True)
        if name not in mutated and was is not now and (isinstance(was, Tensor) or was != now)
    ]


def _word(value: object) -> str:
    return f"a {type(value).__name__}" if isinstance(value, Tensor) or callable(value) else str(value)


def _label(target: Target, name: str) -> str:
    return f"saved.{name}" if name in target.saved else name


def _copies(target: Target, named: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {_label(target, n): t.detach().clone() for n, t in named.items()}


def _called(call: Callable[[Mapping[str, object]], T], supply: Mapping[str, object], under: str) -> T:
    """The result of a call with gradients off, in inference mode, in another thread, or as usual."""
    if under == NO_GRAD:
        with torch.no_grad():
            return call(supply)
    if under == INFERENCE:
        with torch.inference_mode():
            return call(supply)
    return in_a_thread(lambda: call(supply)) if under == THREAD else call(supply)


def _known(results: dict[str, Tensor], before: dict[str, Tensor] | None) -> dict[str, Tensor]:
    """`before` where the results are equal to it: equal ones are kept and sent once."""
    if before is None or results.keys() != before.keys():
        return results
    same = all(
        t.shape == before[n].shape and t.dtype == before[n].dtype and torch.equal(t, before[n])
        for n, t in results.items()
    )
    return before if same else results


def unavailable_names(target: Target, supply: Mapping[str, object]) -> tuple[str, ...]:
    """Names that an unnamed result may not get.

    The target's own backward receives inputs, results and output gradients by name, so a result may not have the name
    of an input. With autograd, only names of output gradients are excluded.
    """
    return tuple(n for n in supply if callable(target.backward) or n.startswith("grad_"))


def _backward(
    material: Material, target: Target, supply: Mapping[str, object], placed: Mapping[str, Tensor],
    named: Mapping[str, Tensor], wanted: tuple[str, ...], power: int = 0,
) -> tuple[tuple[str, ...], dict[str, Tensor | None]]:  # fmt: skip
    """(outputs that got a gradient, gradients); both are empty where no output can get one."""
    sent = _output_gradients(material, named, power)
    if not sent:
        return (), {}
    if target.backward == "auto":
        add_gradients([named[n] for n in sent], list(sent.values()))
        grads = {n: placed[n].grad for n in wanted}
    else:
        grads = _by_its_own_backward(target, supply, named, sent, wanted)
    copied = {f"{n}.grad": _copy(g) for n, g in grads.items()}
    for name in wanted:
        placed[name].grad = None
    return tuple(sent), copied


def _output_gradients(material: Material, named: Mapping[str, Tensor], power: int) -> dict[str, Tensor]:
    """The gradients to send, of all results that can get one."""
    target = material.target
    visible = {n: t for n, t in named.items() if n not in target.saved and t.is_floating_point()}
    if target.backward == "auto":
        visible = {n: t for n, t in visible.items() if t.requires_grad}
    return {n: material.cotangent(n, t, power) for n, t in visible.items()}


def _by_its_own_backward(
    target: Target, supply: Mapping[str, object], named: Mapping[str, Tensor], sent: Mapping[str, Tensor],
    wanted: tuple[str, ...],
) -> dict[str, Tensor | None]:  # fmt: skip
    names = {**supply, **named, **{f"grad_{n}": t for n, t in sent.items()}}
    return dict(name_gradients(target.bound("backward", names)(names), wanted, "backward"))


def _copy(grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return None
    return (grad if grad.layout == torch.strided else grad.to_dense()).detach().clone()


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
