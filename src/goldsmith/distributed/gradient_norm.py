"""One norm of all gradients, for any placement of the parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor, Replicate


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
    placements, plain tensors, on GPUs and on the CPU. Every number counts once, however many ranks hold it. Plain
    gradients count as equal on all ranks. A gradient that is `Partial` is reduced first, once, and stays reduced. The
    norm is a float64 scalar on the CPU, which is equal on all ranks. `stages` is the group of a pipeline's ranks, each
    of which gives the parameters of its own stage: then the norm is that of all of them. Raises ValueError for max_norm
    < 0 or NaN, and RuntimeError for a norm that is not finite if error_if_nonfinite is True.
    """
    if not max_norm >= 0:
        raise ValueError(f"distributed.clip_grad_norm: max_norm={max_norm!r}, wanted a number of at least 0")
    if not norm_type > 0:
        raise ValueError(f"distributed.clip_grad_norm: norm_type={norm_type!r}, wanted a number above 0, or inf")
    owners = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    gradients = []
    for owner in owners:
        if isinstance(owner.grad, DTensor) and any(p.is_partial() for p in owner.grad.placements):
            whole = [Replicate() if p.is_partial() else p for p in owner.grad.placements]
            owner.grad = owner.grad.redistribute(placements=whole)
        if owner.grad is not None:
            gradients.append(owner.grad)
    norms = torch.tensor([_norm(g, norm_type) for g in gradients], dtype=torch.float64)
    if stages is not None:
        every: list[Any] = [None] * stages.size()
        torch.distributed.all_gather_object(every, norms.tolist(), group=stages)
        norms = torch.tensor([norm for own in every for norm in own], dtype=torch.float64)
    total = torch.linalg.vector_norm(norms, norm_type) if len(norms) else torch.zeros((), dtype=torch.float64)
    if error_if_nonfinite and not math.isfinite(total):
        raise RuntimeError(
            f"distributed.clip_grad_norm: the norm of order {norm_type} is {total.item()}, so nothing was clipped; "
            "goldsmith.assay.watch finds the first operation that is not finite"
        )
    scale = min(1.0, max_norm / (total.item() + 1e-6))
    if scale < 1.0 or math.isnan(scale):
        for gradient in gradients:
            gradient.mul_(scale)
    return total


def _norm(gradient: Tensor, norm_type: float) -> float:
    norm = torch.linalg.vector_norm(gradient, norm_type, dtype=torch.float64)
    return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)
