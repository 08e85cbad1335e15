"""A sharded computation as a candidate: it takes whole tensors, runs on ranks, and returns whole tensors.

    candidate = sharded(mhc.post, ranks=2, placements={"x": Shard(1), "f": Shard(1), ...})
    assay.check(assay.Target(candidate, golden, cases=...))

Each rank receives every input as a DTensor on a mesh of all ranks, calls the function, and returns its results and, in
the backward, its gradients as whole tensors. All ranks must return the same numbers, bit for bit.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from ...core.tracing import TargetError
from .pool import RankError, RankGroup, RankPool

Placements = Mapping[str, Placement | Sequence[Placement]]


class Sharded:
    """A function on several ranks; call it like the function itself, with whole tensors. Differentiable."""

    def __init__(
        self, function: Callable[..., object], shape: tuple[int, ...], placements: Placements, pool: RankGroup
    ) -> None:
        self.function, self.shape, self.placements, self.pool = function, shape, placements, pool
        functools.update_wrapper(self, function)
        self.__signature__ = inspect.signature(function)

    def __call__(self, *args: object, **kwargs: object) -> object:
        bound = self.__signature__.bind(*args, **kwargs)
        values = dict(bound.arguments)
        extra = [p.name for p in self.__signature__.parameters.values() if p.kind is inspect.Parameter.VAR_KEYWORD]
        for name in extra:
            values |= values.pop(name, {})
        tensors = {name: value for name, value in values.items() if isinstance(value, Tensor)}
        others = {name: value for name, value in values.items() if name not in tensors}
        return _OnRanks.apply(self, tuple(tensors), others, *tensors.values())

    def placed(self, name: str) -> tuple[Placement, ...]:
        placements = self.placements.get(name, Replicate())
        return (placements,) * len(self.shape) if isinstance(placements, Placement) else tuple(placements)


def sharded(
    function: Callable[..., object],
    ranks: int | tuple[int, ...] | RankGroup,
    *,
    placements: Placements,
    mesh: tuple[int, ...] | None = None,
) -> Sharded:
    """`function` as a candidate that runs on `ranks` processes (or in a RankPool), on a mesh of all of them

    function    any importable function of DTensors that returns one or several
    placements  {input: Shard(0), Replicate(), or one for each dimension of the mesh}; inputs without one are replicated
    mesh        the mesh's shape, such as (2, 2); default: one dimension

    Raises TargetError for an input that the function does not have, or a mesh that does not fit the ranks. An error of
    a rank raises RankError, which names it.
    """
    started = isinstance(ranks, int | tuple)
    pool: RankGroup = RankPool(ranks if isinstance(ranks, int) else _product(ranks)) if started else ranks  # type: ignore
    shape = mesh or (pool.world,)
    if _product(shape) != pool.world:
        raise TargetError(f"mesh: {shape} has {_product(shape)} places, but there are {pool.world} ranks")
    parameters = inspect.signature(function).parameters
    unknown = [name for name in placements if name not in parameters]
    if unknown and not any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values()):
        raise TargetError(f"placements: {unknown} are no inputs of {function.__name__}; there are: {list(parameters)}")
    candidate = Sharded(function, shape, placements, pool)
    if started:
        weakref.finalize(candidate, pool.close)
    return candidate


def _product(shape: Sequence[int]) -> int:
    return functools.reduce(int.__mul__, shape, 1)


class _OnRanks(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, candidate: Sharded, names: tuple[str, ...], others: dict[str, Any], *tensors: Tensor) -> Any:
        ctx.candidate, ctx.needs = candidate, [*ctx.needs_input_grad[3:]]
        ctx.set_materialize_grads(False)
        call = (
            candidate.function,
            candidate.pool.device,
            candidate.shape,
            {name: candidate.placed(name) for name in names},
            {name: t.detach().cpu() for name, t in zip(names, tensors, strict=True)},
            [name for name, need in zip(names, ctx.needs, strict=True) if need],
            others,
        )
        answers = candidate.pool.run(_forward, [call] * candidate.pool.world)
        single, results = _agreed(answers)
        device = tensors[0].device
        whole = tuple(t.to(device) for t in results)
        ctx.mark_non_differentiable(*(t for t in whole if not t.is_floating_point()))
        return whole[0] if single else whole

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Any, ...]:
        sent = [None if g is None else g.detach().cpu() for g in grads]
        _, gradients = _agreed(ctx.candidate.pool.run(_backward, [(sent,)] * ctx.candidate.pool.world))
        incoming = iter(gradients)
        device = next(g for g in grads if g is not None).device
        out = [_moved(next(incoming), device) if need else None for need in ctx.needs]
        return (None, None, None, *out)


def _moved(gradient: Tensor | None, device: torch.device) -> Tensor | None:
    return None if gradient is None else gradient.to(device)


def _agreed(answers: list[tuple[bool, list[Tensor | None]]]) -> tuple[bool, list[Any]]:
    """The first rank's results, after a comparison with those of all others."""
    first = answers[0]
    for rank, (_, results) in enumerate(answers[1:], 1):
        for index, (first_result, own) in enumerate(zip(first[1], results, strict=True)):
            if (first_result is None) != (own is None):
                raise RankError(f"result {index} is missing on rank {rank if own is None else 0} only")
            if first_result is not None and own is not None and not _same_bits(first_result, own):
                raise RankError(f"result {index} differs between rank 0 and rank {rank}")
    return first


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(torch.nan_to_num(a), torch.nan_to_num(b))


# in the ranks

_GRAPH: dict[str, Any] = {}
MESHES: dict[tuple[int, ...], DeviceMesh] = {}


def _forward(
    function: Callable[..., Any],
    device: str,
    shape: tuple[int, ...],
    placements: Mapping[str, tuple[Placement, ...]],
    tensors: Mapping[str, Tensor],
    needed: list[str],
    others: Mapping[str, object],
) -> tuple[bool, list[Tensor]]:
    if shape not in MESHES:
        MESHES[shape] = init_device_mesh(device, shape)
    mesh = MESHES[shape]
    leaves, inputs = {}, {}
    for name, tensor in tensors.items():
        leaves[name] = tensor.to(device).requires_grad_(name in needed)
        whole = DTensor.from_local(leaves[name], mesh, [Replicate()] * mesh.ndim, run_check=False)
        inputs[name] = whole.redistribute(mesh, placements[name])
    results = function(**inputs, **others)
    single = not isinstance(results, (tuple, list))
    results = [results] if single else list(results)
    whole_results = [r.full_tensor() if isinstance(r, DTensor) else r for r in results]
    _GRAPH.update(results=whole_results, leaves=[leaves[name] for name in needed])
    return single, [r.detach().cpu() for r in whole_results]


def _backward(grads: list[Tensor | None]) -> tuple[bool, list[Tensor | None]]:
    results, leaves = _GRAPH["results"], _GRAPH["leaves"]
    pairs = [(r, g.to(r.device)) for r, g in zip(results, grads, strict=True) if g is not None and r.requires_grad]
    gradients = torch.autograd.grad(
        [r for r, _ in pairs], leaves, [g for _, g in pairs], allow_unused=True, retain_graph=True
    )
    return False, [None if g is None else g.cpu() for g in gradients]


__all__ = ["Placement", "Replicate", "Shard", "Sharded", "sharded"]
