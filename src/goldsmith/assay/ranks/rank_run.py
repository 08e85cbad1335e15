"""What happens on a rank: the candidate runs on the rank's own parts, once, with unwritten memory full of NaN."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate

from ...core.tracing import TargetError
from ..declare.binding import bind, parameters
from ..declare.returned_values import names_of
from ..declare.target import Target
from .layout import Placed
from .target import MESH

MESHES: dict[tuple[object, ...], DeviceMesh] = {}


@dataclass(frozen=True)
class RankCall:
    """One run on one rank; tensors are the rank's parts.

    candidate   the function, or None: `load` returns the target on the rank
    shapes      of the whole inputs, with strides, for DTensors
    grads       inputs whose gradients are wanted; cotangents: {result: its output gradient}
    placements  of every input, cotangent and declared result
    fill        whether memory that the candidate allocates holds NaN until it is written
    """

    candidate: Callable[..., object] | None
    load: Callable[[], Target] | None
    outputs: tuple[str, ...] | None
    dtensors: bool
    device: str
    mesh: dict[str, int]
    inputs: Mapping[str, Tensor]
    scalars: Mapping[str, object]
    shapes: Mapping[str, tuple[tuple[int, ...], tuple[int, ...]]]
    grads: tuple[str, ...]
    cotangents: Mapping[str, Tensor]
    placements: Mapping[str, Placed]
    fill: bool = True


@dataclass(frozen=True)
class RankAnswer:
    """What a rank returns.

    parts     {result or "x.grad": this rank's part, None if it has none}
    changed   names of the inputs that the candidate wrote to
    """

    parts: dict[str, Tensor | None]
    changed: list[str]


def import_target(load: Callable[[], Target]) -> None:
    """Imports what `load` needs, before the time of a call counts."""
    load()


def run(call: RankCall) -> RankAnswer:
    """The candidate's results and gradients on this rank."""
    candidate = call.candidate if call.load is None else call.load().candidate
    if candidate is None:
        raise TargetError("a call needs a candidate, or a function that loads one")
    mesh = _mesh(call.device, call.mesh)
    with _allocations(call.fill):
        leaves = {
            name: t.to(call.device).detach().clone().requires_grad_(name in call.grads)
            for name, t in call.inputs.items()
        }
        given = {name: _wrapped(call, mesh, name, leaf) for name, leaf in leaves.items()} if call.dtensors else leaves
        supply = {**given, **call.scalars}
        if MESH in parameters(candidate):
            supply[MESH] = mesh
        named = dict(names_of(bind("candidate", candidate, supply)(supply), call.outputs, "candidate"))
        results: dict[str, Tensor | None] = {}
        for name, value in named.items():
            if value is not None and not isinstance(value, Tensor):
                raise TargetError(f"{name} is of type {type(value).__name__}, expected a tensor or None")
            results[name] = None if value is None else _own_part(value, mesh, call.placements.get(name))
        if call.grads:
            results |= _gradients(call, mesh, named, leaves)
    parts = {name: None if t is None else t.detach().cpu().clone() for name, t in results.items()}
    changed = [name for name, leaf in leaves.items() if not _same(leaf.detach().cpu(), call.inputs[name])]
    return RankAnswer(parts, changed)


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(), b.nan_to_num()) and torch.equal(a.isnan(), b.isnan())


def _gradients(
    call: RankCall, mesh: DeviceMesh, named: Mapping[str, object], leaves: Mapping[str, Tensor]
) -> dict[str, Tensor | None]:
    arriving = [
        (result, grad.to(call.device))
        for name, grad in call.cotangents.items()
        if isinstance(result := named.get(name), Tensor) and result.requires_grad
    ]
    if not arriving:
        return {f"{name}.grad": None for name in call.grads}
    sent = []
    for result, grad in arriving:
        if isinstance(result, DTensor):
            whole = DTensor.from_local(grad, mesh, [Replicate()] * mesh.ndim, run_check=False)
            sent.append(whole.to(result.dtype).redistribute(placements=_complete(result.placements)))
        else:
            sent.append(grad.to(result.dtype))
    wanted = [leaves[name] for name in call.grads]
    gradients = torch.autograd.grad([r for r, _ in arriving], wanted, sent, allow_unused=True)
    return {
        f"{name}.grad": None if g is None else _own_part(g, mesh, call.placements.get(f"{name}.grad"))
        for name, g in zip(call.grads, gradients, strict=True)
    }


def _complete(placements: Placed) -> list[object]:
    return [Replicate() if p.is_partial() else p for p in placements]


def _wrapped(call: RankCall, mesh: DeviceMesh, name: str, leaf: Tensor) -> DTensor:
    shape, stride = call.shapes[name]
    return DTensor.from_local(
        leaf, mesh, call.placements[name], run_check=False, shape=torch.Size(shape), stride=stride
    )


def _own_part(tensor: Tensor, mesh: DeviceMesh, placed: Placed | None) -> Tensor:
    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.redistribute(placements=placed or [Replicate()] * mesh.ndim).to_local()


def _mesh(device: str, sizes: Mapping[str, int]) -> DeviceMesh:
    key = (device, *sizes.items())
    if key not in MESHES:
        MESHES[key] = init_device_mesh(device, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    return MESHES[key]


@contextlib.contextmanager
def _allocations(fill: bool) -> Iterator[None]:
    """Inside, torch.empty returns NaN if `fill`."""
    before = torch.get_deterministic_debug_mode()
    # use_deterministic_algorithms would import torch's compiler, which takes a second on each rank
    torch.set_deterministic_debug_mode("warn" if fill else "default")
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=".*deterministic")
            yield
    finally:
        torch.set_deterministic_debug_mode(before)
