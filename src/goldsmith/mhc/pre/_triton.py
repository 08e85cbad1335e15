"""mhc.pre on a GPU: projection (first read of x), coefficients in registers, collapse to h_in (second read of x).

Elements moved per token at n = 4: forward 4D + 5D; backward 5D (dots) + 5D + 4D (dx).
"""

from __future__ import annotations

from torch import Tensor

from .._kernels import pipeline

LAUNCHES_ONLY = True
unsupported = pipeline.unsupported


def forward(
    x: Tensor, phi: Tensor, alpha: Tensor, bias: Tensor, gamma: Tensor | None, *, form: str, **options: object
) -> tuple[Tensor, ...]:
    results = pipeline.forward(x, phi, alpha, bias, gamma, collapsed=True, **options)
    return tuple(results[name] for name in ("h_in", "h_post", "h_res", "inv_rms", "h_mix"))


def backward(grads: dict, tensors: dict, options: dict, needs: frozenset) -> dict[str, Tensor]:
    return pipeline.backward(tensors, options, u=grads["h_in"], h_post=grads["h_post"], h_res=grads["h_res"])
