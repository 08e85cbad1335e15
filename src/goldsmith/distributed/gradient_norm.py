"""One norm of all gradients, for any placement of the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from numbers import Real
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .ordered_sums import group_for


@torch.no_grad()
def clip_grad_norm(
    parameters: Tensor | Iterable[Tensor],
    max_norm: float,
    *,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    stages: ProcessGroup | None = None,
) -> Tensor:
    """norm = (sum over all gradients of |g|^p)^(1/p);   g *= min(1, max_norm / norm)

    Like torch.nn.utils.clip_grad_norm_, for parameters of different kinds at once: DTensors of any meshes and
    placements, plain tensors, dense and sparse, on GPUs and on the CPU. Every number counts once, however many ranks
    hold it. Plain gradients count as equal on all ranks. A DTensor's gradient gets the placements of its parameter
    first; one that is `Partial` is so reduced, once, and stays reduced. Ranks exchange one number for each mesh and
    each set of its dimensions that shards a parameter, through gloo. The norm is a float64 scalar on the CPU, which is
    equal on all ranks. `stages` is the group of a pipeline's ranks, each of which gives the parameters of its own
    stage: then the norm is that of all of them. Raises TypeError for anything but tensors, ValueError for max_norm < 0
    or NaN, and RuntimeError for a norm that is not finite if error_if_nonfinite is True.
    """
    for name, value in (("max_norm", max_norm), ("norm_type", norm_type)):
        if not isinstance(value, (Real, Tensor)):
            raise TypeError(f"distributed.clip_grad_norm: {name}={value!r}, expected a number")
    if not max_norm >= 0:
        raise ValueError(f"distributed.clip_grad_norm: max_norm={max_norm!r}, expected a number of at least 0")
    if not norm_type > 0:
        raise ValueError(f"distributed.clip_grad_norm: norm_type={norm_type!r}, expected a number above 0, or inf")
    owners = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    other = next((owner for owner in owners if not isinstance(owner, Tensor)), None)
    if other is not None:
        raise TypeError(f"distributed.clip_grad_norm: parameters has a {type(other).__name__}, expected tensors")
    norms = _norms(owners, float(norm_type))
    if stages is not None:
        every: list[Any] = [None] * stages.size()
        torch.distributed.all_gather_object(every, norms.tolist(), group=stages)
        norms = torch.tensor([norm for own in every for norm in own], dtype=torch.float64)
    total = _of_norms(norms, float(norm_type))
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"distributed.clip_grad_norm: the norm of order {norm_type} is {total.item()}, so nothing was clipped; "
            "goldsmith.assay.watch finds the first operation that is not finite"
        )
    scale = min(1.0, float(max_norm) / (total.item() + 1e-6))
    if scale < 1.0 or math.isnan(scale):
        for owner in owners:
            if owner.grad is not None:
                owner.grad.mul_(scale)
    return total


def _norms(owners: Sequence[Tensor], norm_type: float) -> Tensor:
    """The norms of the plain gradients, and one for all DTensors that are sharded over the same ranks."""
    plain: list[Tensor] = []
    shards: dict[tuple[DeviceMesh, tuple[int, ...]], list[Tensor]] = {}  # all ranks have the same keys in one order
    for owner in owners:
        gradient = owner.grad
        if isinstance(owner, DTensor):
            sharded = tuple(d for d, p in enumerate(owner.placements) if not (p.is_replicate() or p.is_partial()))
            own = shards.setdefault((owner.device_mesh, sharded), [])
            if isinstance(gradient, DTensor):
                if gradient.placements != owner.placements:
                    owner.grad = gradient = gradient.redistribute(placements=owner.placements)
                own.append(_norm(gradient.to_local(), norm_type))
        elif gradient is not None:
            plain.append(_norm(gradient, norm_type))
    norms = [_stacked(plain)]
    for (mesh, dimensions), values in shards.items():
        norm = _of_norms(_stacked(values), norm_type)
        for dimension in dimensions:
            group = group_for("cpu", mesh.get_group(dimension))
            parts = [torch.empty_like(norm) for _ in range(mesh.size(dimension))]
            torch.distributed.all_gather(parts, norm, group=group)
            norm = _of_norms(torch.stack(parts), norm_type)
        norms.append(norm.reshape(1))
    return torch.cat(norms)


def _norm(gradient: Tensor, norm_type: float) -> Tensor:
    values = gradient.coalesce().values() if gradient.is_sparse else gradient
    if not values.numel():  # a rank without a part; the maximum of nothing is an error
        return values.new_zeros((), dtype=torch.float64)
    return torch.linalg.vector_norm(values, norm_type, dtype=torch.float64)


def _stacked(norms: Sequence[Tensor]) -> Tensor:
    """The norms on the CPU; of a device with several, in one copy."""
    by_device: dict[torch.device, list[int]] = {}
    for index, norm in enumerate(norms):
        by_device.setdefault(norm.device, []).append(index)
    result = torch.zeros(len(norms), dtype=torch.float64)
    for indices in by_device.values():
        result[indices] = torch.stack([norms[index] for index in indices]).cpu()
    return result


def _of_norms(norms: Tensor, norm_type: float) -> Tensor:
    return torch.linalg.vector_norm(norms, norm_type) if norms.numel() else torch.zeros((), dtype=torch.float64)
