"""Sums over the ranks of a process group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias, Union, cast

import torch
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

Group: TypeAlias = Union["ProcessGroup", "DeviceMesh"]


def summed_without_gradient(op: str, value: Tensor, group: Group | None) -> Tensor:
    """The sum over the group's ranks, in rank order, so that it repeats; `value` itself without a group."""
    if group is None:
        return value
    for one in _groups(op, group):
        parts = [torch.empty_like(value) for _ in range(one.size())]
        torch.distributed.all_gather(parts, value.contiguous(), group=one)
        value = parts[0]
        for part in parts[1:]:
            value = value + part
    return value


def summed(op: str, value: Tensor, group: Group | None) -> Tensor:
    """The sum over the group's ranks; its gradient is the number of ranks times the result's.

    If every rank uses the sum in an equal loss, and the ranks' gradients are averaged, as DDP and FSDP do, the average
    is the gradient of that loss in one process.
    """
    return value if group is None else cast(Tensor, _Summed.apply(op, value, group))


class _Summed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, op: str, value: Tensor, group: Group) -> Tensor:
        ctx.ranks = 1
        for one in _groups(op, group):
            ctx.ranks *= one.size()
        return summed_without_gradient(op, value, group)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[None, Tensor, None]:
        return None, grad * ctx.ranks, None


def _groups(op: str, group: Group) -> list[ProcessGroup]:
    from torch.distributed import ProcessGroup
    from torch.distributed.device_mesh import DeviceMesh

    if isinstance(group, DeviceMesh):
        return [group.get_group(dimension) for dimension in range(group.ndim)]
    if not isinstance(group, ProcessGroup):
        raise TypeError(f"{op}: group is of type {type(group).__name__}, wanted a ProcessGroup or a DeviceMesh")
    return [group]
