"""Operators on DTensors: every rank computes its own tokens or its own experts, with the kernels of one process.

The rules follow from the axes' names (axes.py), separately for every dimension of the device mesh:

- Token axes may be sharded, in the same way on all tensors that have them. The first input that is sharded there
  decides.
- The expert axis (`Op(expert_axis=("N", "indices"))`) may be sharded. Every rank then computes its own experts for all
  tokens of that mesh dimension, skips the ids of others, and the results are `Partial("sum")`.
- Everything else is needed whole. DTensor redistributes tensors with another placement, once, before the operator runs.
- A result without token axes, such as a parameter's gradient, is a sum over tokens: `Partial("sum")` where tokens are
  sharded.

A rank without tokens or without experts is an ordinary rank. What an operator draws at random for a token is the same
for every sharding (`Op(numbered=...)`). A token's result has the same bits for every sharding of the tokens if the
backend computes it from that token alone, as Triton kernels do. The references and the grouped experts of a GPU use
torch's products, and the native kernels choose their loops by the number of rows: there it may differ by rounding.

A DTensor holds no sparse gradient, so a sparse one becomes dense: that of a rank's own experts, on that rank.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from .autograd import plain
from .axes import Axes
from .shapes import kind

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Placement


class ShardedOperator(Protocol):
    """The part of an operator's declaration that sharding needs; `Op` (op.py) provides it."""

    name: str
    inputs: tuple[str, ...]
    results: tuple[str, ...]
    axes: dict[str, Axes]
    expert_axis: tuple[str, str] | None
    numbered: str | None

    def check(self, *tensors: Tensor | None, **options: object) -> None: ...

    def fake(self, *tensors: Tensor | None, **options: object) -> tuple[Tensor, ...]: ...

    def all_results(self, *tensors: Tensor | None, backend: str = ..., **options: object) -> dict[str, Tensor]: ...


def has_dtensor(tensors: Sequence[object]) -> bool:
    """Whether one of the tensors is a DTensor. Imports torch.distributed only for subclasses of Tensor."""
    if not torch.distributed.is_available():
        return False
    from torch.distributed.tensor import DTensor

    return any(isinstance(t, DTensor) for t in tensors)


def run(
    op: ShardedOperator, tensors: Sequence[Tensor | None], backend: str, options: Mapping[str, object]
) -> dict[str, Tensor]:
    """The results with declared axes as DTensors, computed by the operator on every rank's own part; differentiable.

    Raises TypeError for plain tensors among DTensors, ValueError for DTensors on different meshes, and whatever the
    operator's own checks raise, which see the whole shapes.
    """
    from torch.distributed.tensor import DTensor

    named = dict(zip(op.inputs, tensors, strict=True))
    if not op.axes:
        raise NotImplementedError(f"{op.name}: takes no DTensors, because its Op(...) does not name its axes")
    mesh = _common_mesh(op, named)
    if not torch.compiler.is_compiling():  # in a graph, the operator checks the shards
        op.check(*tensors, **options)
    layout = _layout(op, named, mesh)
    local: dict[str, Tensor | None] = {}
    for name, tensor in named.items():
        if isinstance(tensor, DTensor):
            placements = layout.of_input(op, name)
            if tuple(tensor.placements) != tuple(placements):
                tensor = tensor.redistribute(mesh, placements)
            part = tensor.to_local(grad_placements=layout.of_gradient(op, name))
            if name in layout.tables and len(part) == 0:  # kernels need an expert; nobody selects this one
                part = torch.cat((part, part.new_zeros(1, *part.shape[1:])))
            may_be_sparse = part.requires_grad and not op.axes[name].per_token and not torch.compiler.is_compiling()
            local[name] = _DenseGradient.apply(part) if may_be_sparse else part
        else:
            local[name] = tensor
    if op.expert_axis is not None and layout.experts is not None:
        ids = op.expert_axis[1]
        local[ids] = _own_ids(local[ids], layout.experts, layout.num_experts, mesh)
    if op.numbered is not None and (seed := local[op.numbered]) is not None:
        local[op.numbered] = _with_numbers(op, seed, named, local, layout, mesh)
    results = op.all_results(*local.values(), backend=backend, **options)
    whole = (None if t is None else torch.empty(t.shape, dtype=t.dtype, device="meta") for t in tensors)
    shapes = op.fake(*whole, **options)
    return {
        name: DTensor.from_local(
            results[name],
            mesh,
            layout.of_gradient(op, name),
            run_check=False,
            shape=like.shape,
            stride=like.stride(),
        )
        for name, like in zip(op.results, shapes, strict=True)
        if name in op.axes
    }


@dataclass(frozen=True)
class _Layout:
    """The placements of the token axes, and which mesh dimension, if any, shards the experts of which inputs."""

    tokens: tuple[Placement, ...]
    experts: int | None
    num_experts: int
    tables: frozenset[str]

    def of_input(self, op: ShardedOperator, name: str) -> list[Placement]:
        from torch.distributed.tensor import Replicate, Shard

        if op.axes[name].per_token:
            return list(self.tokens)
        return [Shard(0) if name in self.tables and d == self.experts else Replicate() for d in range(len(self.tokens))]

    def of_gradient(self, op: ShardedOperator, name: str) -> list[Placement]:
        """The placements of an input's gradient, and those of a result of this name."""
        from torch.distributed.tensor import Partial, Shard

        placements: list[Placement] = []
        for dimension, tokens in enumerate(self.tokens):
            if dimension == self.experts:
                placements.append(Shard(0) if name in self.tables else Partial("sum"))
            else:
                summed = tokens.is_shard() and not op.axes[name].per_token
                placements.append(Partial("sum") if summed else tokens)
        return placements


def _layout(op: ShardedOperator, named: Mapping[str, Tensor | None], mesh: DeviceMesh) -> _Layout:
    from torch.distributed.tensor import DTensor, Replicate, Shard

    sharded = {name: t for name, t in named.items() if isinstance(t, DTensor)}
    counted = op.expert_axis and op.expert_axis[:1]
    tables = frozenset(name for name, t in sharded.items() if op.axes[name].of(t).names[:1] == counted)
    tokens: list[Placement] = []
    experts, num_experts = None, 0
    for dimension in range(mesh.ndim):
        chosen: Placement = Replicate()
        for name, tensor in sharded.items():
            placement = tensor.placements[dimension]
            if type(placement) is not Shard:
                continue
            if placement.dim == 0 and experts is None and name in tables:
                experts, num_experts, chosen = dimension, tensor.shape[0], Replicate()
                break
            if placement.dim < op.axes[name].token_axes(tensor) and not chosen.is_shard():
                chosen = placement
        tokens.append(chosen)
    return _Layout(tuple(tokens), experts, num_experts, tables)


class _DenseGradient(torch.autograd.Function):
    """The tensor itself; a sparse gradient becomes dense."""

    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: object, grad: Tensor) -> Tensor:
        return grad.to_dense() if grad.layout is not torch.strided else grad


def _with_numbers(
    op: ShardedOperator,
    seed: Tensor,
    named: Mapping[str, Tensor | None],
    local: Mapping[str, Tensor | None],
    layout: _Layout,
    mesh: DeviceMesh,
) -> Tensor:
    """The seed, followed by the row that each of this rank's tokens has among all; the seed itself if it has all."""
    first = next(name for name, t in named.items() if t is not None and op.axes[name].per_token)
    whole, own = named[first], local[first]
    if seed.numel() != 1 or whole is None or own is None or not any(p.is_shard() for p in layout.tokens):
        return seed
    batch = whole.shape[: op.axes[first].token_axes(whole)]
    rows = torch.arange(math.prod(batch), device=seed.device).view(batch)
    for dimension, placement in enumerate(layout.tokens):
        if placement.is_shard():
            size = rows.shape[placement.dim]
            begin, end = _span(size, mesh.size(dimension), mesh.get_local_rank(dimension))
            rows = rows.narrow(placement.dim, begin, end - begin)
    if rows.shape != own.shape[: len(batch)]:
        raise ValueError(
            f"{op.name}: this rank has tokens {list(own.shape[: len(batch)])} of {list(batch)}, but DTensor's chunks "
            f"give it {list(rows.shape)}; {op.numbered} needs to know which tokens these are: use distribute_tensor"
        )
    return torch.cat((seed.reshape(1), rows.reshape(-1)))


def _span(size: int, parts: int, index: int) -> tuple[int, int]:
    """First and behind the last index of a rank's part of an axis, by DTensor's rule."""
    rows = -(-size // parts)
    begin = min(size, rows * index)
    return begin, min(size, begin + rows)


def _own_ids(ids: Tensor | None, dimension: int, num_experts: int, mesh: DeviceMesh) -> Tensor | None:
    """Ids counted from this rank's first expert; -1, which operators skip, for experts of other ranks."""
    if ids is None:
        return None
    rows, rank = -(-num_experts // mesh.size(dimension)), mesh.get_local_rank(dimension)
    exists = (ids >= 0) & (ids < num_experts)
    own = exists & (ids // rows == rank)
    # an id that no rank has stays as it is, so that the operator reports it
    return torch.where(own, ids - rows * rank, ids.masked_fill(exists, -1))


def _common_mesh(op: ShardedOperator, named: Mapping[str, Tensor | None]) -> DeviceMesh:
    from torch.distributed.tensor import DTensor

    meshes = {name: t.device_mesh for name, t in named.items() if isinstance(t, DTensor)}
    first, mesh = next(iter(meshes.items()))
    for name, tensor in named.items():
        if isinstance(tensor, DTensor):
            if meshes[name] != mesh:
                raise ValueError(
                    f"{op.name}: {name} is on {meshes[name]}, but {first} is on {mesh}; "
                    f"use one mesh: {name}.redistribute works only within a mesh, {name}.full_tensor() leaves it"
                )
        elif isinstance(tensor, Tensor) and not (op.axes[name].is_any and not tensor.requires_grad):
            raise TypeError(
                f"{op.name}: {name} is {kind(tensor)}, but {first} is a DTensor on {mesh}; expected DTensors only: "
                f"distribute_tensor({name}, mesh), or distribute_module for the parameters of a module"
            )
    return mesh


def parts(tensor: Tensor) -> tuple[Tensor, Callable[[Tensor], Tensor]]:
    """The tensor that holds this rank's numbers, and a function that gives such a tensor the DTensor's placements.

    For a plain tensor: itself and the identity.
    """
    if not plain((tensor,)) and has_dtensor((tensor,)):
        from torch.distributed.tensor import DTensor

        if isinstance(tensor, DTensor):
            mesh, placements, shape, stride = tensor.device_mesh, tensor.placements, tensor.shape, tensor.stride()

            def whole(own: Tensor) -> Tensor:
                return DTensor.from_local(own, mesh, placements, run_check=False, shape=shape, stride=stride)

            return tensor.detach().to_local(), whole
    return tensor, lambda own: own
