"""The mean of all gradients over ranks that have different rows, for any placement of the parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from .ordered_sums import agreed, group_for, sum_in_rank_order

OP = "distributed.average_gradients"


@torch.no_grad()
def average_gradients(parameters: Iterable[Tensor], mesh: DeviceMesh) -> None:
    """g = (sum of the ranks' g) / (number of ranks of mesh), for plain parameters and DTensors at once

    For models in which only some parameters are DTensors, such as layers under ExpertParallel, and in which each rank
    has the loss of its own rows. A plain gradient is summed over the mesh, in the order of ranks, so that it repeats; a
    gradient on the CPU goes through gloo, even if the mesh has NCCL. A parameter that some ranks have not used counts
    as zeros there. A DTensor's gradient is summed where it is `Partial`, and a shard of experts holds the sum already;
    both are divided like the others. On a mesh of several dimensions, give names to them: a DTensor's gradient is then
    also summed over the dimensions that its own mesh lacks. FSDP2 takes this mean by itself, so leave its parameters
    out. Raises TypeError for anything but tensors and a mesh and for a sparse gradient, and ValueError for a DTensor on
    a mesh whose dimensions this one does not have, for a DTensor with a gradient on some ranks only, and for ranks with
    different parameters; the last two on all ranks.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"{OP}: mesh is of type {type(mesh).__name__}, expected a DeviceMesh of all ranks with own rows"
        )
    owners = list(parameters)
    other = next((owner for owner in owners if not isinstance(owner, Tensor)), None)
    if other is not None:
        raise TypeError(f"{OP}: parameters has a {type(other).__name__}, expected tensors")
    trained = [p for p in owners if p.requires_grad]
    _complete(trained, mesh)
    missing: dict[tuple[int, str], list[Tensor]] = {}  # by mesh dimension and device: what is still to be summed there
    means: list[Tensor] = []
    for parameter in trained:
        gradient = parameter.grad
        if gradient is None:
            continue
        own = set(range(mesh.ndim))
        if isinstance(gradient, DTensor):
            own -= _dimensions(gradient.device_mesh, mesh)
            whole = [Replicate() if p.is_partial() else p for p in gradient.placements]
            parameter.grad = gradient = gradient.redistribute(placements=whole)
        local = gradient.to_local() if isinstance(gradient, DTensor) else gradient
        for dimension in own:
            missing.setdefault((dimension, local.device.type), []).append(local)
        means.append(local)
    for (dimension, _), gradients in sorted(missing.items(), key=lambda item: item[0]):
        sum_in_rank_order(gradients, mesh.get_group(dimension))
    for local in means:
        local.div_(mesh.size())


def _complete(parameters: Sequence[Tensor], mesh: DeviceMesh) -> None:
    """Gives zeros to a plain parameter without a gradient if it has one on another rank."""
    for index, parameter in enumerate(parameters):
        if isinstance(parameter.grad, Tensor) and parameter.grad.layout is not torch.strided:
            raise TypeError(
                f"{OP}: the gradient of parameter {index}, {list(parameter.shape)}, is sparse, expected dense"
            )
    has = torch.tensor([parameter.grad is not None for parameter in parameters], dtype=torch.uint8)
    some = has.clone()
    for dimension in range(mesh.ndim):
        group = mesh.get_group(dimension)
        agreed(OP, [str(list(parameter.shape)) for parameter in parameters], group)
        if len(has):
            torch.distributed.all_reduce(some, torch.distributed.ReduceOp.MAX, group=group_for("cpu", group))
    every = has.clone()
    for dimension in range(mesh.ndim if len(has) else 0):
        group = group_for("cpu", mesh.get_group(dimension))
        torch.distributed.all_reduce(every, torch.distributed.ReduceOp.MIN, group=group)
    for index, parameter in enumerate(parameters):
        if some[index] and not every[index] and isinstance(parameter, DTensor):
            raise ValueError(
                f"{OP}: parameter {index}, {list(parameter.shape)}, is a DTensor and has a gradient on some ranks "
                "only; call its layer on every rank, also without tokens"
            )
        if some[index] and not has[index]:
            parameter.grad = torch.zeros_like(parameter)


def _dimensions(inner: DeviceMesh, mesh: DeviceMesh) -> set[int]:
    """Which dimensions of the mesh are those of `inner`, by name; all of them for one and the same mesh."""
    if inner == mesh:
        return set(range(mesh.ndim))
    names = mesh.mesh_dim_names or ()
    if not set(inner.mesh_dim_names or ("",)) <= set(names):
        raise ValueError(
            f"{OP}: a parameter is on {inner}, whose dimensions {mesh} does not have; "
            "expected the mesh from which the parameter's mesh was taken, with names of its dimensions"
        )
    return {names.index(name) for name in inner.mesh_dim_names or ()}
