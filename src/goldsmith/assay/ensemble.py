"""Noise of an honest implementation: the golden in compute precision, every sum in a random legal order (stub)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor


def legal_runs(
    fn: Callable[[dict[str, Tensor]], dict[str, Tensor]],
    leaves: Mapping[str, Tensor],
    *,
    compute: torch.dtype,
    stores: Mapping[str, torch.dtype],
    k: int = 8,
    seed: int = 0,
    dot: str = "ieee",
) -> list[dict[str, Tensor]]:
    """k runs of `fn` in `compute` precision, each with every reduction in its own random legal order.

    leaves: float64 tensors (they are cast to `compute`; integer and bool tensors are passed as they are).
    fn(leaves) -> {name: tensor}: outputs, stages, saved results and gradients; it may call torch.autograd.grad.
    stores: name -> dtype in which the candidate stores that result (names not in it keep `compute`).
    Returns k dicts; every tensor is rounded once to its store dtype, detached, on the leaves' device.
    """
    raise NotImplementedError
