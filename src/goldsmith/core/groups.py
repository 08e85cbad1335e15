"""Sums over ranks that have tokens of their own: a process group's, or those of DTensors with sharded token axes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias, Union, cast

import torch
from torch import Tensor

from .shapes import kind
from .sharding import has_dtensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = Union["ProcessGroup", "DeviceMesh"]


class TokenRanks:
    """The ranks whose tokens count together, and this rank's part of the tensors.

    tensors   plain tensors; of DTensors, the parts. Their leading axes count tokens, the last does not
    group     ranks of which each has plain tensors of its own, or DTensors of its own
    """

    def __init__(self, op: str, tensors: Sequence[Tensor], group: Group | None) -> None:
        self._groups: list[ProcessGroup] = [] if group is None else _groups(op, group)
        self._averaged = 1
        for one in self._groups:
            self._averaged *= one.size()
        self._mesh: DeviceMesh | None = None
        self.tensors = tuple(tensors)
        if has_dtensor(tensors):
            self.tensors = self._parts(op, tensors)

    def sum(self, value: Tensor) -> Tensor:
        """The sum over the ranks; differentiable. All ranks must call it.

        Over DTensors' ranks, the gradient is the result's: they have one loss. Over the group's, it is that times their
        number: if every rank uses the sum in an equal loss, and the ranks' gradients are averaged, as DDP and FSDP do,
        the average is the gradient of that loss in one process.
        """
        return cast(Tensor, _Summed.apply(self, value)) if self._groups else value

    def count(self, value: Tensor) -> Tensor:
        """The sum over the ranks, in rank order, so that it repeats; without a gradient."""
        for one in self._groups:
            parts = [torch.empty_like(value) for _ in range(one.size())]
            torch.distributed.all_gather(parts, value.contiguous(), group=one)
            value = parts[0]
            for part in parts[1:]:
                value = value + part
        return value

    def result(self, value: Tensor) -> Tensor:
        """A number that all ranks have: replicated if the tensors are DTensors."""
        if self._mesh is None:
            return value
        from torch.distributed.tensor import DTensor, Replicate

        return DTensor.from_local(value, self._mesh, [Replicate()] * self._mesh.ndim, run_check=False)

    def _parts(self, op: str, tensors: Sequence[Tensor]) -> tuple[Tensor, ...]:
        from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

        plain = next((t for t in tensors if not isinstance(t, DTensor)), None)
        if plain is not None:
            raise TypeError(f"{op}: one argument is {kind(plain)}, and another a DTensor; expected DTensors only")
        placed = [t for t in tensors if isinstance(t, DTensor)]
        self._mesh = mesh = placed[0].device_mesh
        if any(t.device_mesh != mesh for t in placed):
            raise ValueError(f"{op}: the DTensors are on different meshes; expected one mesh")
        chosen: list[Placement] = []
        for dimension in range(mesh.ndim):
            own = (t.placements[dimension] for t in placed)
            tokens = (p for t, p in zip(placed, own, strict=True) if type(p) is Shard and p.dim < t.dim() - 1)
            chosen.append(next(tokens, Replicate()))
        self._groups += [mesh.get_group(d) for d, p in enumerate(chosen) if p.is_shard()]
        return tuple(t.redistribute(mesh, chosen).to_local(grad_placements=chosen) for t in placed)


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, ranks: TokenRanks, value: Tensor) -> Tensor:
        ctx.averaged = ranks._averaged
        return ranks.count(value)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor]:
        return None, grad * ctx.averaged


def _groups(op: str, group: Group) -> list[ProcessGroup]:
    from torch.distributed import GroupMember, ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        return [group.get_group(dimension) for dimension in range(group.ndim)]
    if group is GroupMember.NON_GROUP_MEMBER:
        raise ValueError(f"{op}: this rank is not in the group; only its ranks call this")
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"{op}: group is of type {type(group).__name__}, expected a ProcessGroup or a DeviceMesh")
    return [group]
