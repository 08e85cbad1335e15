"""FSDP2 for models with hyper-connections."""

from __future__ import annotations

from dataclasses import replace

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

from ..mhc import HyperConnection, HyperHead


def shard(
    module: nn.Module,
    *,
    mesh: DeviceMesh | None = None,
    mp_policy: MixedPrecisionPolicy | None = None,
    **options: object,
) -> nn.Module:
    """fully_shard(module), except that fn, base and scale of the hyper-connections in it stay in float32

    Call it where the usual recipe calls `torch.distributed.fsdp.fully_shard`, for every block and then for the whole
    model; mesh, mp_policy and the options are those of fully_shard. With a policy that casts parameters, every
    HyperConnection and HyperHead in `module` becomes a group of its own, which is not cast; its layer and its norm
    become groups with the given policy. Such a group has n (n + 2) (n dim + 1) + 3 numbers, which are gathered in one
    more collective. Returns `module`. Raises TypeError for anything but a module, and what fully_shard raises.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"distributed.shard: module is of type {type(module).__name__}, wanted a torch.nn.Module")
    policy = MixedPrecisionPolicy() if mp_policy is None else mp_policy
    options = {**options, "mesh": mesh}
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
