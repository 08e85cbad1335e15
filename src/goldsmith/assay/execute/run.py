"""execute: one run of a candidate, forward and backward, with its stages and its effects on memory. It judges nothing.

Inputs and output gradients are copies between guard bands. Tensors that the candidate makes with `torch.empty*` have
guard bands too, and are poisoned. A candidate that raises yields a run with `error` set, never an exception.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor
from torch.autograd.function import BackwardCFunction

from ...core.tracing import TargetError, listening
from ..declare.returned_values import name_gradients, names_of, only_tensors, own_names
from ..declare.target import Target
from ..support import memory_errors
from ..support.device_flags import DeviceFlags, same_numbers
from ..support.output_gradients import gradients_of
from . import kept_memory, plain_calls
from .device_moves import moved
from .interpreted_kernels import interpreted_kernels
from .interpreter import programs_backwards, watching
from .memory import Arena, Poison, aliases, overlap, overlapping
from .memory_marks import band_read, no_nan, poison_left
from .records import CandidateRun, Material, RunSettings
from .torch_state import SeededGenerator, restored_settings, threads_set
from .tracer import Tracer

# kinds of flags: all are True after a run without effects on memory
FORWARD, BACKWARD, STAGE, BANDS, INPUT, NO_NAN = (
    "input after the forward", "output after the backward", "stage", "bands", "input", "no NaN"
)  # fmt: skip
_Flags = DeviceFlags[tuple[str, str]]


def execute(material: Material, settings: RunSettings | None = None) -> CandidateRun:
    """Run the candidate once, forward and (unless the target has none) backward, through the target's runner if any."""
    settings = settings or RunSettings()
    runner = material.target.runner or execute_here
    if material.runs_on is None:
        return runner(material, settings)
    here, there = material.device, material.runs_on
    return moved(runner(replace(moved(material, there), runs_on=None), moved(settings, there)), here)


def execute_here(material: Material, settings: RunSettings) -> CandidateRun:
    """Run the candidate once in this process."""
    target, run = material.target, CandidateRun()
    if settings.fresh and target.reset is not None:
        _reset(target.reset)
    if settings.plain is not None:
        return plain_calls.plain_calls(material, settings.plain)
    arena = Arena(settings.fill, settings.neighbour_sign, watched=settings.watch_seconds > 0)
    tracer = Tracer(substitute=settings.substitute, debug=settings.debug)
    flags, returned = _Flags(), dict[str, Tensor]()
    generator = _seeded(material)
    with (
        threads_set(settings.threads),
        restored_settings(run.changed_settings),
        listening(tracer),
        interpreted_kernels() if material.device.type == "cpu" else nullcontext(),
        watching() as run.interpreted,
        programs_backwards() if settings.backwards else nullcontext(),
    ):
        try:
            returned.update(_forward_and_backward(material, settings, arena, tracer, run, flags))
            _synchronise(material.device)
        except (Exception, SystemExit) as error:
            if memory_errors.of_a_gpu(error):
                raise  # a limit of the machine, not of the kernel
            mistake = _mistake(error)
            if mistake is not None:
                raise mistake from error
            run.error = error
    if note := generator.reseeded():
        run.changed_settings.append(note)
    run.called_tracing = tracer.called_tracing and not tracer.debug
    run.stages.update(tracer.records)
    run.covered, run.flaws = tracer.covered, tracer.flaws
    _record_memory(run, arena, target, tracer, flags, returned)
    if settings.keep:
        kept_memory.keep(settings.keep, run)
    return run


def _mistake(error: BaseException | None) -> TargetError | None:
    """The user's mistake that an error reports; Triton's interpreter wraps every error of a kernel in its own."""
    while error is not None and not isinstance(error, TargetError):
        error = error.__cause__ if type(error).__module__.startswith("triton.") else None
    return error


def _reset(reset: Callable[[], object]) -> None:
    try:
        reset()
    except Exception as error:
        raise TargetError(f"reset: raised {type(error).__name__}: {error}") from error


def _seeded(material: Material) -> SeededGenerator:
    """Makes candidates that draw (dropout) repeat."""
    if material.device.type == "cuda":
        torch.cuda.manual_seed(material.seed)
    return SeededGenerator(material.seed)


def _forward_and_backward(
    material: Material, settings: RunSettings, arena: Arena, tracer: Tracer, run: CandidateRun, flags: _Flags
) -> Mapping[str, Tensor]:
    """Returns copies of the outputs as the forward left them."""
    target = material.target
    wanted = target.wanted_grads(material.inputs) if target.backward is not None and settings.backward else ()
    placed = {n: arena.place(n, t, settings.layouts.get(n)) for n, t in material.inputs.items()}
    if target.backward == "auto":
        for name in wanted:
            placed[name].requires_grad_()
    supply = material.ordered({n: _argument(n, t, target) for n, t in placed.items()})
    with Poison(arena):
        result = target.bound("candidate", supply)(supply)
        pairs = names_of(result, target.outputs, "candidate", unavailable=plain_calls.unavailable_names(target, supply))
        named = only_tensors(pairs, "candidate")
    run.names = tuple(name for name, _ in pairs)
    if isinstance(result, Mapping) and run.names != target.outputs:  # declared names were checked on construction
        own_names(run.names, supply, target.saved, "outputs: the candidate's result", target.backward is not None)
    run.saved = tuple(n for n in named if n in target.saved)
    run.live_outputs = {_label(n, target): t.detach() for n, t in named.items()}
    run.outputs = {n: t.clone() for n, t in run.live_outputs.items()}
    run.late_bytes = arena.written_within(settings.watch_seconds) if settings.watch_seconds else 0
    for name, buffer in arena.inputs.items():
        flags.add((FORWARD, name), buffer.kept())
    run.phase = "backward"
    returned = run.outputs
    if settings.between is not None:
        run.between = _between(settings.between, settings.fill)
        run.earlier = kept_memory.results(settings.earlier)
        # copied again, so that changes by that call do not count as the backward's
        returned = {n: t.clone() for n, t in run.live_outputs.items()}
    visible = {n: t for n, t in named.items() if n not in target.saved and t.is_floating_point()}
    if target.backward == "auto":
        visible = {n: t for n, t in visible.items() if t.requires_grad and settings.only_output in (None, n)}
        run.own_function = any(isinstance(t.grad_fn, BackwardCFunction) for t in visible.values())
    if not visible or not wanted:
        return returned
    for name, output in visible.items():
        sent = settings.cotangents.get(name)
        run.cotangents[name] = sent = material.cotangent(name, output) if sent is None else sent
        placed[f"grad_{name}"] = arena.place(f"grad_{name}", sent, settings.layouts.get(f"grad_{name}"))
    step = _autograd if target.backward == "auto" else _own_backward
    if step is _own_backward and settings.substitute:
        named = {n: _substituted(n, t, target, settings.substitute) for n, t in named.items()}
    call = step(material, supply, placed, named, visible, wanted, tracer, settings.backward_twice)
    with Poison(arena):
        run.grads = call(run)
        if settings.backward_twice and not target.mutates:
            run.second_grads = call(CandidateRun())
    for name, tensor in run.live_outputs.items():
        flags.add((BACKWARD, name), same_numbers(tensor, returned[name]))
    return returned


def _between(material: Material, fill: str) -> CandidateRun:
    """Makes another call and restores the random state, so that the backward can redraw the forward's numbers."""
    device = material.device
    on_card = device.type == "cuda"
    before, card = torch.get_rng_state(), torch.cuda.get_rng_state(device) if on_card else None
    run = execute_here(material, RunSettings(fill=fill, fresh=False))
    torch.set_rng_state(before)
    if card is not None:
        torch.cuda.set_rng_state(card, device)
    return run


def _argument(name: str, placed: Tensor, target: Target) -> Tensor:
    """The tensor to pass: a copy for a declared mutable leaf that requires grad, which cannot be written in place."""
    return placed.clone() if name in target.mutates and placed.requires_grad else placed


def _substituted(name: str, result: Tensor, target: Target, substitute: Mapping[str, Tensor]) -> Tensor:
    """The value of a forward result to pass to the backward: its substitute if there is one."""
    value = substitute.get(_label(name, target))
    return result if value is None or value.shape != result.shape else value.detach().to(result).clone()


def _label(name: str, target: Target) -> str:
    return f"saved.{name}" if name in target.saved else name


Step = Callable[[CandidateRun], dict[str, Tensor | None]]
Named = Mapping[str, Tensor]


def _autograd(
    material: Material, supply: Mapping[str, object], placed: Named, named: Named, visible: Named,
    wanted: tuple[str, ...], tracer: Tracer, twice: bool,
) -> Step:  # fmt: skip
    leaves = {f"{n}.grad": placed[n] for n in wanted}
    stages = {f"{n}.grad": t for n, t in tracer.graph.items() if f"{n}.grad" not in leaves}

    def step(run: CandidateRun) -> dict[str, Tensor | None]:
        grads = gradients_of(
            list(visible.values()),
            [*leaves.values(), *stages.values()],
            [placed[f"grad_{n}"] for n in visible],
            retain_graph=twice,
        )
        run.stages.update({n: g.clone() for n, g in zip(stages, grads[len(leaves) :], strict=True) if g is not None})
        return dict(zip(leaves, map(_dense, grads), strict=False))

    return step


def _own_backward(
    material: Material, supply: Mapping[str, object], placed: Named, named: Named, visible: Named,
    wanted: tuple[str, ...], tracer: Tracer, twice: bool,
) -> Step:  # fmt: skip
    target = material.target
    names = {**supply, **named, **{f"grad_{n}": placed[f"grad_{n}"] for n in visible}}

    def step(run: CandidateRun) -> dict[str, Tensor | None]:
        result = target.bound("backward", names)(names)
        return {f"{n}.grad": _dense(g) for n, g in name_gradients(result, wanted, "backward").items()}

    return step


def _dense(grad: Tensor | None) -> Tensor | None:
    """A sparse gradient (of an embedding, say) as the dense one that it represents."""
    return grad.to_dense() if grad is not None and grad.layout != torch.strided else grad


# memory


def _reused(tracer: Tracer, kept: Mapping[tuple[str, str], bool]) -> Iterator[tuple[str, str]]:
    """(stage, first later stage in its memory) for stages whose numbers changed after they were recorded."""
    names = list(tracer.places)
    for i, name in enumerate(names):
        if kept[STAGE, name]:
            continue
        later = (n for n in names[i + 1 :] if overlap(tracer.places[name], tracer.places[n]))
        by = next(later, None)
        if by is not None:
            yield name, by


def _same_view(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors are the same view of the same memory."""
    return a.data_ptr() == b.data_ptr() and a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype


def _record_memory(
    run: CandidateRun, arena: Arena, target: Target, tracer: Tracer, flags: _Flags, returned: Mapping[str, Tensor]
) -> None:
    stages = tracer.places
    for named in (run.live_outputs, run.grads, run.second_grads or {}, stages):
        arena.name({n: t for n, t in named.items() if t is not None})
    buffers = {n: b for n, b in arena.inputs.items() if n not in target.mutates}
    placed = {n: b.tensor for n, b in buffers.items()}
    run.aliases = aliases(run.live_outputs, placed) | overlapping(run.live_outputs)
    if run.error is None:
        grads = {n: g for n, g in run.grads.items() if g is not None}
        shared = aliases(grads, _inputs_only(placed))
        # for a + b, autograd returns one tensor as both gradients; it copies the tensor when it stores it in `.grad`
        run.aliases |= {(n, o) for n, o in shared if o not in grads or not _same_view(grads[n], grads[o])}
    run.live_grads = {n: g.detach() for n, g in run.grads.items() if g is not None}
    run.grads = {n: None if g is None else g.detach().clone() for n, g in run.grads.items()}
    if run.second_grads is not None:
        run.second_grads = {n: None if g is None else g.detach().clone() for n, g in run.second_grads.items()}
    results = {name: tensor for name, _, tensor in run.results() if tensor is not None}
    for name, place in stages.items():
        flags.add((STAGE, name), same_numbers(place, tracer.records[name]))
    for number, buffer in enumerate(arena.buffers):
        flags.add((BANDS, str(number)), buffer.untouched())
    for name, buffer in buffers.items():
        flags.add((INPUT, name), buffer.kept())
    for name, tensor in results.items():
        flags.add((NO_NAN, name), no_nan(tensor))
    answers = flags.read()
    problems = {kind: [name for (k, name), holds in answers.items() if k == kind and not holds] for kind, _ in answers}
    run.reused = dict(_reused(tracer, answers))
    run.by_forward = set(problems.get(FORWARD, ()))
    overruns = (arena.buffers[int(number)].overrun() for number in problems.get(BANDS, ()))
    run.overruns = [overrun for overrun in overruns if overrun is not None]
    masks_of_inputs = ((n, buffers[n].changed()) for n in problems.get(INPUT, ()))
    run.changed = {n: mask for n, mask in masks_of_inputs if mask is not None}
    run.overwritten = {n: _differences(run.live_outputs[n], returned[n]) for n in problems.get(BACKWARD, ())}
    for name in problems.get(NO_NAN, ()):
        for masks, look in ((run.unwritten, poison_left), (run.from_bands, band_read)):
            mask = look(results[name])
            if mask is not None:
                masks[name] = mask


def _inputs_only(placed: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The inputs alone. A gradient may share memory with an output gradient, as autograd's addition does."""
    return {n: t for n, t in placed.items() if not n.startswith("grad_")}


def _differences(tensor: Tensor, copy: Tensor) -> Tensor:
    if tensor.shape != copy.shape:
        return torch.ones(copy.shape, dtype=torch.bool)
    return ~((tensor == copy) | ((tensor != tensor) & (copy != copy)))


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
