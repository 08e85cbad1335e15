"""mhc.head on a GPU: mhc.pre with n mixes instead of 2n + n*n, without Sinkhorn."""

from __future__ import annotations

from torch import Tensor

from .._kernels import pipeline

LAUNCHES_ONLY = True
unsupported = pipeline.unsupported


def forward(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, **options: object
) -> tuple[Tensor, ...]:
    results = pipeline.forward(x, phi, alpha, bias, gamma, collapsed=True, output="h", **options)
    return tuple(results[name] for name in ("h", "inv_rms", "h_mix"))


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    return pipeline.backward(tensors, options, u=grads["h"])
