"""Plain calls: the candidate as a user calls it, many times, without anything of the assay's around it.

All calls get the same tensors, into which the numbers of another draw are written between calls, through `.data`, so
that neither address, identity, shape nor version of an input says that it has changed.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from contextlib import nullcontext

import torch
from torch import Tensor

from ...core.tracing import TargetError
from ..declare.returned_values import name_gradients, names_of, only_tensors
from ..declare.target import Target
from ..support import memory_errors
from ..support.output_gradients import gradients_of
from .interpreted_kernels import interpreted_kernels
from .memory import overlap
from .records import CandidateRun, Material, PlainCalls, PlainResults
from .torch_state import restored_settings

_WATCHED = 8  # calls whose results are watched
LEAST = 5  # calls to make, however long they take
_BYTES = 16 << 20  # of all results
_LONG_WATCH = 0.25  # seconds, where the candidate left threads running


def plain_calls(material: Material, calls: PlainCalls) -> CandidateRun:
    """The results of all calls; `error` is set where one of them raised."""
    run, results = CandidateRun(), PlainResults()
    materials = (material, *calls.others)
    placed = {n: t.detach().clone() for n, t in material.inputs.items()}
    threads = set(threading.enumerate())
    with (
        restored_settings(run.changed_settings),
        interpreted_kernels() if material.device.type == "cpu" else nullcontext(),
    ):
        try:
            live = _calls(materials, calls, placed, run, results)
        except (Exception, SystemExit) as error:
            if isinstance(error, TargetError) or memory_errors.of_a_gpu(error):
                raise  # a mistake of the user or a limit of the machine, not of the kernel
            run.error = error
            return run
        left = [t for t in threading.enumerate() if t not in threads]
        results.threads = len(left)
        if left or calls.watch:
            time.sleep(_LONG_WATCH if left else calls.watch)
        if material.device.type == "cuda":
            torch.cuda.synchronize(material.device)
    results.late = [(i, n) for i, n, t in live if not _same(t, results.outputs[i][n])]
    run.plain = results
    return run


def _calls(
    materials: tuple[Material, ...],
    calls: PlainCalls,
    placed: dict[str, Tensor],
    run: CandidateRun,
    results: PlainResults,
) -> list[tuple[int, str, Tensor]]:
    """Makes the calls; returns the watched results (call, name, the tensor itself)."""
    target, live, size = materials[0].target, list[tuple[int, str, Tensor]](), 0
    wanted = target.wanted_grads(placed) if target.backward is not None else ()
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
        torch.default_generator.manual_seed(material.seed)
        with_grads = number in calls.backward and bool(wanted)
        for name in wanted:
            placed[name].requires_grad_(with_grads and target.backward == "auto")
        supply = material.ordered({n: t.clone() if n in target.mutates else t for n, t in placed.items()})
        result = target.bound("candidate", supply)(supply)
        pairs = names_of(result, target.outputs, "candidate", unavailable=unavailable_names(target, supply))
        named = only_tensors(pairs, "candidate")
        run.names = tuple(n for n, _ in pairs)
        labels = {n: f"saved.{n}" if n in target.saved else n for n in named}
        returned = {labels[n]: t.detach().clone() for n, t in named.items()}
        results.outputs.append(_known(returned, latest.get(which)))
        latest[which] = results.outputs[-1]
        size += sum(t.numel() * t.element_size() for t in named.values())
        if number < _WATCHED:
            own = [(n, t) for n, t in named.items() if not any(overlap(t, p) for p in placed.values())]
            live += [(number, labels[n], t.detach()) for n, t in own]  # calls write into the inputs themselves
        if with_grads:
            _backward(material, target, supply, placed, named, wanted, number, results)
    return live


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
    named: Mapping[str, Tensor], wanted: tuple[str, ...], number: int, results: PlainResults,
) -> None:  # fmt: skip
    visible = {n: t for n, t in named.items() if n not in target.saved and t.is_floating_point()}
    if target.backward == "auto":
        visible = {n: t for n, t in visible.items() if t.requires_grad}
    if not visible:
        return
    sent = {n: material.cotangent(n, t) for n, t in visible.items()}
    if target.backward == "auto":
        autograd_results = gradients_of(
            list(visible.values()), [placed[n] for n in wanted], list(sent.values()), retain_graph=True
        )
        grads = {f"{n}.grad": g for n, g in zip(wanted, autograd_results, strict=True)}
    else:
        names = {**supply, **named, **{f"grad_{n}": t for n, t in sent.items()}}
        result = target.bound("backward", names)(names)
        grads = {f"{n}.grad": g for n, g in name_gradients(result, wanted, "backward").items()}
    results.grads[number] = {n: _copy(g) for n, g in grads.items()}
    results.cotangents[number] = sent


def _copy(grad: Tensor | None) -> Tensor | None:
    if grad is None:
        return None
    return (grad if grad.layout == torch.strided else grad.to_dense()).detach().clone()


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
