"""FSDP2 for models with hyper-connections."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import replace

from torch import nn
from torch.distributed import get_world_size
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from ..mhc import HyperConnection, HyperHead
from .expert_parallel import SUMMED


def shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    ignored_params: Set[nn.Parameter] | None = None,
    **options: object,
) -> nn.Module:
    """fully_shard(module), except that fn, base and scale of the hyper-connections in it stay in float32

    Call it where the usual recipe calls `torch.distributed.fsdp.fully_shard`, for every block and then for the whole
    model; mesh, mp_policy and the options are those of fully_shard. With a policy that casts parameters, every
    HyperConnection and HyperHead in `module` becomes a group of its own, which is not cast; its layer and its norm
    become groups with the given policy. Such a group has n (n + 2) (n dim + 1) + 3 numbers, which are gathered in one
    more collective.

    A layer under ExpertParallel becomes a group of its own, too. Its gradients are sums over the ranks of that mesh,
    so they are divided by their number and by that of `mesh`, another dimension. To have FSDP2 and ExpertParallel on
    the same ranks, leave the layer out: ignored_params=set(layer.parameters()), and call average_gradients for it.

    Returns `module`. Raises TypeError for anything but a module and a policy, ValueError for a layer with
    sparse_grad=True and for one that ExpertParallel has put on the same ranks, and what fully_shard raises.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"distributed.shard: module is of type {type(module).__name__}, expected a torch.nn.Module")
    if mp_policy is not None and not isinstance(mp_policy, MixedPrecisionPolicy):
        raise TypeError(
            f"distributed.shard: mp_policy={mp_policy!r}, expected a torch.distributed.fsdp.MixedPrecisionPolicy"
        )
    ignored = set(ignored_params or ())
    for name, part in module.named_modules():
        _check(name or type(part).__name__, part, mesh, ignored)
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    options = {**options, "mesh": mesh, "ignored_params": ignored_params}
    for part in reversed(list(module.modules())):
        if hasattr(part, SUMMED) and not isinstance(part, FSDPModule) and _own(part, ignored):
            group = fully_shard(part, mp_policy=policy, **options)
            ranks = get_world_size() if mesh is None else mesh.size()
            group.set_gradient_divide_factor(ranks * getattr(part, SUMMED))
            # NCCL scales and sums at once, gloo does not
            group.set_force_sum_reduction_for_comms(mesh is not None and mesh.device_type != "cuda")
    if policy.param_dtype is not None:
        uncast = replace(policy, param_dtype=None, cast_forward_inputs=False)
        for part in reversed(list(module.modules())):  # inner ones first: a layer may have connections of its own
            if isinstance(part, (HyperConnection, HyperHead)) and not isinstance(part, FSDPModule):
                for child in part.children():
                    if not isinstance(child, FSDPModule) and any(True for _ in child.parameters()):
                        fully_shard(child, mp_policy=policy, **options)
                fully_shard(part, mp_policy=uncast, **options)
    if not isinstance(module, FSDPModule):
        fully_shard(module, mp_policy=policy, **options)
    return module


def _own(part: nn.Module, ignored: set[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in part.parameters(recurse=False) if parameter not in ignored]


def _check(name: str, part: nn.Module, mesh: DeviceMesh | None, ignored: set[nn.Parameter]) -> None:
    if not _own(part, ignored):
        return
    if getattr(part, "sparse_grad", False) is True:
        raise ValueError(
            f"distributed.shard: {name} has sparse_grad=True, but FSDP2 reduces dense gradients; use sparse_grad=False"
        )
    placed = next((p for p in part.parameters(recurse=False) if isinstance(p, DTensor) and hasattr(part, SUMMED)), None)
    if placed is not None and not isinstance(part, FSDPModule):
        theirs = set(placed.device_mesh.mesh.flatten().tolist())
        own = set(range(get_world_size()) if mesh is None else mesh.mesh.flatten().tolist())
        if len(theirs & own) > 1:
            raise ValueError(
                f"distributed.shard: ExpertParallel has put {name} on ranks {sorted(theirs)}; this mesh has several "
                "of them; pass another dimension of one mesh, or leave the layer out: pass "
                "ignored_params=set(layer.parameters()), and call average_gradients(layer.parameters(), mesh) after "
                "the backward"
            )
